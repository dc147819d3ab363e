"""Layout of a train state in a checkpoint, and whether a saved one fits a config.

The layout is plain nested dicts, named by content:

    step                    steps attempted
    params/...              parameters, by module and name; with LoRA, those of the adapters
    optimizer/updates       updates made
    optimizer/mu, nu/...    moments (`optim`), each a tree like params or a part of it
    optimizer/mu_scales/... scales of 8-bit moments
    optimizer/expert_updates/... updates of each expert, if idle experts are skipped
    guard/...               counts of bad steps, losses of good ones
    model_state/...         non-trainable state of the model, if it has any
    ema/...                 average of the trained parameters, if `train.ema_decay` is set
    groups/params/...       of each group, if groups train apart (`train.outer_interval`): arrays
    groups/optimizer/...    have a first dimension over the groups, as those of guard/ have then;
    groups/model_state/...  optimizer/ is that of the outer optimizer

The counts of samples and tokens are in `progress`, the JSON next to the arrays.

The layout does not depend on the order of the optimizer chain, and no Python class is needed to
read it.
"""

import dataclasses
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import PyTree

from jaxforge.checkpoint.paths import EMA, GROUPS, is_optional, is_precision_specific
from jaxforge.config.fine_tuning import ADAPTER, is_adapter
from jaxforge.config.mixers import is_of_indexer
from jaxforge.config.model import EXPERTS, LAYERS, MTP
from jaxforge.config.optimizer import EXPERT_FIELD
from jaxforge.errors import UserError
from jaxforge.model.transformer import Params, join
from jaxforge.optim.trees import split
from jaxforge.state.train_state import (
    Groups,
    GuardState,
    TrainState,
    part_like,
    start_average,
)

log = logging.getLogger(__name__)

Tree = dict[str, Any]

_FILES = 16
"""Number of data files per process, subject to the limits below."""
LEAST, _MOST = 64 << 20, 2 << 30  # smallest and largest size of a data file in bytes


def to_tree(state: TrainState) -> Tree:
    """Convert the stored part of a state to nested dicts of arrays or abstract values."""
    return {
        "step": state.step,
        **model_tree(state.params, state.model_state),
        "optimizer": _fields(state.opt_state),
        "guard": state.guard.arrays(),
        **({EMA: state.ema} if state.ema else {}),
        **({GROUPS: _groups_tree(state.groups)} if state.groups else {}),
    }


def _groups_tree(groups: Groups) -> Tree:
    variables = model_tree(groups.params, groups.model_state)
    return {**variables, "optimizer": _fields(groups.opt_state)}


def saved_groups(saved: Tree) -> int:
    """Return the number of groups in a saved tree; 0 if its devices trained together."""
    return int(saved["guard"]["total"].shape[0]) if GROUPS in saved else 0


def model_tree(params: Params, model_state: Params) -> Tree:
    """Return the model's part of the state that checkpoints hold."""
    stored = stored_params(params)
    return {"params": stored, **({"model_state": model_state} if model_state else {})}


def stored_params(params: Params) -> Params:
    """Return the parameters that checkpoints hold: adapters without the base, or all."""
    adapters, _ = split_adapters(params)
    return adapters or params


def split_adapters(params: Params) -> tuple[Params, Params]:
    """Split parameters into adapters and the base model; without adapters, the first is empty."""
    paths = {path for path in flatten_dict(params) if path[-1] in ADAPTER}
    return split(params, paths)


def stored_state(state: TrainState) -> TrainState:
    """Return a state with the parameters that checkpoints hold."""
    return dataclasses.replace(state, params=stored_params(state.params))


def drop_unsaved(requested: Tree, saved: Tree) -> Tree:
    """Return the requested tree without optional arrays that were not saved."""
    saved_names, flat = flatten_dict(saved, sep=".").keys(), flatten_dict(requested, sep=".")
    leaves = {k: leaf for k, leaf in flat.items() if k in saved_names or not is_optional(k)}
    return requested if len(leaves) == len(flat) else unflatten_dict(leaves, sep=".")


def has_extra_leaves(requested: Tree, saved: Tree) -> bool:
    """Return whether optional arrays were saved that the requested tree lacks."""
    spare = flatten_dict(saved, sep=".").keys() - flatten_dict(requested, sep=".").keys()
    return any(map(is_optional, spare))


def log_average_changes(requested: TrainState, saved: Tree, path: Path) -> None:
    """Log whether a restore starts the average of the parameters anew, or drops it.

    Args:
        requested: the state that the config asks for.
        saved: the saved tree.
        path: the checkpoint.
    """
    if requested.ema and EMA not in saved:
        log.info("%s has no average of the parameters: train.ema_decay starts it from them", path)
    elif EMA in saved and not requested.ema:
        log.info("the average of the parameters in %s is dropped: train.ema_decay = 0", path)


