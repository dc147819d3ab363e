"""Reconstruction of a run before any of its steps: config, state and batches.

A batch is a function of config, seed and position, and a step is a function of state and batch. The
state before a step is therefore replayed from the nearest checkpoint before it, or from the start
if there is none. On the run's own mesh the result is bit-identical.

    checkpoint 40                        step 43
         | step 41 -> | step 42 -> | state and batch of step 43
"""

import contextlib
import functools
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.checkpoint.restore import Saved, start_from, starting_state
from jaxforge.config import axes, rules
from jaxforge.config.job import JobConfig
from jaxforge.config.reading.load import make_config
from jaxforge.data import loader, sources
from jaxforge.data.segments import Segment
from jaxforge.errors import UserError
from jaxforge.parallel import compilation
from jaxforge.parallel.mesh import data_parallel_size, make_mesh
from jaxforge.program import Program
from jaxforge.runs import run_directory
from jaxforge.state.progress import Progress
from jaxforge.state.train_state import TrainState
from jaxforge.step.train_step import Batch, Controls, Metrics
from jaxforge.storage import trust
from jaxforge.training.foreign import open_foreign
from jaxforge.training.frozen import open_frozen
from jaxforge.training.training_data import TrainingData, batches_from, phases_of

log = logging.getLogger(__name__)


class PastRun(Program):
    """A run whose steps can be replayed, with the config of a step.

    Attributes:
        run: the run directory.
        start: step from which the run was started with this config.
        overrides: settings over the run's config.
        checkpoints: the run's checkpoints.
    """

    def __init__(
        self, config: JobConfig, mesh: Mesh, run: Path, start: int, overrides: Sequence[str]
    ) -> None:
        super().__init__(config, mesh)
        self.run, self.start, self.overrides = run, start, overrides
        self.checkpoints = Checkpoints(
            run, config.checkpoint, self.model.axes, stack=self.model.stack, read_only=True
        )

    @functools.cached_property
    def dataset(self) -> Any:  # noqa: ANN401
        """Training dataset of the run."""
        return sources.open_training_data(self.config)

    def walk(self, step: int) -> "Walk":
        """Return a walk that stands before a step: the next attempted update is number `step`.

        Raises:
            UserError: the step does not exist, or the run began with files that no longer exist.
        """
        assert step > self.start, "the step belongs to another config"
        walk = Walk(self, *self._nearest(step))
        if walk.progress.step < step - 1:
            log.info("replaying from step %d to %d", walk.progress.step, step - 1)
        while walk.progress.step < step - 1:
            walk.advance()
        return walk

    def _nearest(self, step: int) -> tuple[TrainState, Progress]:
        """Return the nearest stored or initial state before a step."""
        # A checkpoint before `start` has the state of another config: walk there with that config.
        saved = max((step_ for step_ in self.checkpoints.steps() if step_ < step), default=None)
        if saved is not None and saved >= self.start:
            saved_state = Saved(self.checkpoints, saved)
            state, progress = start_from(saved_state, self, open_foreign=open_foreign)
            _catch_up(progress, self.checkpoints)
            return state, progress
        if self.start > 0:  # earlier steps belong to another config
            with open_past(self.run, self.start, self.overrides) as earlier:
                walk = earlier.walk(self.start + 1)
            return jax.device_put(walk.state, self.shardings), walk.progress
        no_checkpoints = Checkpoints(self.run / "none", self.config.checkpoint, read_only=True)
        with contextlib.closing(no_checkpoints):
            state, progress = starting_state(self, no_checkpoints, open_foreign)
        if progress.step >= step:
            raise UserError(
                f"the run began at step {progress.step}, with {self.config.checkpoint.start_path}: "
                f"it has no step {step}"
            )
        return state, progress


