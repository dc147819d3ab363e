"""Training data of a run: its phases, and batches from any position.

    steps attempted    0 ............. start_step[0] ........... start_step[1] ....
    phase              0               1                         2

A phase starts with the update that is launched after `start_step` attempted steps, and depends only
on this number. The mixtures of the past are stored with the run instead, as data positions at
which each began (`Phases.recorded`): steps do not determine positions, because a rollback repeats
steps with later data, and batches may grow.
"""

import itertools
import logging
from bisect import bisect_right
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jax.sharding import Mesh

from jaxforge.config.batch_ramp import BatchRamp
from jaxforge.config.data import DataConfig
from jaxforge.config.job import JobConfig
from jaxforge.data import loader, sources
from jaxforge.data.dataset import Dataset, Mixture, Streaming
from jaxforge.data.fingerprint import (
    Fingerprint,
    check_random_tokens,
    check_unchanged,
    fingerprints,
)
from jaxforge.data.mixture import proportions
from jaxforge.data.order import data_seed
from jaxforge.data.segments import Segment, exhausted_at, limits_of
from jaxforge.data.sources import sequences_per_epoch
from jaxforge.errors import UserError
from jaxforge.parallel import agreement
from jaxforge.parallel.mesh import data_parallel_size
from jaxforge.program import Program
from jaxforge.state.progress import Progress
from jaxforge.step.train_step import Controls
from jaxforge.step.update_loss import Batch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Phases:
    """The phases of a run. Number 0 is the time before the first configured phase.

    Attributes:
        starts: first step of each phase from number 1 on, increasing.
        lr_scales: factor on the learning rate in each phase.
        mixtures: proportions of the datasets in each phase, by name; empty without
            `data.datasets`.
        lag: number of updates by which the factors, but not the mixtures, are delayed.
        limits: `Segment.limits` of all mixtures.
    """

    starts: tuple[int, ...]
    lr_scales: tuple[float, ...]
    mixtures: tuple[dict[str, float], ...]
    lag: int
    limits: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, data: DataConfig, limits: Mapping[str, int] | None = None) -> "Phases":
        """Return the phases of `[data]`."""
        phases, as_torch = data.phases, data.order == "torch"
        weights = [data.weights(phase) for phase in (None, *phases)]
        return cls(
            starts=tuple(phase.start_step for phase in phases),
            lr_scales=(1.0, *(phase.lr_scale for phase in phases)),
            mixtures=tuple(
                proportions(phase_weights, data.mix_temperature, as_torch=as_torch)
                for phase_weights in weights
            ),
            lag=int(data.phase_lr_lag),
            limits=limits or {},
        )

    def index(self, step: int) -> int:
        """Return the number of the phase after `step` attempted steps."""
        return sum(step >= start for start in self.starts)

    def lr_scale(self, step: int) -> float:
        """Return the learning rate factor of the update that is launched after `step` steps."""
        # KempnerForge applies the factor one update late (`data.phase_lr_lag`).
        return self.lr_scales[self.index(step - self.lag)]

    def recorded(self, history: Sequence[Segment], step: int, samples: int) -> list[Segment]:
        """Return the mixtures of a run so far; the last is the current mixture.

        The result is stored in the progress of the run. Thus a changed config or a rollback is a
        change of mixture like any other, and the past counts as it was drawn.

        Args:
            history: earlier result of this method; may be lists from JSON.
            step: steps attempted.
            samples: sequences drawn from the data.
        """
        segments = (Segment(*fields) for fields in history)
        # A segment of the config that no update has reached may have changed since.
        begun = [segment for segment in segments if segment.start < samples]  # others drew nothing
        return self._with_segment(begun, samples, self.mixtures[self.index(step)])

    def segments(
        self,
        history: Sequence[Segment],
        step: int,
        samples: int,
        samples_at: Callable[[int], int],
    ) -> list[Segment]:
        """Return the mixtures of a run, past and future, for `data.loader.training_batches`.

        Args:
            history: earlier result of `recorded`.
            step: steps attempted.
            samples: sequences drawn from the data.
            samples_at: returns the data position of the update that is launched after a number
                of attempted steps.
        """
        # The past as it was drawn, the future as the config says.
        known, now = self.recorded(history, step, samples), self.index(step)
        for start, mixture in zip(self.starts[now:], self.mixtures[now + 1 :], strict=True):
            known = self._with_segment(known, samples_at(start), mixture)
        return known

    def _with_segment(
        self, segments: list[Segment], start: int, mixture: dict[str, float]
    ) -> list[Segment]:
        """Return the segments with a new one appended, if the mixture or its limits change.

        An unchanged mixture must not start a new segment, which would draw other sequences.
        """
        if not mixture or (segments and segments[-1][1:] == (mixture, self.limits)):
            return segments
        return [*segments, Segment(start, mixture, self.limits)]


