"""Training data of a run: batches from any position."""

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
        cls,
        config: JobConfig,
        mesh: Mesh,
        dataset: Dataset | Mixture | Streaming,
        ramp: BatchRamp,
    ) -> "TrainingData":
        """Return the batches of a config.

        Args:
            config: the resolved config.
            mesh: the mesh of the run.
            dataset: the training data.
            ramp: sizes of the batch over the run.
        """
        phases = Phases.of(config.data)
        return cls(
            lambda progress: batches_from(progress, config, mesh, dataset, phases, ramp), phases
        )

    def open(self, progress: Progress) -> None:
        """Start the iterator at the position of `progress`."""
        self._batches = self._open(progress)

    def peek(self) -> Batch:
        """Return the next batch without consuming it."""
        first = next(self._batches)
        self._batches = itertools.chain([first], self._batches)
        return first

    def __next__(self) -> Batch:
        """Return the next batch."""
        return next(self._batches)

    def note_mixture(self, progress: Progress) -> None:
        """Record the mixture of the next batch in `progress`, if it has changed."""
        segments = self._phases.recorded(progress.mixtures, progress.step, progress.samples)
        progress.mixtures = [list(segment) for segment in segments]

    def controls(self, step: int, iterations_to_skip: Container[int]) -> Controls:
        """Return the controls of the step that is launched after `step` steps.

        Args:
            step: steps attempted.
            iterations_to_skip: `train.iterations_to_skip`; the updates of these steps are skipped.
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
    """Yield the batches from `progress` to the end of the run."""
    start = progress.step, progress.samples
    segments = phases.segments(progress.mixtures, *start, lambda step: ramp.samples_at(step, start))
    for span in ramp.spans(progress.step, config.train.max_steps - progress.step):
        first = ramp.samples_at(span.start, start)
        yield from loader.training_batches(
            config, mesh, dataset, first, span.n_updates, segments, span.accum
        )


def open_data(
    config: JobConfig,
) -> tuple[Dataset | Mixture | Streaming, dict[str, Dataset], dict[str, Fingerprint]]:
    """Open training and evaluation data, and compare their fingerprints over all processes.

    Returns:
        The training data, evaluation sets by name, and the fingerprints.

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
    """Compare the data with the earlier data of the run, and record them in its progress.

    Args:
        config: the resolved config.
        progress: the counters at this start; fingerprints and epoch length are updated.
        dataset: the training data.
        identity: fingerprints of all data.
        rows: sequences per microbatch.
        has_begun: True if the run starts from a checkpoint.

    Raises:
        UserError: the data changed in a way that `data.on_change` refuses.
    """
    if has_begun:
        check_random_tokens(config.data, progress.data)
    for change in check_unchanged(config.data.on_change, progress.data, identity, progress.step):
        log.warning("the data changed since step %d: %s", progress.step, change)
    progress.data = identity
    progress.sequences_per_epoch = sequences_per_epoch(config, rows, dataset)
