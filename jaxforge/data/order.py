"""Orders in which a run reads its samples: Grain's and PyTorch's shuffles.

Index spaces:
    position: number of a sample in the whole run, 0, 1, 2, …, counted across epochs.
    index: number of a sample in its source, 0 … n-1. An order maps positions to indices.
    epoch: one pass over the source.

Positions do not depend on hosts or devices: a global batch is a range of consecutive positions,
whichever process computes each of them.
"""

from collections.abc import Callable
from threading import Lock
from typing import Generic, Protocol, TypeVar

import numpy as np
from jaxtyping import Int

from jaxforge.config.job import JobConfig
from jaxforge.errors import UserError

T = TypeVar("T")


def data_seed(config: JobConfig) -> int:
    """Return `train.data_seed`, by default `train.seed`."""
    return config.train.seed if config.train.data_seed is None else config.train.data_seed


class Order(Protocol):
    """Map of positions to indices: a pure function, safe to call from many threads."""

    def __getitem__(self, position: int) -> int:
        """Return the index of the sample at `position`."""
        ...


class TwoEntryCache(Generic[T]):
    """Cache of the last two values of a function.

    Threads that prefetch across the end of an epoch alternate between two epochs, so one entry
    would be recomputed at every read.
    """

    def __init__(self, make: Callable[..., T]) -> None:
        self._make = make
        self._values: dict[tuple[int, ...], T] = {}
        self._lock = Lock()

    def __call__(self, *key: int) -> T:
        """Return the value for `key`, computed once; other threads wait for it."""
        # The lock is held while the value is computed: a permutation may take seconds and
        # much memory, so two threads must not compute the same one.
        with self._lock:
            if key not in self._values:
                while len(self._values) > 1:  # a dict iterates in insertion order: oldest first
                    del self._values[next(iter(self._values))]
                self._values[key] = self._make(*key)
            return self._values[key]


class PickledAsArguments:
    """Base of objects that are pickled as the arguments of their constructor.

    Permutations, caches and locks are rebuilt in the process that unpickles.
    """

    _arguments: tuple

    def __reduce__(self) -> tuple:
        return type(self), self._arguments


class GrainOrder(PickledAsArguments):
    """Grain's global shuffle: a new permutation each epoch, none of them in memory.

    Equals `grain.MapDataset.range(n).seed(seed).shuffle().repeat()`, in half the time.

    Args:
        n: samples in the source.
        seed: any integer; taken modulo 2^32.
        shuffle: False reads 0 … n-1 in each epoch.

    Raises:
        UserError: `n` is not positive.
    """

    def __init__(self, n: int, seed: int, shuffle: bool) -> None:
        from grain.experimental import (
            index_shuffle,  # imported late: it imports jax, which takes seconds
        )

        if n < 1:
            raise UserError("the data hold no sample")
        self._arguments = n, seed, shuffle
        self._n, self._shuffle = n, index_shuffle if shuffle else None
        # `MapDataset.seed(seed)` gives the transformation after it, `shuffle`, the first word of
        # SeedSequence([seed, 1]) as its own seed.
        self._seed = int(np.random.SeedSequence([seed % 2**32, 1]).generate_state(1)[0])

    def __getitem__(self, position: int) -> int:
        epoch, index = divmod(position, self._n)
        if self._shuffle is None:
            return index
        # A keyed bijection of [0, n - 1], computed index by index. Its arguments are the largest
        # index, the seed of the epoch and the number of rounds, as Grain passes them.
        return self._shuffle(index, self._n - 1, (self._seed + epoch) % 2**32, 4)


class TorchOrder(PickledAsArguments):
    """KempnerForge's order: torch's DistributedSampler under a DataLoader with `drop_last`.

    With R ranks, rank r reads `rank_slice(permutation, r, R)` in batches of b. Batch j of all
    ranks together is then positions j·R·b … (j+1)·R·b - 1 of the permutation. So only the product
    R·b matters. The remainder of an epoch after its last full batch is not read.

    Args:
        n: samples in the source.
        seed: seed of epoch 0; epoch e has seed + e.
        shuffle: False reads 0 … n-1 in each epoch, less the dropped remainder.
        batch: global sequences per microbatch, R·b.

    Raises:
        UserError: `n` samples do not make one batch, or are too many for `randperm`.
    """

    def __init__(self, n: int, seed: int, shuffle: bool, batch: int) -> None:
        if n < batch:
            raise UserError(
                f"the data hold {n} samples, less than the {batch} of one global microbatch; "
                "lower train.batch_size or train.seq_len, or give data.dataset_path more tokens"
            )
        self._arguments = n, seed, shuffle, batch
        self._shuffle = shuffle
        # R = 2 ranks with b = 2 rows each, n = 9:
        #   permutation  p0 p1 p2 p3 | p4 p5 p6 p7 | p8 (not read)
        #   rank 0       p0    p2    | p4    p6    |
        #   rank 1          p1    p3 |    p5    p7 |
        # Torch drops per rank, floor(floor(n / R) / b) batches remain: that is floor(n / (R b)).
        self._epoch_length = n // batch * batch
        self._permutation = TwoEntryCache(lambda epoch: randperm(n, seed + epoch))

    def __getitem__(self, position: int) -> int:
        epoch, index = divmod(position, self._epoch_length)
        return int(self._permutation(epoch)[index]) if self._shuffle else index


_CHUNK = 1 << 16  # draws converted to Python integers at a time


def randperm(n: int, seed: int) -> Int[np.ndarray, "n"]:
    """Return `torch.randperm(n, generator=torch.Generator().manual_seed(seed))` without torch.

    Args:
        n: length.
        seed: any integer.

    Returns:
        int64 [n].

    Raises:
        UserError: see `next_randperm`.
    """
    return next_randperm(n, torch_generator(seed))


def torch_generator(seed: int) -> np.random.RandomState:
    """Return `torch.Generator().manual_seed(seed)`: a Mersenne Twister seeded with 32 low bits."""
    return np.random.RandomState(seed % 2**32)


def next_randperm(n: int, generator: np.random.RandomState) -> Int[np.ndarray, "n"]:
    """Return `torch.randperm(n, generator=generator)` and advance the generator as torch does.

    A Fisher-Yates shuffle that swaps entry i with entry i + (draw mod (n - i)).

    Args:
        n: length.
        generator: a result of `torch_generator`.

    Returns:
        int64 [n].

    Raises:
        UserError: `n` is so large that torch would draw 64 bits at a time.
    """
    if n >= (2**32 - 1) // 20:
        raise UserError(f'{n} samples are too many for data.order = "torch"; use "grain"')
    steps = np.arange(max(n - 1, 0))
    # Over the full range NumPy rejects nothing: each draw is one word of the generator. The modulo
    # is slightly biased, as it is in torch.
    draws = generator.randint(0, 2**32, len(steps), dtype=np.uint32)
    partners = steps + draws % (n - steps)
    order = list(range(n))  # a list swaps its items several times faster than an array
    for start in range(0, len(steps), _CHUNK):
        for i, j in enumerate(partners[start : start + _CHUNK].tolist(), start):
            order[i], order[j] = order[j], order[i]
    return np.array(order, dtype=np.int64)


def rank_slice(
    permutation: Int[np.ndarray, "n"], rank: int, ranks: int
) -> Int[np.ndarray, "n//ranks"]:
    """Return the entries of one of torch's data-parallel ranks: every `ranks`-th.

    Returns:
        int64 [n // ranks]; no rank gets the last n mod `ranks` entries.
    """
    return permutation[: len(permutation) // ranks * ranks][rank::ranks]
