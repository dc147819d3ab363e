"""Start of a run: its own newest checkpoint, another checkpoint, or initial values."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxforge.checkpoint.layout import drop_unsaved, fill_missing, model_tree
from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.checkpoint.paths import find, find_step, has_run
from jaxforge.checkpoint.relayout import by_layer, by_stage
from jaxforge.checkpoint.replica.reading import ReplicaError
from jaxforge.checkpoint.replica.source import Replica
from jaxforge.config.checkpoint import CheckpointConfig
from jaxforge.config.job import JobConfig
from jaxforge.errors import UserError
from jaxforge.program import Program
from jaxforge.state.guard_state import GuardState
from jaxforge.state.progress import Progress
from jaxforge.state.train_state import TrainState, with_counts
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

    def progress(self) -> Progress:
        """Return the progress of the checkpoint's run; the beginning for weights only."""
        ...

    def restore(self, like: TrainState) -> tuple[TrainState, Progress]:
        """Restore state and progress, with the shardings of `like`."""
        ...

    def restore_model(self, like: PyTree) -> PyTree:
        """Restore the model's part of the state (`layout.model_tree`), at least the parameters."""
        ...


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

    def progress(self) -> Progress:
        """Return the progress of the checkpoint's run."""
        return self.checkpoints.progress(self.step)

    def restore(self, like: TrainState) -> tuple[TrainState, Progress]:
        """Restore state and progress."""
        return self.checkpoints.restore(like, self.step)

    def restore_model(self, like: PyTree) -> PyTree:
        """Restore the model's part of the state."""
        return self.checkpoints.restore_model(like, self.step)


def starting_state(
    program: Program,
    checkpoints: Checkpoints,
    open_foreign: Callable[[str, JobConfig], Source] | None = None,
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
    start anew; without "progress", steps and data are counted from 0.

    Args:
        program: program of the run.
        checkpoints: checkpoints of the run.
        open_foreign: opens a `load_path` that is no jaxforge run. None: `load_path` must be one.
        local: local checkpoints of the run (`checkpoint.local`).
        replicas: complete replicas of the run in memory (`checkpoint.replica`).
    """
    config = program.config
    own: list[Saved | Replica] = [
        *replicas,
        *(
            Saved(source, step)
            for source in (checkpoints, local)
            if source and (step := source.latest()) is not None
        ),
    ]
    for newest in sorted(own, key=lambda saved: saved.step, reverse=True):  # stable: replicas first
        try:
            return start_from(newest, program)
        except ReplicaError as error:
            log.warning("%s; the next older checkpoint is used", error)
    section, start_path = config.checkpoint, config.checkpoint.start_path
    if not start_path:
        return program.init(), Progress()
    with contextlib.ExitStack() as stack:
        source: Source
        if open_foreign is None or section.branch or has_run(start_path):
            run, step = find_start(section)
            theirs = Checkpoints(run, section, read_only=True)
            stack.callback(theirs.close)
            source = Saved(theirs, step)
        else:
            source = open_foreign(start_path, config)
        if section.branch and not source.has_optimizer:
            raise UserError(
                f"checkpoint.branch_from: {source.name} holds weights only. Start a new run with "
                "its weights by checkpoint.load_path"
            )
        state, progress = start_from(source, program, section.exclude_from_loading)
    fresh = Progress()  # a new run begins here
    if section.branch:
        progress = dataclasses.replace(progress, best_metric=None, best_step=None, early_stop={})
        return state, dataclasses.replace(
            progress, run_id=fresh.run_id, validation=None, rollbacks=[]
        )
    progress = dataclasses.replace(
        progress, run_id=fresh.run_id, validation=None, rollbacks=[], data={}
    )
    return state, progress


def find_start(section: CheckpointConfig) -> tuple[Path, int]:
    """Return the run and step from which a new run starts.

    Raises:
        UserError: the checkpoint does not exist, or is no checkpoint of jaxforge.
    """
    if section.branch:
        run, step = section.branch
        return find_step(urls.path(run, "checkpoint.branch_from"), step)
    assert section.load_path
    return find(urls.path(section.load_path, "checkpoint.load_path"))


def start_from(
    source: Source, program: Program, excluded: Collection[str] = ()
) -> tuple[TrainState, Progress]:
    """Restore state and progress of a checkpoint without the `excluded` parts.

    Raises:
        UserError: the checkpoint holds weights only, and "model" is excluded.
    """
    like, stack = program.abstract_state(), program.model.stack
    wanted = by_layer(like, stack)
    has_optimizer = source.has_optimizer and "optimizer" not in excluded
    if "model" in excluded and not source.has_optimizer:
        raise UserError(
            f"{source.name} holds weights only, and checkpoint.exclude_from_loading leaves "
            'nothing to load: remove "model" from it'
        )
    if has_optimizer:
        log.info("resuming from %s", source.name)
        state, progress = source.restore(wanted)
        state = by_stage(state, stack, like)
        if "model" in excluded:
            new = program.init()
            state = dataclasses.replace(
                state, params=new.params, model_state=new.model_state, ema=new.ema
            )
    elif "model" in excluded:
        progress = source.progress()
        state = _with_progress(program.init(), progress)
    else:
        log.info("starting with the weights of %s", source.name)
        restored = source.restore_model(model_tree(wanted.params, wanted.model_state))
        like_model = model_tree(like.params, like.model_state)
        restored = by_stage(restored, stack, drop_unsaved(like_model, restored))
        if "model_state" in restored:
            restored = fill_missing(restored, like_model)
        state = program.init_from(restored)
        progress = source.progress()
        state = _with_progress(state, progress)
    if "progress" in excluded:
        return _with_progress(state, Progress()), Progress()
    return state, progress


def _with_progress(state: TrainState, progress: Progress) -> TrainState:
    """Return the state with the counters of another progress."""
    scales_loss = state.guard.loss_scale is not None
    guard = GuardState.fresh(progress.skipped, scales_loss=scales_loss)
    position = jnp.asarray(progress.step, state.step.dtype), guard
    step, guard = jax.device_put(position, state.step.sharding)
    return with_counts(dataclasses.replace(state, step=step, guard=guard), progress)
