"""Segments of a mixture: the dataset of each position, and limits on the draws from a dataset.

A dataset that reaches its limit gives its share to the others from the next position on: there, a
new part of the segment begins. Parts are a function of segments and seed, as all orders are:

    position   0 ................ p ................ q .......
    web, code  3/4, 1/4           0, 1: web ended    0, 0: nothing is left
"""

import heapq
import math
from collections.abc import Mapping, Sequence
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


class MixtureShare:
    """Positions of a segment that have the same datasets, from `start` on.

    Args:
        segment: the segment.
        start: first position.
        drawn: draws from each of its datasets before `start`.
        seed: seed of the mixture.
        block: positions per block.

    Attributes:
        start: first position.
        names: datasets in order.
        drawn_before: draws from each dataset before `start`.
        counts: draws from each dataset per block; 0 of datasets that have reached their limits.

    Raises:
        UserError: a block has fewer positions than the segment has datasets.
    """

    def __init__(
        self,
        segment: Segment,
        start: int,
        drawn: Int[np.ndarray, "datasets"],
        seed: int,
        block: int = BLOCK,
    ) -> None:
        self.start, self.drawn_before, self.names = start, drawn, list(segment.proportions)
        self._seed, self._block = seed % 2**32, block
        self._left = np.array([segment.limits.get(n, _NO_LIMIT) for n in self.names]) - drawn
        shares = np.array(list(segment.proportions.values()), float)
        if (self._left <= 0).any():
            # Datasets at their limit leave their shares to the others, in proportion.
            shares = np.where(self._left > 0, shares, 0.0)
            shares = shares / (shares.sum() or 1.0)
        if np.count_nonzero(shares) > block:
            raise UserError(f"data.datasets: a mixture draws from at most {block:,} datasets")
        self.counts = np.array(block_counts(shares.tolist(), block))

    @property
    def is_empty(self) -> bool:
        """True if no dataset is left."""
        return not self.counts.any()

    def make(self, block: int) -> tuple[Int[np.ndarray, "block"], Int[np.ndarray, "block"]]:
        """Return each position's dataset, and the number of its earlier draws in the block."""
        # Philox is counter-based: (start, block) selects a stream, so any block can be made first.
        # Sorting raw words shuffles; `Generator.shuffle` may change between versions of NumPy.
        assert not self.is_empty, "no dataset is left here"
        generator = np.random.Philox(key=self._seed, counter=[0, self.start, block, 0])
        shuffled = np.argsort(generator.random_raw(self._block), kind="stable")
        datasets = np.repeat(np.arange(len(self.counts)), self.counts)[shuffled]
        # A stable sort by dataset lists the positions of each dataset in order: 0, 1, 2, … there.
        draws = np.empty(self._block, np.int64)
        firsts = np.cumsum(self.counts) - self.counts
        by_dataset = np.argsort(datasets, kind="stable")
        draws[by_dataset] = np.arange(self._block) - np.repeat(firsts, self.counts)
        return datasets, draws

    def drawn(self, positions: int) -> Int[np.ndarray, "datasets"]:
        """Return the number of draws from each dataset in the first positions of the part."""
        blocks, remaining = divmod(positions, self._block)
        counts = blocks * self.counts
        if remaining and not self.is_empty:  # count what the last block draws before its cut
            cut = self.make(blocks)[0][:remaining]
            counts = counts + np.bincount(cut, minlength=len(counts))
        return counts

    def length(self) -> int | None:
        """Return the positions up to the first draw with which a dataset reaches its limit.

        Returns:
            None if no dataset with a limit is drawn.
        """
        # Number n, from 1, is draw (n - 1) mod c of block (n - 1) div c, with c draws per block.
        # Without a limit, 2^62 less all draws is left, which is far above the half.
        (limited,) = np.nonzero((self.counts > 0) & (self._left < _NO_LIMIT // 2))
        if not len(limited):
            return None
        blocks, last = np.divmod(self._left[limited] - 1, self.counts[limited])
        first = int(blocks.min())
        datasets, draws = self.make(first)
        # No draw has the number -1: these datasets reach no limit in this block.
        last_draws = np.full(len(self.counts), -1)
        last_draws[limited[blocks == first]] = last[blocks == first]
        return first * self._block + int(np.flatnonzero(draws == last_draws[datasets])[0]) + 1


_NO_LIMIT = 2**62


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
            # A fraction of an epoch may round down to no sequence at all.
            limits[source.label] = max(1, min(most))
    return limits


def parts_of(
    segments: Sequence[Segment], seed: int, block: int = BLOCK, end: int | None = None
) -> list[MixtureShare]:
    """Return the parts of segments: a new one wherever a dataset reaches its limit.

    Args:
        segments: the segments of a run, whose proportions do not regard limits.
        seed: seed of the mixture.
        block: positions per block of the mixture.
        end: parts that begin here or later are left out.
    """
    parts: list[MixtureShare] = []
    drawn: dict[str, int] = {}
    starts = [segment.start for segment in segments]
    for segment, stop in zip(segments, [*starts[1:], None], strict=True):
        start, before = segment.start, np.array([drawn.get(n, 0) for n in segment.proportions], int)
        while (stop is None or start < stop) and (end is None or start < end):
            part = MixtureShare(segment, start, before, seed, block)
            parts.append(part)
            length = part.length()
            # The segment ends before the next limit is reached.
            if length is None or (stop is not None and start + length > stop):
                length = 0 if stop is None else stop - start
                before, start = before + part.drawn(length), start + length
                break
            before, start = before + part.drawn(length), start + length
        # Limits count from the start of the run: draws go over to the next segment.
        drawn |= zip(segment.proportions, before.tolist(), strict=True)
    return parts


def exhausted_at(segments: Sequence[Segment], end: int, seed: int) -> int | None:
    """Return the first position before `end` at which no dataset is left; None without any."""
    parts = parts_of(segments, seed, end=end)
    return next((part.start for part in parts if part.is_empty), None)


def draws(
    segments: Sequence[Segment], end: int, seed: int, block: int = BLOCK
) -> list[tuple[int, dict[str, int]]]:
    """Return the first position of each part, and its draws from each dataset.

    Args:
        segments: the segments of a run.
        end: position after the last.
        seed: seed of the mixture.
        block: positions per block of the mixture.
    """
    parts = parts_of(segments, seed, block, end)
    stops = [*(part.start for part in parts[1:]), end]
    return [
        (part.start, dict(zip(part.names, part.drawn(stop - part.start).tolist(), strict=True)))
        for part, stop in zip(parts, stops, strict=True)
    ]


def block_counts(proportions: Sequence[float], block: int) -> list[int]:
    """Round `proportions` to counts that sum to `block`, by the largest remainders.

    A positive share gets at least 1. Without a positive share, all counts are 0.
    """
    exact = np.array(proportions) * block
    counts = np.maximum(np.floor(exact), exact > 0).astype(int)
    left = block - int(counts.sum())
    # One step at a time, where the count is furthest from its share in the needed direction, and
    # first where distances are equal. Distances below the share sum to `left` and are less than 1,
    # so that no count is raised twice.
    if left > 0 and exact.any():
        counts[np.argsort(counts - exact, kind="stable")[:left]] += 1
        return counts.tolist()
    heap = [(float(exact[i] - n), i) for i, n in enumerate(counts.tolist()) if n > 1]
    heapq.heapify(heap)
    for _ in range(-left):
        _, i = heap[0]
        counts[i] -= 1
        if counts[i] > 1:
            heapq.heapreplace(heap, (float(exact[i] - counts[i]), i))
        else:
            heapq.heappop(heap)
    return counts.tolist()
