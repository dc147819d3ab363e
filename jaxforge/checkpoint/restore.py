"""Start of a run: its own newest checkpoint, another checkpoint, or initial values."""

import contextlib
import dataclasses
import logging
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jaxtyping import PyTree

from jaxforge.checkpoint.checksums import begin
from jaxforge.checkpoint.layout import (
    drop_unsaved,
    fill_missing,
    model_tree,
    split_adapters,
    stored_state,
)
from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.checkpoint.paths import find, find_step, has_run
from jaxforge.checkpoint.relayout import as_groups, by_layer, by_stage
from jaxforge.checkpoint.replica.reading import Replica, ReplicaError
from jaxforge.config.checkpoint import CheckpointConfig
from jaxforge.config.job import JobConfig
from jaxforge.config.mixers import is_of_indexer
from jaxforge.errors import UserError
from jaxforge.model.transformer import Params, join
from jaxforge.optim.outer import build_outer_optimizer
from jaxforge.optim.trees import split
from jaxforge.parallel.groups import number_of_groups
from jaxforge.parallel.host_memory import in_own_memory
from jaxforge.parallel.sharding import param_shardings
from jaxforge.program import Program
from jaxforge.state.progress import Progress
from jaxforge.state.train_state import (
    GuardState,
    TrainState,
    placed_like,
    with_counts,
)
from jaxforge.step.initial_state import regroup
from jaxforge.storage import urls

log = logging.getLogger(__name__)


class Source(Protocol):
    """Checkpoint from which a run can start."""

    @property
    def name(self) -> str:
        """Name for the log."""
        ...

    @property
    def has_optimizer(self) -> bool:
        """True if the checkpoint holds more than weights."""
        ...

    @property
    def groups(self) -> int:
        """Number of groups that trained apart; 0 if devices trained together."""
        ...

    def progress(self) -> Progress:
        """Return the progress of the checkpoint's run; the beginning for weights only."""
        ...

    def restore(self, like: TrainState) -> tuple[TrainState, Progress]:
        """Restore state and progress, with the shardings of `like`.

        Arrays have memory of their own (`parallel.host_memory`), best one after another.
        """
        ...

    def restore_model(self, like: PyTree) -> PyTree:
        """Restore the model's part of the state (`layout.model_tree`), at least the parameters."""
        ...


OpenForeign = Callable[[str, JobConfig], Source]
"""(path, config) -> checkpoint of another code base."""


@dataclasses.dataclass(frozen=True)
class Saved:
    """Step of a jaxforge run, as a `Source`."""

    checkpoints: Checkpoints
    step: int

    @property
    def name(self) -> str:
        """Step and run, for the log."""
        return f"step {self.step} of {self.checkpoints.directory.parent}"

    @property
    def has_optimizer(self) -> bool:
        """True if the checkpoint holds more than weights; an import may not."""
        return self.checkpoints.has_optimizer(self.step)

    @property
    def groups(self) -> int:
        """Number of groups that trained apart; 0 if devices trained together."""
        return self.checkpoints.groups(self.step)

    def progress(self) -> Progress:
        """Return the progress of the checkpoint's run."""
        return self.checkpoints.progress(self.step)

    def restore(self, like: TrainState) -> tuple[TrainState, Progress]:
        """Restore state and progress."""
        return self._read(self.checkpoints.restore, like)

    def restore_model(self, like: PyTree) -> PyTree:
        """Restore the model's part of the state."""
        return self._read(self.checkpoints.restore_model, like)

    def _read(self, restore: Callable[[Any, int], Any], like: PyTree) -> Any:  # noqa: ANN401
        """Return what is restored; Orbax gives all arrays at once."""
        leaves, tree = jax.tree.flatten(restore(like, self.step))
        for i, leaf in enumerate(leaves):  # each is freed once it is copied
            leaves[i] = in_own_memory(leaf) if isinstance(leaf, jax.Array) else leaf
        return jax.tree.unflatten(tree, leaves)