class Walk:
    """Replay of a run, step by step.

    Attributes:
        state: state before the next step.
        progress: progress before the next step.
        batch: batch of the next step.
    """

    def __init__(self, past: PastRun, state: TrainState, progress: Progress) -> None:
        config, phases = past.config, phases_of(past.config, past.dataset)
        ramp = config.train.ramp(data_parallel_size(past.mesh))
        self._past, self._step = past, past.step
        self.state, self.progress = state, progress
        self._frozen = open_frozen(past, open_foreign, progress)
        self._data = TrainingData(
            lambda progress: batches_from(progress, config, past.mesh, past.dataset, phases, ramp),
            phases,
        )
        self._data.open(progress)
        self._look_ahead()

    @property
    def controls(self) -> Controls:
        """Host's decisions about the next step."""
        return self._data.controls(self.progress.step, self._past.config.train.iterations_to_skip)

    def advance(self) -> Metrics:
        """Apply the next step, as the run did, and return its metrics."""
        # Before the counters advance: the controls are those of the step to come.
        controls = self.controls
        batch = next(self._data)
        self._data.note_mixture(self.progress)
        self.state, metrics = self._step(self.state, self._complete(batch), controls)
        # Before padding: padded rows are not samples of the run.
        microbatches, rows, length = batch["labels"].shape
        self.progress.advance(microbatches * rows, microbatches * rows * length)
        self._look_ahead()
        return metrics

    def _complete(self, batch: Batch) -> Batch:
        """Return a batch as the step takes it."""
        if self._frozen is not None:
            batch = self._frozen(self.state.variables, batch)
        return self._past.padded(batch)

    def _look_ahead(self) -> None:
        if self.progress.step < self._past.config.train.max_steps:
            self.batch = self._data.peek()

    def name_of(self, row: int) -> str:
        """Return the name of the sequence in a row of the next batch, over all microbatches."""
        past, position = self._past, self.progress.samples + row
        drawn = [Segment(*mixture) for mixture in self.progress.mixtures]
        phases = phases_of(past.config, past.dataset)
        drawn = phases.recorded(drawn, self.progress.step, self.progress.samples)
        return loader.describe_sample(past.config, past.mesh, past.dataset, drawn, position)


@contextlib.contextmanager
def open_past(run: Path, step: int, overrides: Sequence[str] = ()) -> Iterator[PastRun]:
    """Open a run with the config of a step.

    Args:
        run: the run directory.
        step: number of the step, from 1.
        overrides: settings over its config, such as "--distributed.tp=2".

    Raises:
        UserError: the run or the step does not exist, or it cannot run on these devices.
    """
    config_file = run_directory.config_of_step(run, step)
    checkpoints = Checkpoints(run, config_file.checkpoint, read_only=True)
    try:
        config = on_these_devices(config_file, step, checkpoints, overrides, trust.of_run(run))
        # -1: all devices. Otherwise the mesh may be smaller than this machine.
        sizes = _sizes(config)
        devices = jax.devices()[: None if -1 in sizes else math.prod(sizes)]
        rules.check(config, len(devices))
        compilation.use_cache(config.train)
        mesh = make_mesh(config, devices)
        # Opened only to read the progress, without knowing the shapes of the state.
        checkpoints.close()
        past = PastRun(config, mesh, run, run_directory.start_before(run, step), overrides)
        checkpoints = past.checkpoints
        with past.context():
            yield past
    finally:
        checkpoints.close()


def on_these_devices(
    config: JobConfig,
    step: int,
    checkpoints: Checkpoints,
    overrides: Sequence[str],
    trusts: trust.Decision = trust.never,
) -> JobConfig:
    """Return the config of a run for the devices of this process, with the batch unchanged.

    Raises:
        UserError: the run has no such step, or the settings do not fit the devices.
    """
    if not 1 <= step <= config.train.max_steps:
        raise UserError(
            f"step {step} does not exist: steps are 1 to train.max_steps = {config.train.max_steps}"
        )
    if config.train.trains_apart:
        raise UserError(
            f"replay does not support groups that train apart, as in this run: "
            f"train.outer_interval = {config.train.outer_interval}"
        )
    values = config.model_dump(mode="json", exclude_unset=True)  # two batch sizes must agree
    if any(override.startswith("--distributed.") for override in overrides):
        remeshed = make_config(values, overrides, "the run", trusts)
        overrides = [*_same_rows(config, remeshed, checkpoints, overrides), *overrides]
    else:
        overrides = [*_same_batch(config, checkpoints), *overrides]
    return make_config(values, overrides, "the run", trusts)


