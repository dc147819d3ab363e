"""A batch that grows in stages: how many microbatches an update has, and where in the data it is.

A microbatch is the same throughout, so memory is; each stage has one compiled step. Stages go by
the updates attempted before: a stage with start 100 begins with update 101.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple


class Stage(NamedTuple):
    """Updates of one size."""

    start: int
    """Updates before its first one."""
    accum: int
    """Microbatches per update."""


class Span(NamedTuple):
    """Consecutive updates of one size."""

    start: int
    """Updates of the run before it."""
    n_updates: int
    """How many they are."""
    accum: int
    """Microbatches per update."""


@dataclass(frozen=True)
class BatchRamp:
    """The stages of a run, the last without end; a constant batch is a single one.

    Attributes:
        stages: the first has start 0, then starts increase.
        rows: sequences of one microbatch over all data-parallel ranks.
    """

    stages: tuple[Stage, ...]
    rows: int

    def accum(self, step: int) -> int:
        """Microbatches of the update that comes after `step` updates."""
        starts = [stage.start for stage in self.stages]
        return self.stages[bisect_right(starts, step) - 1].accum

    def samples(self, step: int) -> int:
        """Sequences of the first `step` updates."""
        return sum(n * accum for _, n, accum in self.spans(0, step)) * self.rows

    def samples_at(self, step: int, point: tuple[int, int]) -> int:
        """Sequences drawn when `step` updates are attempted, earlier or later than `point`.

        Args:
            step: where to look.
            point: updates attempted and sequences drawn at one place of the run. Sequences count
                from there, as the run may have begun with another batch.
        """
        at, drawn = point
        return drawn + self.samples(step) - self.samples(at)

    def updates(self, samples: int, since: int = 0) -> int:
        """The fewest updates after the first `since` that draw `samples` sequences."""
        end = self.samples(since) + samples
        start, accum = [stage for stage in self.stages if self.samples(stage.start) <= end][-1]
        left = end - self.samples(start)
        return start + -(-left // (accum * self.rows)) - since

    def spans(self, step: int, n_updates: int) -> Iterator[Span]:
        """The `n_updates` updates after the first `step`, in runs of one size, each not empty."""
        end = step + n_updates
        inside = [stage.start for stage in self.stages if step < stage.start < end]
        for first, beyond in pairwise([step, *inside, end]):
            if first < beyond:
                yield Span(first, beyond - first, self.accum(first))