def starting_state(
    program: Program,
    checkpoints: Checkpoints,
    open_foreign: OpenForeign | None = None,
    local: Checkpoints | None = None,
    replicas: Sequence[Replica] = (),
) -> tuple[TrainState, Progress]:
    """Return the starting state: the newest own checkpoint, else that of another run, else new.

    Another run's checkpoint is that of `checkpoint.load_path` or `checkpoint.branch_from`. A branch
    has the full state and goes on with the data; its best metric and early stopping begin anew.

    A replica is preferred to a checkpoint of the same step. A replica that cannot be restored is
    left out with a warning. A damaged checkpoint is an error.

    A checkpoint of weights only starts at step 0. `checkpoint.exclude_from_loading` excludes parts
    of `load_path`: without "model", weights are new; without "optimizer", moments and schedule
    start anew; without "progress", steps and data are counted from 0; without "indexer", which
    `load_path` must lack, indexers of sparse attention are new, and moments.

    Args:
        program: program of the run.
        checkpoints: checkpoints of the run.
        open_foreign: opens a `load_path` that is not a jaxforge run. None: `load_path` must be one.
        local: local checkpoints of the run (`checkpoint.local`).
        replicas: complete replicas of the run in memory (`checkpoint.replica`).
    """
    candidates: list[Saved | Replica] = [
        *replicas,
        *(
            Saved(source, step)
            for source in (checkpoints, local)
            if source and (step := source.latest()) is not None
        ),
    ]
    # The sort is stable: of the same step, replicas come first.
    for newest in sorted(candidates, key=lambda saved: saved.step, reverse=True):
        try:
            return start_from(newest, program, open_foreign=open_foreign)
        except ReplicaError as error:
            log.warning("%s; the next older checkpoint is used", error)
    return _new_run(program, open_foreign)


def _new_run(program: Program, open_foreign: OpenForeign | None) -> tuple[TrainState, Progress]:
    """Return the state of a run without checkpoints: another run's or new."""
    config, section = program.config, program.config.checkpoint
    if config.lora.rank and not section.branch:
        return _with_new_adapters(program, open_foreign)
    if not section.start_path:
        return program.init(), Progress()
    with opened(section, config, open_foreign) as source:
        if section.branch and not source.has_optimizer:
            raise UserError(
                f"checkpoint.branch_from: {source.name} holds weights only. Start a new run with "
                "its weights by checkpoint.load_path"
            )
        state, progress = start_from(
            source, program, section.exclude_from_loading, open_foreign=open_foreign
        )
    # It is another run from here on: its identity, evaluation and rollbacks are new.
    progress = dataclasses.replace(
        progress, run_id=Progress().run_id, validation=None, rollbacks=[], frozen={}
    )
    if section.branch:
        return state, dataclasses.replace(
            progress, best_metric=None, best_step=None, best_name="", early_stop={}
        )
    return state, dataclasses.replace(progress, data={})


def find_start(section: CheckpointConfig) -> tuple[Path, int]:
    """Return the run and step from which a new run starts.

    Raises:
        UserError: the checkpoint does not exist, or is not a checkpoint of jaxforge.
    """
    if section.branch:
        run, step = section.branch
        return find_step(urls.path(run, "checkpoint.branch_from"), step)
    assert section.load_path
    return find(urls.path(section.load_path, "checkpoint.load_path"))


@contextlib.contextmanager
def opened(
    section: CheckpointConfig, config: JobConfig, open_foreign: OpenForeign | None
) -> Iterator[Source]:
    """Open the start of a run: a run of jaxforge or, with `open_foreign`, any other checkpoint."""
    path = section.start_path
    assert path
    # KempnerForge's checkpoints have the same names, so that the content decides.
    if open_foreign is not None and not section.branch and not has_run(path):
        yield open_foreign(path, config)
        return
    run, step = find_start(section)
    with contextlib.closing(Checkpoints(run, section, read_only=True)) as checkpoints:
        yield Saved(checkpoints, step)


def at_path(config: JobConfig, path: str) -> CheckpointConfig:
    """Return the `[checkpoint]` section with another start."""
    return config.checkpoint.with_values({"load_path": path, "branch_from": None})