def drop_precision_specific(fields: Tree) -> Tree:
    """Return the fields of an optimizer state without precision-specific ones."""
    return {
        name: field
        for name, field in fields.items()
        if not is_precision_specific(f"optimizer.{name}.")
    }


def differing_key(first: Iterable[str], other: Iterable[str]) -> str:
    """Return the config key in which two optimizer states differ, given their field names."""
    names = [{n.removesuffix("_scales") for n in fields} for fields in (first, other)]
    if names[0] == names[1]:
        return "train.opt_state_dtype"
    is_per_expert = all(name.startswith(EXPERT_FIELD) for name in names[0] ^ names[1])
    return "optimizer.skip_idle_experts" if is_per_expert else "optimizer.name"


def fill_missing(tree: Tree, requested: Tree) -> Tree:
    """Return a tree with zeros for requested precision-specific arrays that it lacks."""
    flat = flatten_dict(tree, sep=".")
    # Zeros are the initial values of loss scale, compensation and histories alike.
    zeros = {
        name: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
        for name, leaf in flatten_dict(requested, sep=".").items()
        if is_precision_specific(name) and name not in flat
    }
    return unflatten_dict({**flat, **zeros}, sep=".") if zeros else tree


def variables(tree: Tree) -> Params:
    """Return the model's variables from a tree that contains them."""
    return join(tree["params"], tree.get("model_state", {}))


def from_tree(tree: Tree, like: TrainState) -> TrainState:
    """Return a state with the optimizer chain and the counts of `like`, and the stored parameters.

    Precision-specific arrays that the tree lacks start from zeros, the average of the parameters
    from the parameters.
    """
    tree = fill_missing(tree, to_tree(like))
    ema = tree.get(EMA, {})
    if like.ema and not ema:
        dtype = str(jax.tree.leaves(like.ema)[0].dtype)
        at = jax.tree.map(lambda leaf: leaf.sharding, like.ema)
        # Jitted, so that each device makes its own shards.
        start: Any = jax.jit(start_average, static_argnums=1, out_shardings=at)
        trained, _ = split(tree["params"], flatten_dict(like.ema).keys())
        ema = start(trained, dtype)
    groups = None
    if like.groups:
        own = tree[GROUPS]
        opt_state = optax.tree.set(like.groups.opt_state, **own["optimizer"])
        groups = Groups(own["params"], opt_state, own.get("model_state", {}))
    return TrainState(
        step=tree["step"],
        params=tree["params"],
        opt_state=optax.tree.set(like.opt_state, **tree.get("optimizer", {})),
        guard=GuardState(**tree["guard"]),
        counts=like.counts,
        model_state=tree.get("model_state", {}),
        ema=ema,
        groups=groups,
    )


def save_args(tree: Tree, axes: PyTree) -> Tree:
    """Return the storage layout of every leaf.

    Chunks of parameters and moments hold one layer and one expert of one group, so that an export
    can read block by block in bounded memory.
    """

    def chunked(*names: str | None) -> ocp.SaveArgs:
        stacked = (i for i, name in enumerate(names) if name in (LAYERS, EXPERTS, GROUPS))
        return ocp.SaveArgs(shard_axes=tuple(stacked))

    def chunks_of(tree: Tree, *leading: str) -> Tree:
        stacked = jax.tree.map(
            lambda names: chunked(*leading, *names), axes, is_leaf=lambda n: isinstance(n, tuple)
        )
        # Counts are small: one chunk each.
        args = jax.tree.map(lambda _: ocp.SaveArgs(), tree)
        moments = {
            name: part_like(value, stacked)
            for name, value in tree["optimizer"].items()
            if isinstance(value, dict) and not name.startswith(EXPERT_FIELD)
        }
        params = part_like(tree["params"], stacked)
        average = {EMA: part_like(tree[EMA], stacked)} if EMA in tree else {}
        return {**args, "params": params, "optimizer": {**args["optimizer"], **moments}, **average}

    of_groups = {GROUPS: chunks_of(tree[GROUPS], GROUPS)} if GROUPS in tree else {}
    return {**chunks_of(tree), **of_groups}


