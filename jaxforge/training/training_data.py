"""What a run trains on: its batches from any point on, and what they are drawn from."""

import itertools
from collections.abc import Callable, Container, Iterator

from jax.sharding import Mesh

from jaxforge.config.batch_ramp import BatchRamp
from jaxforge.config.job import JobConfig
from jaxforge.data import loader
from jaxforge.data.dataset import Dataset, Mixture, Streaming
from jaxforge.state.progress import Progress
from jaxforge.step.gradients import Batch
from jaxforge.step.train_step import Controls
from jaxforge.training.phases import Phases


class TrainingData:
    """The batches of a run, an iterator once they are opened.

    Args:
        open_batches: the batches from where a progress stands.
        phases: which mixture and learning rate are in force.
    """

    def __init__(self, open_batches: Callable[[Progress], Iterator[Batch]], phases: Phases) -> None:
        self._open, self._phases = open_batches, phases
        self._batches: Iterator[Batch] = iter(())

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
        at.mixtures = [list(one) for one in self._phases.recorded(at.mixtures, at.step, at.samples)]

    def controls(self, step: int, iterations_to_skip: Container[int]) -> Controls:
        """Controls of the step that is launched after `step` steps.

        Args:
            step: steps attempted.
            iterations_to_skip: `train.iterations_to_skip`.
        """
        scale, next_scale = self._phases.lr_scale(step), self._phases.lr_scale(step + 1)
        return Controls(scale, step + 1 not in iterations_to_skip, next_scale)


def batches_from(
    place: Progress,
    config: JobConfig,
    mesh: Mesh,
    dataset: Dataset | Mixture | Streaming,
    phases: Phases,
    ramp: BatchRamp,
) -> Iterator[Batch]:
    """The batches from `place` to the end of the run."""
    at = place.step, place.samples
    segments = phases.segments(place.mixtures, *at, lambda step: ramp.samples_at(step, at))
    for span in ramp.spans(place.step, config.train.max_steps - place.step):
        first = ramp.samples_at(span.start, at)
        yield from loader.training_batches(
            config, mesh, dataset, first, span.n_updates, segments, span.accum
        )
