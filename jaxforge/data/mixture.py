"""Order of a mixture: several datasets drawn in changing proportions.

Index spaces, in addition to those of `order`:
    index: number of a sample in the concatenated datasets.
    draw: number of samples of the same dataset that the run has drawn before.
    segment: positions with the same proportions, from `Segment.start` to the start of the next.
    block: `BLOCK` positions of a segment, counted from its start.

    position   0                           s1
    segment    |------------- 0 -----------|-------- 1 ------- ...
    block      |    0    |    1    | 2 cut |    0    |    1    ...

Proportions change at positions, not at times. So a mixture is a pure function of the position, as
every order: it does not depend on hosts, devices, restarts or the depth of prefetching.
"""

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from zlib import crc32

import numpy as np
from jaxtyping import Int

from jaxforge.data.order import (
    GrainOrder,
    PickledAsArguments,
    TwoEntryCache,
    next_randperm,
    rank_slice,
    torch_generator,
)
from jaxforge.data.segments import BLOCK, Segment, parts_of
from jaxforge.errors import UserError

_SMALLEST = 1e-12  # replaces a weight of 0 under a temperature, as in KempnerForge


def proportions(
    weights: Mapping[str, float], temperature: float, *, as_torch: bool
) -> dict[str, float]:
    """Return normalized weights under `data.mix_temperature`: w^(1/T) divided by their sum.

    Args:
        weights: nonnegative, at least one positive.
        temperature: T; 1 leaves proportions as they are, larger ones are more even.
        as_torch: replace a weight of 0 by 1e-12 where T is not 1, as KempnerForge does: with a
            large T, such a dataset is drawn from.
    """
    if temperature == 1.0:
        powers = list(weights.values())
    else:
        least = _SMALLEST if as_torch else 0.0
        # In logarithms, relative to the largest: w^(1/T) underflows to 0 for a small T.
        logs = [math.log(w) if (w := max(weight, least)) else -math.inf
                for weight in weights.values()]  # fmt: skip
        largest = max(logs, default=0.0)
        powers = [math.exp((log - largest) / temperature) for log in logs]
    total = sum(powers)
    return {name: power / total for name, power in zip(weights, powers, strict=True)}


class GrainMixture(PickledAsArguments):
    """Mixture with exact proportions in each block, and a `GrainOrder` for each dataset.

    Each dataset has its own epochs: no sample is repeated before all samples of its dataset were
    drawn, across segments. The order of a dataset depends on its name, not on the other datasets.

    Args:
        sizes: samples of each dataset, by name.
        segments: in order. A name that `sizes` lacks is counted, but cannot be read.
        seed: any integer.
        shuffle: False reads each dataset from its first sample to its last; blocks stay random.
        block: positions per block, at least one for each dataset.
        end: position after the last that is read.

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
        end: int | None = None,
    ) -> None:
        self._arguments = sizes, segments, seed, shuffle, block, end
        self._block = block
        self._offsets = dict(zip(sizes, offsets(sizes.values()), strict=True))
        self._orders = {}
        for name, n in sizes.items():  # each with a seed of its own
            # A CRC, as Python's hash of a string differs between processes.
            sequence = np.random.SeedSequence([seed % 2**32, crc32(name.encode())])
            self._orders[name] = GrainOrder(n, int(sequence.generate_state(1)[0]), shuffle)
        self._parts = parts_of(segments, seed, block, end)
        self._starts = [part.start for part in self._parts]
        self._cached = TwoEntryCache(lambda part, block: self._parts[part].make(block))

    def __getitem__(self, position: int) -> int:
        number = bisect_right(self._starts, position) - 1
        part = self._parts[number]
        block, within = divmod(position - part.start, self._block)
        datasets, draws = self._cached(number, block)
        dataset = int(datasets[within])
        # Number of the draw: those before the part, of its whole blocks, and of this block.
        draw = int(part.drawn_before[dataset] + block * part.counts[dataset] + draws[within])
        name = part.names[dataset]
        return self._offsets[name] + self._orders[name][draw]


class TorchMixture(PickledAsArguments):
    """KempnerForge's `MixtureSampler` under a DataLoader with `drop_last`.

    An epoch draws from each dataset its proportion of all samples. If a dataset holds fewer, its
    samples are repeated in the same order. Entry k of rank r is position k·R + r of the epoch, so
    a batch of all R ranks together is consecutive, as in `TorchOrder`. A segment that begins in
    the middle of an epoch continues at the same position of its own order: samples that were
    drawn before may be drawn again.

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
        # `drop_last` drops per rank: whole batches of rows / R entries each.
        self.epoch_length = per_rank // (rows // ranks) * rows
        if not self.epoch_length:
            raise UserError(
                f"data.datasets hold {per_rank * ranks} samples, less than the {rows} of one "
                "global microbatch; lower train.batch_size or train.seq_len, or add data"
            )
        self._starts = [segment.start for segment in segments]
        self._cached = TwoEntryCache(self._make_epoch)

    def __getitem__(self, position: int) -> int:
        segment = bisect_right(self._starts, position) - 1
        epoch, index = divmod(position, self.epoch_length)
        return int(self._cached(segment, epoch)[index])

    def _make_epoch(self, segment: int, epoch: int) -> Int[np.ndarray, "samples"]:
        """Return the order of an epoch under the proportions of a segment."""
        generator = torch_generator(self._seed + epoch)
        targets = epoch_targets(
            [self._segments[segment].proportions[name] for name in self._sizes],
            sum(n // self._ranks for n in self._sizes.values()),
        )
        # Shapes, with R ranks and T = the sum of all targets, per rank:
        #   permutation     [n]          one per dataset, from one generator, in order of the config
        #   by_rank         R x [target] slices of the permutation, repeated or cut to the target
        #   drawn           [target, R]
        #   entries         [T, R]       all datasets; its rows are permuted by the same generator
        #   result          [T * R]      row-major: position = k * R + r
        drawn, sizes = [], self._sizes.values()
        for n, target, offset in zip(sizes, targets, offsets(sizes), strict=True):
            if target > 0:  # a dataset without samples draws nothing from the generator
                permutation = next_randperm(n, generator)
                by_rank = [
                    np.resize(rank_slice(permutation, rank, self._ranks), target)
                    for rank in range(self._ranks)
                ]
                drawn.append(offset + np.stack(by_rank, axis=1))
        entries = np.concatenate(drawn)
        return entries[next_randperm(len(entries), generator)].reshape(-1)


def epoch_targets(proportions: Sequence[float], total: int) -> list[int]:
    """Return the samples of each dataset in an epoch of `total`, as KempnerForge rounds them.

    Shares are rounded to the nearest integer, halves to even. Then 1 is added to or subtracted
    from the counts, cycling from the largest share down, until they sum to `total`.
    """
    targets = [round(share * total) for share in proportions]
    largest_first = sorted(range(len(targets)), key=lambda i: proportions[i], reverse=True)
    missing = total - sum(targets)
    for i in itertools.islice(itertools.cycle(largest_first), abs(missing)):
        targets[i] += 1 if missing > 0 else -1
    return targets


def offsets(sizes: Iterable[int]) -> list[int]:
    """Return the index of the first sample of each dataset."""
    return [0, *itertools.accumulate(sizes)][:-1]