class DataSets(NamedTuple):
    """The data of a run.

    Attributes:
        training: the training data.
        evaluation: evaluation sets by name.
        identity: fingerprints of all data.
    """

    training: Dataset | Mixture | Streaming
    evaluation: dict[str, Dataset]
    identity: dict[str, Fingerprint]


class TrainingData:
    """The batches of a run; an iterator after `open`.

    Args:
        open_batches: returns the batches from the position of a progress on.
        phases: the mixture and learning rate factor of each step.
    """

    def __init__(self, open_batches: Callable[[Progress], Iterator[Batch]], phases: Phases) -> None:
        self._open, self._phases = open_batches, phases
        self._batches: Iterator[Batch] = iter(())

    @classmethod
    def of(
        cls, program: Program, data_sets: DataSets, progress: Progress, *, has_begun: bool
    ) -> "TrainingData":
        """Return the batches of a run, after a check that its data did not change.

        The data are recorded in `progress`; nothing is read yet.

        Raises:
            UserError: as `record_data`; or the data end before the run.
        """
        config, mesh, dataset = program.config, program.mesh, data_sets.training
        ramp, phases = batch_ramp(config, mesh), phases_of(config, dataset)
        record_data(config, progress, data_sets, rows=ramp.rows, has_begun=has_begun)
        data = cls(
            lambda progress: batches_from(progress, config, mesh, dataset, phases, ramp), phases
        )
        data.open(progress)
        return data

    def open(self, progress: Progress) -> None:
        """Start the iterator at the position of `progress`."""
        self._batches = self._open(progress)

    def peek(self) -> Batch:
        """Return the next batch without consuming it."""
        first = next(self._batches)
        # Loaders prefetch, so a batch cannot be put back into them.
        self._batches = itertools.chain([first], self._batches)
        return first

    def __next__(self) -> Batch:
        """Return the next batch."""
        return next(self._batches)

    def note_mixture(self, progress: Progress) -> None:
        """Record the mixture of the next batch in `progress`, if it has changed."""
        segments = self._phases.recorded(progress.mixtures, progress.step, progress.samples)
        progress.mixtures = [segment.to_json() for segment in segments]

    def controls(self, step: int, iterations_to_skip: Container[int]) -> Controls:
        """Return the controls of the step that is launched after `step` steps."""
        scale, next_scale = self._phases.lr_scale(step), self._phases.lr_scale(step + 1)
        return Controls(scale, step + 1 not in iterations_to_skip, next_scale)


def batch_ramp(config: JobConfig, mesh: Mesh) -> BatchRamp:
    """Return the sizes of the batch over the run."""
    return config.train.ramp(data_parallel_size(mesh))


def phases_of(config: JobConfig, dataset: Dataset | Mixture | Streaming) -> Phases:
    """Return the phases of a config, with the limits of its datasets."""
    sizes = dataset.sizes if isinstance(dataset, Mixture) else {}
    return Phases.of(config.data, limits_of(config.data, sizes, config.train.seq_len))


