"""Layout of a train state in a checkpoint: plain nested dicts, named by content.

    step                    steps attempted
    params/...              parameters, by module and name
    optimizer/updates       updates made
    optimizer/mu, nu/...    moments (`optim`), each a tree like params or a part of it
    optimizer/mu_scales/... and their scales, where they are in eight bits
    optimizer/expert_updates/... updates of each expert, where idle ones are skipped
    guard/...               counts of bad steps, losses of good ones
    model_state/...         what the model keeps that is not trained, where it keeps any

The counts of samples and tokens are in `progress`, the JSON next to the arrays.

Nothing here depends on how the optimizer is chained, and no Python class is needed to read it.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import PyTree

from jaxforge.checkpoint.paths import is_precision_specific
from jaxforge.config.model import EXPERTS, LAYERS
from jaxforge.config.optimizer import EXPERT_FIELD
from jaxforge.model.transformer import Params, join
from jaxforge.parallel.sharding import Axes
from jaxforge.state.guard_state import GuardState
from jaxforge.state.train_state import TrainState, part_like

Tree = dict[str, Any]

_FILES = 16
"""Data files of a process, as far as these bounds of their bytes allow."""
_LEAST, _MOST = 64 << 20, 2 << 30


def to_tree(state: TrainState) -> Tree:
    """The state as nested dicts; leaves may be arrays or their abstract values."""
    return {
        "step": state.step,
        **model_tree(state.params, state.model_state),
        "optimizer": _fields(state.opt_state),
        "guard": state.guard.arrays(),
    }


def model_tree(params: Params, model_state: Params) -> Tree:
    """The part of the state that is the model."""
    return {"params": params, **({"model_state": model_state} if model_state else {})}


def drop_unsaved(wanted: Tree, saved: Tree) -> Tree:
    """Return the wanted tree without precision-specific arrays that were not saved."""
    there, flat = flatten_dict(saved, sep="."), flatten_dict(wanted, sep=".")
    wanted_leaves = {
        k: leaf for k, leaf in flat.items() if k in there or not is_precision_specific(k)
    }
    return wanted if len(wanted_leaves) == len(flat) else unflatten_dict(wanted_leaves, sep=".")


def has_extra_leaves(wanted: Tree, saved: Tree) -> bool:
    """Return whether precision-specific arrays were saved that the wanted tree lacks."""
    spare = flatten_dict(saved, sep=".").keys() - flatten_dict(wanted, sep=".").keys()
    return any(map(is_precision_specific, spare))


def drop_precision_specific(fields: Tree) -> Tree:
    """The fields of an optimizer's state, less those of some precisions alone."""
    return {
        name: field
        for name, field in fields.items()
        if not is_precision_specific(f"optimizer.{name}.")
    }


def differing_key(first: Iterable[str], other: Iterable[str]) -> str:
    """The key of the config that two optimizer states differ in, by the names of their fields."""
    names = [{n.removesuffix("_scales") for n in each} for each in (first, other)]
    if names[0] == names[1]:
        return "train.opt_state_dtype"
    is_per_expert = all(name.startswith(EXPERT_FIELD) for name in names[0] ^ names[1])
    return "optimizer.skip_idle_experts" if is_per_expert else "optimizer.name"


def fill_missing(tree: Tree, wanted: Tree) -> Tree:
    """A tree with zeros for the wanted arrays of a precision that it lacks."""
    flat = flatten_dict(tree, sep=".")
    zeros = {
        name: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
        for name, leaf in flatten_dict(wanted, sep=".").items()
        if is_precision_specific(name) and name not in flat
    }
    return unflatten_dict({**flat, **zeros}, sep=".") if zeros else tree


def variables(tree: Tree) -> Params:
    """Return the model's variables from a tree that contains them."""
    return join(tree["params"], tree.get("model_state", {}))


def from_tree(tree: Tree, like: TrainState) -> TrainState:
    """The state whose optimizer is chained as in `like`, with the counts of `like`.

    What is there in the precision of `like` alone, and not in the tree, begins with zeros.
    """
    tree = fill_missing(tree, to_tree(like))
    return TrainState(
        step=tree["step"],
        params=tree["params"],
        opt_state=optax.tree.set(like.opt_state, **tree["optimizer"]),
        guard=GuardState(**tree["guard"]),
        counts=like.counts,
        model_state=tree.get("model_state", {}),
    )


def save_args(tree: Tree, axes: PyTree) -> Tree:
    """Storage layout of every leaf: parameters and moments in chunks of one layer, and one expert.

    So that an export can read piece by piece, in bounded memory.
    """

    def chunked(names: Axes) -> ocp.SaveArgs:
        stacked = (i for i, name in enumerate(names) if name in (LAYERS, EXPERTS))
        return ocp.SaveArgs(shard_axes=tuple(stacked))

    stacked = jax.tree.map(chunked, axes, is_leaf=lambda node: isinstance(node, tuple))
    args = jax.tree.map(lambda _: ocp.SaveArgs(), tree)
    moments = {
        name: part_like(value, stacked)
        for name, value in tree["optimizer"].items()
        if isinstance(value, dict) and not name.startswith(EXPERT_FIELD)
    }
    return {**args, "params": stacked, "optimizer": {**args["optimizer"], **moments}}


def file_bytes(tree: Tree) -> int:
    """Bytes of a data file, the same for all processes; no chunk has more.

    Orbax gathers what goes into a file, then writes it: with its own 2 GiB a disk would have
    nothing to do until all is gathered.
    """
    share = sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) // jax.process_count()
    return min(max(share // _FILES, _LEAST), _MOST)


def _fields(opt_state: PyTree) -> Tree:
    """Named fields of every transform's state in the chain; no two may share a name."""
    fields: Tree = {}
    for state in opt_state:
        assert not fields.keys() & set(state._fields)
        fields |= {name: field for name, field in state._asdict().items() if field is not None}
    return fields
