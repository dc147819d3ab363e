"""Batch-size ramp: microbatches per update, and the data position after each update.

The microbatch is the same in all stages, so memory use is constant. Starts count the updates
attempted before: a stage with start 100 begins with update 101.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple


class Stage(NamedTuple):
    """A stage of the ramp, whose updates have one batch size."""

    start: int
    """Number of updates before the first update of the stage."""
    accum: int
    """Microbatches per update."""


class RampSpan(NamedTuple):
    """Consecutive updates with one batch size."""

    start: int
    """Number of updates of the run before the span."""
    n_updates: int
    """Number of updates in the span."""
    accum: int
    """Microbatches per update."""


class SampleRamp(NamedTuple):
    """Megatron-LM's `rampup_batch_size`: a batch that grows in equal steps of samples.

    Source: `RampupBatchsizeNumMicroBatchesCalculator` of Megatron-Core 0.16.
    """

    start: int
    """Sequences of the first update."""
    increment: int
    """Sequences by which the batch grows."""
    samples: int
    """Sequences after which the batch is full."""

    def stages(self, full: int) -> Iterator[tuple[int, int]]:
        """Yield (updates before the stage, sequences per update) of each stage.

        A batch that is drawn may pass the ends of several increments, which are then skipped.

        Args:
            full: sequences of a full batch, `start` plus a multiple of `increment`.
        """
        n_increments = (full - self.start) // self.increment
        step = drawn = reached = 0
        yield 0, self.start
        while reached < n_increments:
            size = self.start + reached * self.increment
            # Increment i is reached when i / n_increments of the samples are drawn.
            end = -(-(reached + 1) * self.samples // n_increments)
            n_updates = -(-(end - drawn) // size)
            step, drawn = step + n_updates, drawn + n_updates * size
            reached = min(n_increments, drawn * n_increments // self.samples)
            yield step, self.start + reached * self.increment


@dataclass(frozen=True)
class BatchRamp:
    """The stages of a run; the last has no end, and a constant batch is a single stage.

    Attributes:
        stages: the first has start 0, then starts increase.
        rows: sequences of one microbatch over all data-parallel ranks.
        padded_size: sequences of an update whose last microbatch is padded; None without padding.
    """

    stages: tuple[Stage, ...]
    rows: int
    padded_size: int | None = None

    def accum(self, step: int) -> int:
        """Return the microbatches of the update after `step` updates."""
        starts = [stage.start for stage in self.stages]
        return self.stages[bisect_right(starts, step) - 1].accum

    def sequences(self, accum: int) -> int:
        """Return the number of sequences in an update of `accum` microbatches, without padding."""
        return self.padded_size or accum * self.rows

    def samples(self, step: int) -> int:
        """Return the number of sequences in the first `step` updates."""
        return sum(n * self.sequences(accum) for _, n, accum in self.spans(0, step))

    def samples_at(self, step: int, point: tuple[int, int]) -> int:
        """Return the sequences drawn after `step` updates, counted from a known point of the run.

        Args:
            step: updates attempted; may be before or after the known point.
            point: updates attempted and sequences drawn at the known point. The count starts there
                because the run may have begun with another batch size.
        """
        at, drawn = point
        return drawn + self.samples(step) - self.samples(at)

    def updates(self, samples: int, since: int = 0) -> int:
        """Return the fewest updates after the first `since` that draw `samples` sequences."""
        end = self.samples(since) + samples
        # The last stage that begins before the end; the samples left are counted in its batches.
        start, accum = [stage for stage in self.stages if self.samples(stage.start) <= end][-1]
        left = end - self.samples(start)
        return start + -(-left // self.sequences(accum)) - since

    def spans(self, step: int, n_updates: int) -> Iterator[RampSpan]:
        """Split the `n_updates` updates after `step` into non-empty spans of one batch size."""
        end = step + n_updates
        inside = [stage.start for stage in self.stages if step < stage.start < end]
        for first, beyond in pairwise([step, *inside, end]):
            if first < beyond:
                yield RampSpan(first, beyond - first, self.accum(first))