def _same_rows(
    config: JobConfig, remeshed: JobConfig, checkpoints: Checkpoints, overrides: Sequence[str]
) -> list[str]:
    """Return settings that keep the batch on another mesh, unless its size is overridden.

    Args:
        config: config of the run.
        remeshed: the same with the other mesh.
        checkpoints: the run's checkpoints.
        overrides: the user's settings.
    """
    is_batch_overridden = any(
        override.startswith(("--train.batch_size", "--train.global")) for override in overrides
    )
    groups = None if is_batch_overridden else _known_groups(config, checkpoints)
    if groups is None or config.train.global_batch_size:
        return []
    # Invariant: sequences of a microbatch over all data-parallel groups stay the same.
    rows, mesh = config.train.microbatch_size(groups), _sizes(remeshed)
    remaining = jax.device_count() // -math.prod(mesh) if -1 in mesh else 1  # the size of -1
    sizes = (remaining if size == -1 else size for size in mesh)
    dp = axes.data_parallel(dict(zip(axes.AXES, sizes, strict=True)))
    if dp < 1 or rows % dp:
        raise UserError(
            f"a microbatch of {rows} sequences cannot be split over {dp} data-parallel devices. "
            "Choose another mesh, or give --train.batch_size for another batch"
        )
    return [f"--train.batch_size={rows // dp}", *_same_order(config, groups)]


def _same_batch(config: JobConfig, checkpoints: Checkpoints) -> list[str]:
    """Return settings that keep the batch on the local devices; none if their number fits."""
    n_devices, groups = jax.device_count(), _data_parallel_groups(config, checkpoints)
    model_devices = math.prod(max(1, size) for size in _sizes(config)) // max(
        1, _data_parallel(config)
    )
    if groups * model_devices == n_devices:
        return []
    rows = config.train.microbatch_size(groups)
    # Every device must get the same number of sequences.
    most = max(n for n in range(1, n_devices + 1) if rows % n == 0)
    log.info(
        "the run had %d devices: replaying on %d of the local devices", groups * model_devices, most
    )
    settings = [f"--distributed.{axis}=1" for axis in axes.AXES if axis != "dp_shard"]
    settings.append(f"--distributed.dp_shard={most}")
    if not config.train.global_batch_size:
        settings.append(f"--train.batch_size={rows // most}")
    return [*settings, *_same_order(config, groups)]


def _same_order(config: JobConfig, groups: int) -> list[str]:
    if config.data.order == "torch" and not config.data.torch_ranks:
        return [f"--data.torch_ranks={groups}"]
    return []


def _data_parallel_groups(config: JobConfig, checkpoints: Checkpoints) -> int:
    """Return the number of data-parallel groups of the run.

    Raises:
        UserError: the config leaves it to the devices, and no checkpoint shows their number.
    """
    groups = _known_groups(config, checkpoints)
    if groups is None:
        raise UserError(
            "the run's distributed.dp_shard = -1 depends on its number of devices, which is "
            "unknown. Set --distributed.dp_shard=N"
        )
    return groups


def _known_groups(config: JobConfig, checkpoints: Checkpoints) -> int | None:
    if -1 not in _sizes(config):
        return _data_parallel(config)
    train, newest = config.train, checkpoints.latest()
    if newest is not None and not train.batch_ramp and not train.global_batch_size:
        progress = checkpoints.progress(newest)
        samples_per_group = train.batch_size * train.grad_accum_steps * progress.step
        # Rollbacks skip samples, so that samples no longer tell the number of groups.
        if not progress.rollbacks and samples_per_group:
            groups, remainder = divmod(progress.samples, samples_per_group)
            return None if remainder else groups
    return None


def _data_parallel(config: JobConfig) -> int:
    sizes = zip(axes.AXES, _sizes(config), strict=True)
    return axes.data_parallel({axis: max(1, size) for axis, size in sizes})


def _sizes(config: JobConfig) -> list[int]:
    return [getattr(config.distributed, axis) for axis in axes.AXES]


def _catch_up(progress: Progress, checkpoints: Checkpoints) -> None:
    """Add the data skipped by later rollbacks to this step, which its checkpoint cannot contain."""
    newest = checkpoints.progress(checkpoints.steps()[-1])
    for jump in newest.rollbacks:
        if jump["to"] == progress.step and jump not in progress.rollbacks:
            progress.samples += jump["samples"]
            progress.rollbacks.append(jump)