def batches_from(
    progress: Progress,
    config: JobConfig,
    mesh: Mesh,
    dataset: Dataset | Mixture | Streaming,
    phases: Phases,
    ramp: BatchRamp,
) -> Iterator[Batch]:
    """Return the batches from `progress` to the end of the run.

    Raises:
        UserError: the datasets reach their limits before the end of the run.
    """
    start = progress.step, progress.samples
    segments = phases.segments(progress.mixtures, *start, lambda step: ramp.samples_at(step, start))
    if isinstance(dataset, Mixture) and phases.limits:
        check_not_exhausted(config, dataset, segments, ramp, start)
    # A span has one batch size, hence one compiled program.
    spans = ramp.spans(progress.step, config.train.max_steps - progress.step)
    return itertools.chain.from_iterable(
        loader.training_batches(
            config, mesh, dataset, ramp.samples_at(span.start, start), span.n_updates, segments,
            span.accum,
        )
        for span in spans
    )  # fmt: skip


def check_not_exhausted(
    config: JobConfig,
    dataset: Mixture,
    segments: Sequence[Segment],
    ramp: BatchRamp,
    point: tuple[int, int],
) -> None:
    """Refuse a run whose datasets all reach their limits before its last update.

    Raises:
        UserError: no dataset is left before the end.
    """
    last = config.train.max_steps
    end = ramp.samples_at(last, point)
    exhausted = exhausted_at(segments, end, data_seed(config))
    if exhausted is None:
        return
    # `exhausted` is a position of the data; users count in updates.
    updates = bisect_right(range(last), exhausted, key=lambda n: ramp.samples_at(n, point)) - 1
    limits = ", ".join(
        f"{name} {most:,} ({most / dataset.sizes[name]:.4g} epochs)"
        for name, most in segments[-1].limits.items()
        if name in dataset.sizes
    )
    raise UserError(
        f"data.datasets: all datasets of the mixture reach max_epochs or max_tokens after "
        f"{max(0, updates):,} of the {last:,} updates of this run, at sequence {exhausted:,} of "
        f"{end:,}. Limits in sequences: {limits}. Raise them, add data, or set train.max_steps to "
        f"at most {max(0, updates):,}"
    )


def open_data(config: JobConfig) -> DataSets:
    """Open training and evaluation data, and compare their fingerprints over all processes.

    Raises:
        UserError: the data are missing, damaged, do not fit the model, or differ between processes.
    """
    # Every process must reach the comparison, or those without an error would wait forever.
    failure = None
    try:
        dataset = sources.open_training_data(config)
        eval_data = sources.open_eval_data(config) if config.eval.reads_data else {}
        identity = fingerprints(config.data, dataset, eval_data)
    except UserError as error:
        failure, identity = error, {"data": {"error": str(error)}}
    agreement.check(identity)
    if failure:
        raise failure
    return DataSets(dataset, eval_data, identity)


def record_data(
    config: JobConfig,
    progress: Progress,
    data_sets: DataSets,
    *,
    rows: int,
    has_begun: bool,
) -> None:
    """Compare the data with the earlier data of the run, and record them in its progress.

    Args:
        config: the resolved config.
        progress: the counters at this start; fingerprints and epoch length are updated.
        data_sets: the data of this start.
        rows: sequences per microbatch.
        has_begun: True if the run starts from a checkpoint.

    Raises:
        UserError: the data changed in a way that `data.on_change` refuses, or have no epochs for
            `checkpoint.epoch_interval`.
    """
    # Random tokens have no files by which a change could be noticed.
    if has_begun:
        check_random_tokens(config.data, progress.data)
    now = data_sets.identity
    for change in check_unchanged(config.data.on_change, progress.data, now, progress.step):
        log.warning("the data changed since step %d: %s", progress.step, change)
    # Later starts compare with the data of this one.
    progress.data = now
    progress.sequences_per_epoch = sequences_per_epoch(config, rows, data_sets.training)
    if config.checkpoint.epoch_interval and not progress.sequences_per_epoch:
        raise UserError(
            f"checkpoint.epoch_interval = {config.checkpoint.epoch_interval}: random tokens, "
            "streams and mixtures have no epochs. Remove it and set checkpoint.interval"
        )
