"""Order of a mixture: several datasets drawn in changing proportions.

Index spaces, next to those of `order`:
    index: place in the datasets, one after the other.
    place: how many samples of its own dataset a run has drawn before a sample.
    segment: positions that are drawn in the same proportions, from `Segment.start` to the next's.
    block: `BLOCK` positions of a segment, counted from its start.

Proportions change at positions and not at times, so a mixture is as pure a function of the position
as any other order: it knows nothing of hosts, devices, restarts, or of how far ahead is read.
"""

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple
from zlib import crc32

import numpy as np
from jaxtyping import Int

from jaxforge.data.order import (
    GrainOrder,
    LastTwo,
    Rebuilt,
    next_randperm,
    rank_slice,
    torch_generator,
)
from jaxforge.errors import UserError

BLOCK = 8192
"""Positions over which `GrainMixture` keeps the proportions."""

_SMALLEST = 1e-12  # weight that KempnerForge's temperature sees in place of 0


class Segment(NamedTuple):
    """A span of a run with the same mixture.

    Attributes:
        start: its first position; it ends where the next one begins.
        proportions: share of each dataset, by name; they sum to 1.
    """

    start: int
    proportions: Mapping[str, float]


def proportions(
    weights: Mapping[str, float], temperature: float, *, as_torch: bool
) -> dict[str, float]:
    """Return normalized weights under `data.mix_temperature`: w^(1/T) divided by their sum.

    Args:
        weights: at least 0, one of them above.
        temperature: T; 1 leaves proportions as they are, larger ones are more even.
        as_torch: count a weight of 0 as 1e-12 where T is not 1, as KempnerForge does: with a large
            T, such a dataset is drawn from.
    """
    if temperature == 1.0:
        powers = list(weights.values())
    else:
        least = _SMALLEST if as_torch else 0.0
        logs = [math.log(w) if (w := max(weight, least)) else -math.inf
                for weight in weights.values()]  # fmt: skip
        powers = [math.exp((log - max(logs)) / temperature) for log in logs]
    total = sum(powers)
    return {name: power / total for name, power in zip(weights, powers, strict=True)}


class GrainMixture(Rebuilt):
    """Blocks with exactly the proportions, in random order; each dataset in its own `GrainOrder`.

    Each dataset has epochs of its own: no sample comes again before all others of its dataset have
    come, whatever the segments were. A dataset's order depends on its name, and not on the others.

    Args:
        sizes: samples of each dataset, by name.
        segments: in order; a name that `sizes` lack is counted and cannot be read.
        seed: any integer.
        shuffle: False reads each dataset from its first sample to its last; blocks stay random.
        block: as `BLOCK`; at least one for each dataset.

    Raises:
        UserError: a dataset is empty.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        segments: Sequence[Segment],
        seed: int,
        shuffle: bool,
        block: int = BLOCK,
    ) -> None:
        self._arguments = sizes, segments, seed, shuffle, block
        self._seed, self._block = seed % 2**32, block
        self._offsets = dict(zip(sizes, offsets(sizes.values()), strict=True))
        self._orders = {}
        for name, n in sizes.items():  # by a seed of the dataset's own, whatever the others are
            sequence = np.random.SeedSequence([self._seed, crc32(name.encode())])
            self._orders[name] = GrainOrder(n, int(sequence.generate_state(1)[0]), shuffle)
        self._starts = [segment.start for segment in segments]
        self._names = [list(segment.proportions) for segment in segments]
        self._counts = [
            block_counts(list(segment.proportions.values()), block) for segment in segments
        ]
        self._cached = LastTwo(self._make_block)
        self._drawn = list(self._draws())

    def __getitem__(self, position: int) -> int:
        segment = bisect_right(self._starts, position) - 1
        block, within = divmod(position - self._starts[segment], self._block)
        datasets, draws = self._cached(segment, block)
        dataset = int(datasets[within])
        draw = block * self._counts[segment][dataset] + int(draws[within])
        name = self._names[segment][dataset]
        return self._offsets[name] + self._orders[name][self._drawn[segment].get(name, 0) + draw]

    def _make_block(
        self, segment: int, block: int
    ) -> tuple[Int[np.ndarray, "block"], Int[np.ndarray, "block"]]:
        """Return each position's dataset, and the number of its earlier draws in the block."""
        counts = self._counts[segment]
        # Raw words, as numpy may change its shuffles.
        generator = np.random.Philox(key=self._seed, counter=[0, self._starts[segment], block, 0])
        shuffled = np.argsort(generator.random_raw(self._block), kind="stable")
        datasets = np.repeat(np.arange(len(counts)), counts)[shuffled]
        draws = np.empty(self._block, np.int64)
        by_dataset = np.argsort(datasets, kind="stable")
        draws[by_dataset] = np.concatenate([np.arange(count) for count in counts])
        return datasets, draws

    def _draws(self) -> Iterator[dict[str, int]]:
        """Draws from each dataset before each segment."""
        drawn: dict[str, int] = {}
        for segment, (start, end) in enumerate(itertools.pairwise(self._starts)):
            yield drawn
            blocks, remaining = divmod(end - start, self._block)
            datasets = self._cached(segment, blocks)[0][:remaining]
            counts = self._counts[segment]
            begun = np.bincount(datasets, minlength=len(counts)).tolist()
            for name, whole, part in zip(self._names[segment], counts, begun, strict=True):
                drawn = {**drawn, name: drawn.get(name, 0) + blocks * whole + part}
        yield drawn