def start_from(
    source: Source,
    program: Program,
    excluded: Collection[str] = (),
    *,
    open_foreign: OpenForeign | None = None,
) -> tuple[TrainState, Progress]:
    """Restore state and progress of a checkpoint without the `excluded` parts.

    Args:
        source: the checkpoint.
        program: program of the run.
        excluded: see `starting_state`.
        open_foreign: opens the model that adapters belong to, if it is not a jaxforge run.

    Raises:
        UserError: the checkpoint holds weights only, and "model" is excluded.
    """
    # Checkpoints have layers in order, the run perhaps not: restored in the first order, rearranged
    # on the devices after that.
    like, stack = stored_state(program.abstract_state()), program.model.stack
    by_layers = by_layer(like, stack)
    has_optimizer = source.has_optimizer and not {"optimizer", "indexer"} & set(excluded)
    if "model" in excluded and not source.has_optimizer:
        raise UserError(
            f"{source.name} holds weights only, and checkpoint.exclude_from_loading leaves "
            'nothing to load: remove "model" from it'
        )
    if has_optimizer:
        log.info("resuming from %s", source.name)
        if source.groups == number_of_groups(program.config):
            state, progress = source.restore(by_layers)
            state = by_stage(state, stack, like)
        else:
            state, progress = _regrouped(program, source)
        if "model" in excluded:
            new = stored_state(program.init())
            state = dataclasses.replace(
                state, params=new.params, model_state=new.model_state, ema=new.ema
            )
    elif "model" in excluded:
        progress = source.progress()
        state = _with_progress(program.init(), progress)
    else:
        log.info("starting with the weights of %s", source.name)
        paths = flatten_dict(like.params) if "indexer" in excluded else ()
        absent = {path for path in paths if is_of_indexer(".".join(path))}
        layers_params, params = (split(x, absent)[1] for x in (by_layers.params, like.params))
        restored = source.restore_model(model_tree(layers_params, by_layers.model_state))
        like_model = model_tree(params, like.model_state)
        # Weights of a checkpoint without non-trainable state: it is new.
        restored = by_stage(restored, stack, drop_unsaved(like_model, restored))
        if "model_state" in restored:
            restored = fill_missing(restored, like_model)
        if absent:
            indexers = _draw(program, lambda params: split(params, absent)[0], like.params)
            restored = {**restored, "params": join(restored["params"], indexers)}
        state = program.init_from(restored)
        progress = source.progress()
        state = _with_progress(state, progress)
    if program.config.lora.rank:
        base = load_base(program, open_foreign, progress.base)
        state = dataclasses.replace(state, params=join(base.params, state.params))
    if "progress" in excluded:
        return _with_progress(state, Progress()), Progress()
    return state, progress


def _regrouped(program: Program, source: Source) -> tuple[TrainState, Progress]:
    """Restore a checkpoint of another number of groups (`initial_state.regroup`)."""
    config, model = program.config, program.model
    n, saved = number_of_groups(config), source.groups
    log.info("%s is of %d groups that train apart, this run has %d", source.name, saved, n)
    together = config.with_values({"train.outer_interval": 0})
    like = Program(together, program.mesh, model=model).abstract_state()
    saved_like = by_layers = by_layer(like, model.stack)
    if saved:
        outer = program.abstract_state().opt_state if n else ()
        saved_like = as_groups(by_layers, outer, saved)
    state, progress = source.restore(saved_like)
    at = program.shardings if n else jax.tree.map(lambda leaf: leaf.sharding, by_layers)
    outer_optimizer = build_outer_optimizer(config, model.axes)
    change: Any = jax.jit(lambda state: regroup(state, outer_optimizer, n), out_shardings=at)
    state = change(state) if n else by_stage(change(state), model.stack, like)
    return _with_progress(state, progress), progress


class Base(NamedTuple):
    """Model that adapters belong to.

    Attributes:
        params: its parameters.
        model_state: its non-trainable state; empty if the checkpoint has none.
        record: dtype and hash of each parameter, for `Progress.base`.
    """

    params: Params
    model_state: Params
    record: dict[str, Any]


