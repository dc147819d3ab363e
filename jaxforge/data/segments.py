"""Segments of a mixture: the dataset of each position, and limits on the draws from a dataset.

A dataset that reaches its limit gives its share to the others from the next position on: there, a
new segment begins. Limits are thus a function of segments and seed, as all orders are:

    position   0 ................ p ................ q .......
    web, code  3/4, 1/4           0, 1: web ended    0, 0: nothing is left
"""

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jaxforge.config.data import DataConfig
from jaxforge.errors import UserError

BLOCK = 8192
"""Positions over which `GrainMixture` has exact proportions."""


class Segment(NamedTuple):
    """A span of a run with the same mixture.

    Attributes:
        start: first position; the segment ends where the next begins.
        proportions: share of each dataset, by name; they sum to 1.
        limits: largest number of draws from a dataset since the start of the run, by name; other
            datasets have no limit.
    """

    start: int
    proportions: Mapping[str, float]
    limits: Mapping[str, int] = {}

    def to_json(self) -> list[Any]:
        """Return the arguments of the constructor, without limits if there are none."""
        return list(self if self.limits else self[:2])


class SegmentBlocks:
    """Datasets of the positions of a segment, block by block.

    Args:
        segment: the segment; if all its proportions are 0, it draws nothing.
        seed: seed of the mixture.
        block: positions per block.

    Raises:
        UserError: a block has fewer positions than the segment has datasets.
    """

    def __init__(self, segment: Segment, seed: int, block: int = BLOCK) -> None:
        self.names = list(segment.proportions)
        shares = list(segment.proportions.values())
        if sum(share > 0 for share in shares) > block:
            raise UserError(f"data.datasets: a mixture draws from at most {block:,} datasets")
        self.counts = block_counts(shares, block)
        self._start, self._seed, self._block = segment.start, seed % 2**32, block

    def make(self, block: int) -> tuple[Int[np.ndarray, "block"], Int[np.ndarray, "block"]]:
        """Return each position's dataset, and the number of its earlier draws in the block."""
        # Philox is counter-based: (start, block) selects a stream, so any block can be made first.
        # Sorting raw words shuffles; `Generator.shuffle` may change between versions of NumPy.
        assert any(self.counts), "no dataset is left here"
        generator = np.random.Philox(key=self._seed, counter=[0, self._start, block, 0])
        shuffled = np.argsort(generator.random_raw(self._block), kind="stable")
        datasets = np.repeat(np.arange(len(self.counts)), self.counts)[shuffled]
        # A stable sort by dataset lists the positions of each dataset in order: 0, 1, 2, … there.
        draws = np.empty(self._block, np.int64)
        by_dataset = np.argsort(datasets, kind="stable")
        draws[by_dataset] = np.concatenate([np.arange(count) for count in self.counts])
        return datasets, draws

    def drawn(self, positions: int) -> dict[str, int]:
        """Return the number of draws from each dataset in the first positions of the segment."""
        blocks, remaining = divmod(positions, self._block)
        # The last block may be cut: count what its part before the cut draws.
        is_cut = remaining and any(self.counts)
        datasets = self.make(blocks)[0][:remaining] if is_cut else np.empty(0, np.int64)
        begun = np.bincount(datasets, minlength=len(self.counts)).tolist()
        return {
            name: blocks * whole + part
            for name, whole, part in zip(self.names, self.counts, begun, strict=True)
        }

    def positions_until(self, draws: Mapping[str, int]) -> int | None:
        """Return the positions up to the first draw that completes a number of draws.

        Args:
            draws: numbers of draws by dataset, at least 1; other datasets do not count.

        Returns:
            None if none of these datasets is drawn.
        """
        # Number n, from 1, is draw (n - 1) mod c of block (n - 1) div c, with c draws per block.
        last = {
            number: divmod(draws[name] - 1, count)
            for number, (name, count) in enumerate(zip(self.names, self.counts, strict=True))
            if count and name in draws
        }
        if not last:
            return None
        first = min(block for block, _ in last.values())
        datasets, numbers = self.make(first)
        ends = [
            np.flatnonzero((datasets == number) & (numbers == draw))[0]
            for number, (block, draw) in last.items()
            if block == first
        ]
        return first * self._block + int(min(ends)) + 1


def sum_of(drawn: Mapping[str, int], more: Mapping[str, int]) -> dict[str, int]:
    """Return the sums of two counts by name."""
    return dict(drawn) | {name: drawn.get(name, 0) + count for name, count in more.items()}