def block_counts(proportions: Sequence[float], block: int) -> list[int]:
    """Whole numbers nearest to `proportions` that sum to `block`, by the largest remainders.

    What has any share has at least one.
    """
    exact = [share * block for share in proportions]
    counts = [max(int(share > 0), math.floor(share)) for share in exact]
    while left := block - sum(counts):
        sign = 1 if left > 0 else -1
        can_change = [i for i, n in enumerate(counts) if exact[i] and n + sign > 0]
        counts[max(can_change, key=lambda i: sign * (exact[i] - counts[i]))] += sign
    return counts


class TorchMixture(Rebuilt):
    """KempnerForge's `MixtureSampler` under a DataLoader that drops the last.

    An epoch draws from each dataset as often as its proportion of all samples says; where that is
    more than it holds, its samples come again, in the same order. Entry k of rank r is position
    k·R + r of the epoch, so that a batch of all R ranks together is consecutive, as in
    `TorchOrder`. In the middle of an epoch, a segment takes up its own order where the one before
    has come to: what was drawn may be drawn again.

    Args:
        sizes: samples of each dataset, by name.
        segments: in order.
        seed: seed of epoch 0; epoch e has seed + e.
        rows: global sequences per microbatch, a multiple of `ranks`.
        ranks: R.

    Raises:
        UserError: the datasets do not make one batch, or one has fewer samples than there are
            ranks.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        segments: Sequence[Segment],
        seed: int,
        rows: int,
        ranks: int,
    ) -> None:
        for name, n in sizes.items():
            if n < ranks:
                raise UserError(
                    f"data.datasets: {name} holds {n} samples, less than one for each of {ranks} "
                    'data-parallel ranks; remove it, or set data.order = "grain"'
                )
        self._arguments = sizes, segments, seed, rows, ranks
        self._sizes, self._segments, self._seed, self._ranks = sizes, segments, seed, ranks
        per_rank = sum(n // ranks for n in sizes.values())
        self.epoch_length = per_rank // (rows // ranks) * rows
        if not self.epoch_length:
            raise UserError(
                f"data.datasets hold {per_rank * ranks} samples, less than the {rows} of one "
                "global microbatch; lower train.batch_size or train.seq_len, or add data"
            )
        self._starts = [segment.start for segment in segments]
        self._cached = LastTwo(self._make_epoch)

    def __getitem__(self, position: int) -> int:
        segment = bisect_right(self._starts, position) - 1
        epoch, index = divmod(position, self.epoch_length)
        return int(self._cached(segment, epoch)[index])

    def _make_epoch(self, segment: int, epoch: int) -> Int[np.ndarray, "samples"]:
        """The order of an epoch, as it is in a segment."""
        generator = torch_generator(self._seed + epoch)
        targets = epoch_targets(
            [self._segments[segment].proportions[name] for name in self._sizes],
            sum(n // self._ranks for n in self._sizes.values()),
        )
        drawn, sizes = [], self._sizes.values()
        for n, target, offset in zip(sizes, targets, offsets(sizes), strict=True):
            if target > 0:  # the others leave the generator alone
                permutation = next_randperm(n, generator)
                by_rank = [
                    np.resize(rank_slice(permutation, rank, self._ranks), target)
                    for rank in range(self._ranks)
                ]
                drawn.append(offset + np.stack(by_rank, axis=1))
        entries = np.concatenate(drawn)
        return entries[next_randperm(len(entries), generator)].reshape(-1)


def epoch_targets(proportions: Sequence[float], total: int) -> list[int]:
    """Samples of each dataset in an epoch of `total`, as KempnerForge rounds them.

    Each is rounded to the nearest, halves to the even number; then one is added to each, or taken
    away, from the largest share down and round again, until they sum to `total`.
    """
    targets = [round(share * total) for share in proportions]
    largest_first = sorted(range(len(targets)), key=lambda i: proportions[i], reverse=True)
    missing = total - sum(targets)
    for i in itertools.islice(itertools.cycle(largest_first), abs(missing)):
        targets[i] += 1 if missing > 0 else -1
    return targets


def offsets(sizes: Iterable[int]) -> list[int]:
    """Index of the first sample of each dataset."""
    return [0, *itertools.accumulate(sizes)][:-1]