def load_base(
    program: Program,
    open_foreign: OpenForeign | None,
    recorded: Mapping[str, Any] = types.MappingProxyType({}),
) -> Base:
    """Load the model that the adapters of a run belong to, from `checkpoint.load_path`.

    Args:
        program: program of the run.
        open_foreign: opens a model that is not a jaxforge run.
        recorded: `Progress.base` of the checkpoint with the adapters.

    Raises:
        UserError: there is no model, it does not match the config, or it is not the recorded one.
    """
    config, model = program.config, program.model
    path = config.checkpoint.load_path
    if path is None:
        raise UserError(
            f"lora.rank = {config.lora.rank} adapts a trained model: set checkpoint.load_path to it"
        )
    abstract = split_adapters(model.abstract)[1], model.state.abstract
    shardings = (
        split_adapters(param_shardings(model.abstract, model.axes, program.mesh))[1],
        param_shardings(*model.state, program.mesh),
    )
    like = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        model_tree(*abstract), model_tree(*shardings),
    )  # fmt: skip
    with opened(at_path(config, path), config, open_foreign) as source:
        log.info("adapters belong to %s", source.name)
        restored, record = restore_recorded(source, by_layer(like, model.stack))
    # Adapters of another base give wrong outputs without an error.
    if name := changed_array(record, recorded):
        raise UserError(
            f"checkpoint.load_path = {path} is not the model that the adapters were trained with: "
            f"{name} differs. Restore that model, or set checkpoint.load_path to a copy"
        )
    restored = by_stage(restored, model.stack, drop_unsaved(like, restored))
    return Base(restored["params"], restored.get("model_state", {}), record)


def restore_recorded(source: Source, like: PyTree) -> tuple[PyTree, dict[str, Any]]:
    """Restore a model that is not trained; return it with dtype and hash of each parameter."""
    restored = source.restore_model(like)
    hashes = begin(restored["params"])()
    dtypes = {n: str(x.dtype) for n, x in flatten_dict(restored["params"], sep=".").items()}
    return restored, {name: [dtypes[name], value] for name, value in hashes.items()}


def changed_array(record: Mapping[str, Any], recorded: Mapping[str, Any]) -> str | None:
    """Return the first array that differs from a record; arrays of another dtype do not count."""
    for name, (dtype, value) in recorded.items():
        if name not in record or (record[name][0] == dtype and record[name][1] != value):
            return name
    return None


def _with_new_adapters(
    program: Program, open_foreign: OpenForeign | None
) -> tuple[TrainState, Progress]:
    """Return the state before the first step: the base model, and new or loaded adapters."""
    model, lora = program.model, program.config.lora
    base = load_base(program, open_foreign)
    like, _ = split_adapters(program.abstract_state().params)
    if lora.adapter is not None:
        section = at_path(program.config, lora.adapter)
        with opened(section, program.config, open_foreign) as source:
            log.info("starting with the adapters of %s", source.name)
            adapters = source.restore_model({"params": by_layer(like, model.stack)})["params"]
            adapters = by_stage(adapters, model.stack, like)
    else:
        adapters = _draw(program, lambda params: split_adapters(params)[0], like)
    variables = {"params": join(base.params, adapters)}
    if base.model_state:
        like_state = {"model_state": program.abstract_state().model_state}
        variables = fill_missing({**variables, "model_state": base.model_state}, like_state)
    return program.init_from(variables), Progress(base=base.record)


def _draw(program: Program, select: Callable[[Params], Params], like: Params) -> Params:
    """Return the initial values of the selected parameters; no others are computed.

    Args:
        program: program of the run.
        select: parameters -> those to draw.
        like: shapes and shardings, at least of these parameters.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, select(like))
    draw: Any = jax.jit(lambda key: select(program.model.init(key)), out_shardings=shardings)
    with program.context():
        return draw(jax.random.key(program.config.train.seed))


def _with_progress(state: TrainState, progress: Progress) -> TrainState:
    """Return the state with the counters of another progress."""
    # The window of good losses is not carried over: it belongs to other weights.
    scales_loss = state.guard.loss_scale is not None
    guard = placed_like(GuardState.fresh(progress.skipped, scales_loss=scales_loss), state.guard)
    step = jax.device_put(jnp.asarray(progress.step, state.step.dtype), state.step.sharding)
    return with_counts(dataclasses.replace(state, step=step, guard=guard), progress)
