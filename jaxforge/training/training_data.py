"""Training data of a run: its batches from any position."""

import itertools
import logging
from collections.abc import Callable, Container, Iterator

from jax.sharding import Mesh

from jaxforge.config.batch_ramp import BatchRamp
from jaxforge.config.job import JobConfig
from jaxforge.data import loader, sources
from jaxforge.data.dataset import Dataset, Mixture, Streaming
from jaxforge.data.epoch import sequences_per_epoch
from jaxforge.data.fingerprint import (
    Fingerprint,
    check_random_tokens,
    check_unchanged,
    fingerprints,
)
from jaxforge.errors import UserError
from jaxforge.parallel import agreement
from jaxforge.parallel.mesh import data_parallel_size
from jaxforge.state.progress import Progress
from jaxforge.step.gradients import Batch
from jaxforge.step.train_step import Controls
from jaxforge.training.phases import Phases

log = logging.getLogger(__name__)


class TrainingData:
    """The batches of a run, an iterator once they are opened.

    Args:
        open_batches: the batches from where a progress stands.
        phases: which mixture and learning rate are in force.
    """

    def __init__(self, open_batches: Callable[[Progress], Iterator[Batch]], phases: Phases) -> None:
        self._open, self._phases = open_batches, phases
        self._batches: Iterator[Batch] = iter(())

    @classmethod
    def of(
        cls,
        config: JobConfig,
        mesh: Mesh,
        dataset: Dataset | Mixture | Streaming,
        ramp: BatchRamp,
    ) -> "TrainingData":
        """Make the batches that a config asks for.

        Args:
            config: a resolved config.
            mesh: of the run.
            dataset: the training data.
            ramp: sizes of the batch.
        """
        phases = Phases.of(config.data)
        return cls(
            lambda progress: batches_from(progress, config, mesh, dataset, phases, ramp), phases
        )

    def open(self, progress: Progress) -> None:
        """Goes on from where `progress` stands."""
        self._batches = self._open(progress)

    def peek(self) -> Batch:
        """The next batch, which stays the next."""
        first = next(self._batches)
        self._batches = itertools.chain([first], self._batches)
        return first

    def __next__(self) -> Batch:
        """The next batch."""
        return next(self._batches)

    def note_mixture(self, at: Progress) -> None:
        """Records what the next batch is drawn from, where that has changed."""
        at.mixtures = [
            list(mixture) for mixture in self._phases.recorded(at.mixtures, at.step, at.samples)
        ]

    def controls(self, step: int, iterations_to_skip: Container[int]) -> Controls:
        """Controls of the step that is launched after `step` steps.

        Args:
            step: steps attempted.
            iterations_to_skip: `train.iterations_to_skip`.
        """
        scale, next_scale = self._phases.lr_scale(step), self._phases.lr_scale(step + 1)
        return Controls(scale, step + 1 not in iterations_to_skip, next_scale)


def batch_ramp(config: JobConfig, mesh: Mesh) -> BatchRamp:
    """Return the sizes of the batch over the run."""
    return config.train.ramp(data_parallel_size(mesh))


def batches_from(
    progress: Progress,
    config: JobConfig,
    mesh: Mesh,
    dataset: Dataset | Mixture | Streaming,
    phases: Phases,
    ramp: BatchRamp,
) -> Iterator[Batch]:
    """The batches from `progress` to the end of the run."""
    at = progress.step, progress.samples
    segments = phases.segments(progress.mixtures, *at, lambda step: ramp.samples_at(step, at))
    for span in ramp.spans(progress.step, config.train.max_steps - progress.step):
        first = ramp.samples_at(span.start, at)
        yield from loader.training_batches(
            config, mesh, dataset, first, span.n_updates, segments, span.accum
        )


def open_data(
    config: JobConfig,
) -> tuple[Dataset | Mixture | Streaming, dict[str, Dataset], dict[str, Fingerprint]]:
    """Open training and evaluation sets, with their fingerprints, which all processes compare.

    Raises:
        UserError: the data are missing, damaged, do not fit the model, or differ between processes.
    """
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
    return dataset, eval_data, identity


def record_data(
    config: JobConfig,
    progress: Progress,
    dataset: Dataset | Mixture | Streaming,
    identity: dict[str, Fingerprint],
    *,
    rows: int,
    has_begun: bool,
) -> None:
    """Compare the data with those that a run had so far, and note them in its progress.

    Args:
        config: a resolved config.
        progress: where the run begins.
        dataset: the training data.
        identity: fingerprints of all data.
        rows: sequences of a microbatch.
        has_begun: whether the run begins from a checkpoint.

    Raises:
        UserError: the data changed in a way that `data.on_change` refuses.
    """
    if has_begun:
        check_random_tokens(config.data, progress.data)
    for change in check_unchanged(config.data.on_change, progress.data, identity, progress.step):
        log.warning("the data changed since step %d: %s", progress.step, change)
    progress.data = identity
    progress.sequences_per_epoch = sequences_per_epoch(config, rows, dataset)
