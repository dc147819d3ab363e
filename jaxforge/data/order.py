"""In which order a run reads its samples.

Index spaces:
    position: place of a sample in the whole run, 0, 1, 2, …, counting on through the epochs.
    index: place of a sample in its source, 0 … n-1; what an order maps a position to.
    epoch: one pass over the source.

Positions know nothing of hosts or devices: the sequences of a global batch are consecutive
positions, whoever computes them.
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
    """`train.data_seed`, by default `train.seed`."""
    return config.train.seed if config.train.data_seed is None else config.train.data_seed


class Order(Protocol):
    """Maps positions to indices; a pure function, safe to call from many threads."""

    def __getitem__(self, position: int) -> int:
        """Index of the sample at `position`."""
        ...


class LastTwo(Generic[T]):
    """A function that keeps what it made last, and the one before.

    Two, as reads ahead of and behind a border, such as that of an epoch, alternate.
    """

    def __init__(self, make: Callable[..., T]) -> None:
        self._make = make
        self._values: dict[tuple[int, ...], T] = {}
        self._lock = Lock()

    def __call__(self, *key: int) -> T:
        """Return the value for `key`, computed once; other threads wait for it."""
        with self._lock:
            if key not in self._values:
                while len(self._values) > 1:
                    del self._values[next(iter(self._values))]
                self._values[key] = self._make(*key)
            return self._values[key]


class Rebuilt:
    """An object that is pickled as the arguments that it was built with."""

    _arguments: tuple

    def __reduce__(self) -> tuple:
        return type(self), self._arguments


class GrainOrder(Rebuilt):
    """Grain's global shuffle: no permutation in memory, another one each epoch.

    The same order as `grain.MapDataset.range(n).seed(seed).shuffle().repeat()`, in half the time.

    Args:
        n: samples in the source.
        seed: any integer; taken modulo 2^32.
        shuffle: False reads 0 … n-1 in each epoch.

    Raises:
        UserError: `n` is not positive.
    """

    def __init__(self, n: int, seed: int, shuffle: bool) -> None:
        from grain.experimental import index_shuffle  # here, as it imports jax: a second and more

        if n < 1:
            raise UserError("the data hold no sample")
        self._arguments = n, seed, shuffle
        self._n, self._shuffle = n, index_shuffle if shuffle else None
        # What `shuffle` makes of `seed`, one step above it.
        self._seed = int(np.random.SeedSequence([seed % 2**32, 1]).generate_state(1)[0])

    def __getitem__(self, position: int) -> int:
        epoch, index = divmod(position, self._n)
        if self._shuffle is None:
            return index
        return self._shuffle(index, self._n - 1, (self._seed + epoch) % 2**32, 4)


class TorchOrder(Rebuilt):
    """KempnerForge's order: torch's DistributedSampler under a DataLoader that drops the last.

    With R ranks, rank r reads `rank_slice(permutation, r, R)` in batches of b. Batch j of all
    ranks together is then positions j·R·b … (j+1)·R·b - 1 of the permutation, so that only the
    product R·b counts, and not which rank reads what. What remains of an epoch after its last
    full batch is not read.

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
        self._epoch_length = n // batch * batch
        self._permutation = LastTwo(lambda epoch: randperm(n, seed + epoch))

    def __getitem__(self, position: int) -> int:
        epoch, index = divmod(position, self._epoch_length)
        return int(self._permutation(epoch)[index]) if self._shuffle else index


_CHUNK = 1 << 16  # draws that are Python integers at a time


def randperm(n: int, seed: int) -> Int[np.ndarray, "n"]:
    """`torch.randperm(n, generator=torch.Generator().manual_seed(seed))`, without torch.

    Args:
        n: length.
        seed: any integer.

    Returns:
        int64 [n].

    Raises:
        UserError: as of `next_randperm`.
    """
    return next_randperm(n, torch_generator(seed))


def torch_generator(seed: int) -> np.random.RandomState:
    """`torch.Generator().manual_seed(seed)`: a Mersenne Twister seeded with the low 32 bits."""
    return np.random.RandomState(seed % 2**32)


def next_randperm(n: int, generator: np.random.RandomState) -> Int[np.ndarray, "n"]:
    """`torch.randperm(n, generator=generator)`, which leaves the generator as torch does.

    A Fisher-Yates shuffle that swaps entry i with entry i + (draw mod (n - i)).

    Args:
        n: length.
        generator: as of `torch_generator`.

    Returns:
        int64 [n].

    Raises:
        UserError: `n` is so large that torch would draw 64 bits at a time.
    """
    if n >= (2**32 - 1) // 20:
        raise UserError(f'{n} samples are too many for data.order = "torch"; use "grain"')
    steps = np.arange(max(n - 1, 0))
    draws = generator.randint(0, 2**32, len(steps), dtype=np.uint32)
    partners = steps + draws % (n - steps)
    order = list(range(n))  # a list: its items swap several times faster than an array's
    for start in range(0, len(steps), _CHUNK):
        for i, j in enumerate(partners[start : start + _CHUNK].tolist(), start):
            order[i], order[j] = order[j], order[i]
    return np.array(order, dtype=np.int64)


def rank_slice(
    permutation: Int[np.ndarray, "n"], rank: int, ranks: int
) -> Int[np.ndarray, "n//ranks"]:
    """Return the entries of one of torch's data-parallel ranks: every `ranks`-th.

    Returns:
        int64 [n // ranks]; the last n mod `ranks` entries are nobody's.
    """
    return permutation[: len(permutation) // ranks * ranks][rank::ranks]