def limits_of(data: DataConfig, sizes: Mapping[str, int], seq_len: int) -> dict[str, int]:
    """Return the limits of `data.datasets`, in sequences.

    Args:
        data: `[data]`.
        sizes: sequences of each dataset.
        seq_len: tokens per sequence.
    """
    limits = {}
    for source in data.datasets:
        most = []
        if source.max_epochs is not None:
            epochs = Fraction(str(source.max_epochs))  # 0.29 of 100 sequences are 29
            most.append(math.floor(epochs * sizes[source.label]))
        if source.max_tokens is not None:
            most.append(-(-source.max_tokens // seq_len))
        if most:
            limits[source.label] = max(1, min(most))
    return limits


def with_limits(segments: Sequence[Segment], seed: int, block: int = BLOCK) -> list[Segment]:
    """Return the segments with a new one wherever a dataset reaches its limit.

    Where no dataset is left, all proportions are 0.

    Args:
        segments: the segments, whose proportions do not regard limits.
        seed: seed of the mixture.
        block: positions per block of the mixture.
    """
    if not any(segment.limits for segment in segments):
        return list(segments)
    result: list[Segment] = []
    drawn: dict[str, int] = {}
    starts = [segment.start for segment in segments]
    for segment, end in zip(segments, [*starts[1:], None], strict=True):
        for part, length in _parts(segment, end, drawn, seed, block):
            result.append(part)
            drawn = sum_of(drawn, SegmentBlocks(part, seed, block).drawn(length))
    return result


def _parts(
    segment: Segment, end: int | None, drawn: Mapping[str, int], seed: int, block: int
) -> Iterator[tuple[Segment, int]]:
    """Yield the parts of a segment that have the same datasets, and their lengths.

    The last part of a segment without end has length 0.
    """
    start = segment.start
    while end is None or start < end:
        left = {name: most - drawn.get(name, 0) for name, most in segment.limits.items()}
        exhausted = {name for name, count in left.items() if count <= 0}
        part = Segment(start, _without(segment.proportions, exhausted))
        blocks = SegmentBlocks(part, seed, block)
        length = blocks.positions_until({n: c for n, c in left.items() if n not in exhausted})
        if length is None or (end is not None and start + length >= end):
            yield part, 0 if end is None else end - start
            return
        yield part, length
        drawn = sum_of(drawn, blocks.drawn(length))
        start += length


def _without(shares: Mapping[str, float], names: set[str]) -> dict[str, float]:
    """Return the proportions without some datasets; all 0 if none is left."""
    if not names & shares.keys():
        return dict(shares)
    total = sum(share for name, share in shares.items() if name not in names)
    return {
        name: 0.0 if name in names or not total else share / total for name, share in shares.items()
    }


def exhausted_at(segments: Sequence[Segment], seed: int) -> int | None:
    """Return the first position at which no dataset is left; None if there is none."""
    empty = (part for part in with_limits(segments, seed) if not any(part.proportions.values()))
    first = next(empty, None)
    return first and first.start


def draws(
    segments: Sequence[Segment], end: int, seed: int, block: int = BLOCK
) -> list[tuple[Segment, dict[str, int]]]:
    """Return the draws from each dataset, for each span with the same datasets.

    Args:
        segments: the segments of a run.
        end: position after the last; later segments are left out.
        seed: seed of the mixture.
        block: positions per block of the mixture.
    """
    begun = [part for part in with_limits(segments, seed, block) if part.start < end]
    starts = [*(part.start for part in begun), end]
    return [
        (part, SegmentBlocks(part, seed, block).drawn(stop - start))
        for part, (start, stop) in zip(begun, itertools.pairwise(starts), strict=True)
    ]


def block_counts(proportions: Sequence[float], block: int) -> list[int]:
    """Round `proportions` to counts that sum to `block`, by the largest remainders.

    A positive share gets at least 1. Without a positive share, all counts are 0.
    """
    exact = [share * block for share in proportions]
    counts = [max(int(share > 0), math.floor(share)) for share in exact]
    left = block - sum(counts)
    # One step at a time, where the count is furthest from its share in the needed direction. The
    # heap has the largest distance first, and the first of equal distances.
    sign = 1 if left > 0 else -1
    heap = [(-sign * (exact[i] - n), i) for i, n in enumerate(counts) if exact[i] and n + sign > 0]
    heapq.heapify(heap)
    for _ in range(abs(left) if heap else 0):
        _, i = heap[0]
        counts[i] += sign
        if counts[i] + sign > 0:
            heapq.heapreplace(heap, (-sign * (exact[i] - counts[i]), i))
        else:
            heapq.heappop(heap)
    return counts