def file_bytes(tree: Tree) -> int:
    """Return the size of a data file in bytes, equal in all processes; a chunk is not larger.

    Orbax gathers the content of a file before it writes it. With its default of 2 GiB, the disk
    would be idle until everything is gathered.
    """
    # Of all processes, so that each computes the same size.
    share = sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) // jax.process_count()
    return min(max(share // _FILES, LEAST), _MOST)


def _fields(opt_state: PyTree) -> Tree:
    """Return the named fields of all transforms in the chain; names are unique."""
    fields: Tree = {}
    for state in opt_state:
        assert not fields.keys() & set(state._fields)
        fields |= {name: field for name, field in state._asdict().items() if field is not None}
    return fields


def check_model(requested: PyTree, saved: PyTree, path: Path) -> None:
    """Compare the shapes of the model's arrays.

    Args:
        requested: the tree that the config asks for, at least its model's part.
        saved: the same part of the saved tree.
        path: the checkpoint, for the message.

    Raises:
        UserError: an array differs; the message names the first one.
    """
    actual_shapes, shapes = (_shapes(variables(tree)) for tree in (saved, requested))
    _check_adapters(shapes, actual_shapes, path)
    # Before shapes are compared: a missing module would be named by its first array.
    stored, depth = _modules(actual_shapes), _modules(shapes)
    if stored != depth:
        raise UserError(
            f"{path} does not fit [model]: model.mtp_depth = {depth}, but the checkpoint has "
            f"{stored} modules of multi-token prediction: set model.mtp_depth = {stored}"
        )
    # Saved arrays of another precision are left out by a restore.
    spare = {name for name in actual_shapes.keys() - shapes.keys() if is_precision_specific(name)}
    for name in sorted((shapes.keys() | actual_shapes.keys()) - spare):
        expected, actual = shapes.get(name, "absent"), actual_shapes.get(name, "absent")
        if expected != actual:
            is_new = actual == "absent" and is_of_indexer(name)
            hint = ', or add "indexer" to checkpoint.exclude_from_loading' if is_new else ""
            raise UserError(
                f"{path} does not fit [model]: {name} is {actual} in the checkpoint "
                f"and {expected} in the config; change [model] or checkpoint.dir{hint}"
            )


def _check_adapters(requested: Iterable[str], saved: Iterable[str], path: Path) -> None:
    """Check that both or neither of two models are adapters without their base."""
    has_adapters = [any(map(is_adapter, names)) for names in (requested, saved)]
    if has_adapters == [False, True]:
        raise UserError(
            f"{path} holds adapters without the model they belong to. Set [lora] as in its run, or "
            "merge them into a new run: jaxforge convert RUN NEW --to jaxforge"
        )
    if has_adapters == [True, False]:
        raise UserError(
            f"{path} holds a whole model, and lora.rank asks for adapters. Set checkpoint.dir to a "
            "new directory, and checkpoint.load_path to this model"
        )


def check_adapters(requested: PyTree, saved: PyTree, source: str) -> None:
    """Compare the shapes of adapters.

    Args:
        requested: the adapters that `[lora]` asks for.
        saved: those of the source.
        source: name of the source, for the message.

    Raises:
        UserError: an adapter differs; the message names the first one.
    """
    expected_shapes, actual_shapes = _shapes(requested), _shapes(saved)
    for name in sorted(expected_shapes.keys() | actual_shapes.keys()):
        expected, actual = expected_shapes.get(name, "absent"), actual_shapes.get(name, "absent")
        if expected != actual:
            raise UserError(
                f"{source} does not fit [lora]: {name} is {actual} in the adapter and {expected} "
                "in the config. Set lora.rank and lora.targets as the adapter was trained"
            )


def check_optimizer(requested: Tree, saved: Tree, path: Path) -> None:
    """Compare the shapes of the optimizers' states.

    Args:
        requested: the tree that the config asks for; without "optimizer", any is accepted.
        saved: the saved tree.
        path: the checkpoint, for the message.

    Raises:
        UserError: the checkpoint has the state of another optimizer.
    """
    if GROUPS in requested:
        check_optimizer(requested[GROUPS], saved[GROUPS], path)
    if requested["optimizer"]:
        is_outer = GROUPS in requested
        _check_fields(requested["optimizer"], saved["optimizer"], path, is_outer=is_outer)


def _check_fields(requested: Tree, saved: Tree, path: Path, *, is_outer: bool) -> None:
    saved, requested = (drop_precision_specific(fields) for fields in (saved, requested))
    if _shapes(saved) != _shapes(requested):
        expected, actual = sorted(requested), sorted(saved)
        key = "outer_optimizer.name" if is_outer else differing_key(expected, actual)
        raise UserError(
            f"{path} has the state of another optimizer than {key} asks for: it holds "
            f"{', '.join(actual)}, where {', '.join(expected)} are expected; bring it back, or "
            "start a new run from it with checkpoint.load_path and "
            'checkpoint.exclude_from_loading = ["optimizer"]'
        )


def _modules(names: Iterable[str]) -> int:
    """Return the number of modules of multi-token prediction with these parameters."""
    paths = (name.split(".") for name in names)
    return len({path[1] for path in paths if path[0] == MTP})


def _shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
    return {name: tuple(leaf.shape) for name, leaf in flatten_dict(tree, sep=".").items()}
