"""Tensors that are not read yet: every format is a mapping of names to these.

A name map, a cast or a permutation makes a mapping of names to other lazy tensors: a conversion is
whatever the last reader asks for, one block at a time, and nothing is ever held whole.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from jaxforge.errors import UserError
from torch_compat.formats import limits

Index = tuple[slice, ...]
"""One slice per dimension, with step 1, start and stop given."""

DTYPES: Mapping[str, np.dtype] = {
    name: np.dtype(kind)
    for name, kind in {
        "float64": np.float64,
        "float32": np.float32,
        "float16": np.float16,
        "bfloat16": ml_dtypes.bfloat16,
        "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
        "float8_e5m2": ml_dtypes.float8_e5m2,
        "int64": np.int64,
        "int32": np.int32,
        "int16": np.int16,
        "int8": np.int8,
        "uint64": np.uint64,
        "uint32": np.uint32,
        "uint16": np.uint16,
        "uint8": np.uint8,
        "bool": np.bool_,
    }.items()
}
"""torch's name of a dtype -> NumPy's dtype; the same names that NumPy has."""

_MOST_DIMENSIONS = 64  # of a NumPy array
_COMPARED = 32 << 20  # bytes at a time


@dataclasses.dataclass(frozen=True)
class LazyTensor:
    """A tensor somewhere.

    Attributes:
        shape: its shape.
        dtype: dtype of what `read` returns.
        read: the values at an index, as an array that the caller may keep but not write to.
        source: where it lies, for messages.
        chunks: how many pieces it is stored in.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[Index], np.ndarray]
    source: str = ""
    chunks: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return math.prod(self.shape) * self.dtype.itemsize

    def all(self) -> np.ndarray:
        """Every value."""
        return self.read(full_index(self.shape))

    def cast(self, dtype: np.dtype) -> "LazyTensor":
        """The values in another dtype, rounded to nearest.

        Reading it raises UserError where a finite value would become infinite.
        """
        if dtype == self.dtype:
            return self

        def read(index: Index) -> np.ndarray:
            before = self.read(index)
            with np.errstate(over="ignore"):
                after = before.astype(dtype)
            if np.isinf(after).any() and (np.isinf(after) & np.isfinite(before)).any():
                largest = np.abs(before[np.isfinite(before)].astype(np.float64)).max()
                raise UserError(
                    f"{self.source}: values up to {largest:.3g} are infinite as {dtype.name}: "
                    "convert to bfloat16 or float32"
                )
            return after

        return dataclasses.replace(self, dtype=dtype, read=read)

    def part(self, i: int) -> "LazyTensor":
        """Entry `i` of the first dimension."""
        return dataclasses.replace(
            self, shape=self.shape[1:], read=lambda index: self.read((slice(i, i + 1), *index))[0]
        )

    def transposed(self) -> "LazyTensor":
        """A matrix with its dimensions exchanged."""
        return dataclasses.replace(
            self, shape=self.shape[::-1], read=lambda index: self.read(index[::-1]).T
        )

    def rows(self, order: Sequence[int] | np.ndarray) -> "LazyTensor":
        """Entry i of the result is entry `order[i]` of this one (first dimension)."""
        order = np.asarray(order)

        def read(index: Index) -> np.ndarray:
            wanted = order[index[0]]
            if not len(wanted):
                return self.read((slice(0, 0), *index[1:]))
            first = int(wanted.min())
            window = self.read((slice(first, int(wanted.max()) + 1), *index[1:]))
            return window[wanted - first]

        return dataclasses.replace(self, shape=(len(order), *self.shape[1:]), read=read)

    def resized(self, rows: int) -> "LazyTensor":
        """The first `rows` entries of the first dimension; zeros beyond what there is."""
        have = self.shape[0]

        def read(index: Index) -> np.ndarray:
            first, *others = index
            there = self.read((slice(min(first.start, have), min(first.stop, have)), *others))
            missing = (first.stop - first.start) - len(there)
            return np.concatenate([there, np.zeros((missing, *there.shape[1:]), there.dtype)])

        return dataclasses.replace(self, shape=(rows, *self.shape[1:]), read=read)


def from_array(array: np.ndarray, source: str = "") -> LazyTensor:
    """An array that is in memory already."""
    return LazyTensor(array.shape, array.dtype, lambda index: np.asarray(array[index]), source)


def to_number(value: Any) -> float:  # noqa: ANN401 (whatever a file held)
    """The one number that something is, which may be a tensor of one element.

    Raises:
        ValueError: it is none, or not finite.
    """
    if isinstance(value, LazyTensor):
        if math.prod(value.shape) != 1:
            raise ValueError(f"a tensor of {list(value.shape)}")
        array = value.all().reshape(())
        value = int(array) if array.dtype.kind in "iu" else float(array)
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.number):
        raise ValueError(f"a {type(value).__name__}")
    number_ = int(value) if isinstance(value, int | np.integer) else float(value)
    if not abs(number_) < 1e300:
        raise ValueError("not finite, or far too large")
    return number_


def to_count(value: Any) -> int:  # noqa: ANN401 (whatever a file held)
    """The whole number that something is, from 0 to 2**53.

    Raises:
        ValueError: it is none.
    """
    number_ = to_number(value)
    if not 0 <= number_ <= limits.COUNT or number_ != int(number_):
        raise ValueError(f"{number_:g}, where a count should be")
    return int(number_)


def zeros(shape: tuple[int, ...], dtype: np.dtype) -> LazyTensor:
    """Zeros, made as they are read."""
    return LazyTensor(shape, dtype, lambda index: np.zeros(index_shape(index), dtype), "zeros")


def stack(tensors: Sequence[LazyTensor]) -> LazyTensor:
    """Tensors of one shape and dtype along a new first dimension."""
    first = tensors[0]
    assert all(t.shape == first.shape and t.dtype == first.dtype for t in tensors)

    def read(index: Index) -> np.ndarray:
        chosen = tensors[index[0]]
        if len(chosen) == 1:
            return chosen[0].read(index[1:])[None]
        out = np.empty(index_shape(index), first.dtype)
        for i, tensor in enumerate(chosen):
            out[i] = tensor.read(index[1:])
        return out

    return LazyTensor((len(tensors), *first.shape), first.dtype, read, first.source)


def interleave_rows(tensors: Sequence[LazyTensor], positions: Sequence[np.ndarray]) -> LazyTensor:
    """Rows of several tensors of one dtype in one: row i of tensor t becomes row `places[t][i]`."""
    first, n_rows = tensors[0], sum(map(len, positions))
    owner, row = np.empty(n_rows, np.int64), np.empty(n_rows, np.int64)
    for number, of_tensor in enumerate(positions):
        owner[of_tensor], row[of_tensor] = number, np.arange(len(of_tensor))

    def read(index: Index) -> np.ndarray:
        out = np.empty(index_shape(index), first.dtype)
        owners, rows = owner[index[0]], row[index[0]]
        for number, tensor in enumerate(tensors):
            if (mine := owners == number).any():
                wanted = tensor.rows(rows[mine])
                out[mine] = wanted.read((slice(0, wanted.shape[0]), *index[1:]))
        return out

    return LazyTensor((n_rows, *first.shape[1:]), first.dtype, read, first.source)


def is_shape(sizes: Sequence[Any], itemsize: int) -> bool:
    """Return whether NumPy supports an array of these sizes, which a file may claim."""
    if len(sizes) > _MOST_DIMENSIONS:
        return False
    nbytes = itemsize
    for n in sizes:  # a loop, for there are many tensors: generators take twice as long
        if type(n) is not int or not 0 <= n < 2**63:
            return False
        nbytes *= n or 1
    return nbytes < 2**63


def equal(a: LazyTensor, b: LazyTensor) -> bool:
    """Return whether two tensors hold the same bits, a block at a time."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    indices = blocks(a.shape, a.dtype.itemsize, _COMPARED)
    return all(a.read(i).tobytes() == b.read(i).tobytes() for i in indices)


def full_index(shape: Sequence[int]) -> Index:
    """The index of everything."""
    return tuple(slice(0, size) for size in shape)


def index_shape(index: Index) -> tuple[int, ...]:
    """The shape of what an index selects."""
    return tuple(s.stop - s.start for s in index)


def first_position(index: Index, shape: Sequence[int]) -> int:
    """Return the row-major index, in a tensor, of the first element that `index` selects."""
    position = 0
    for axis, size in zip(index, shape, strict=True):
        position = position * size + axis.start
    return position


def blocks(shape: tuple[int, ...], itemsize: int, limit: int) -> Iterator[Index]:
    """Indices that cover a tensor once, each of at most `limit` bytes or one row of a matrix.

    Every block is one run of bytes in row-major order: the first dimension is cut, and the next one
    only where one entry of the first is too large. As evenly as can be, since a store may keep all
    of them as large as the first.
    """
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:]) * itemsize
    if row > limit and len(shape) > 2:
        within = list(blocks(shape[1:], itemsize, limit))
        yield from ((slice(i, i + 1), *index) for i in range(shape[0]) for index in within)
        return
    most = max(1, limit // row) if row else max(1, shape[0])
    rows = max(1, -(-shape[0] // max(1, -(-shape[0] // most))))
    for start in range(0, shape[0], rows):
        yield (slice(start, min(start + rows, shape[0])), *full_index(shape[1:]))
    if not shape[0]:
        yield full_index(shape)


def intersection(a: Index, b: Index) -> Index | None:
    """Return the intersection of two indices of one tensor, or None."""
    both = tuple(
        slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True)
    )
    return None if any(s.start >= s.stop for s in both) else both


def relative_to(index: Index, origin: Sequence[int]) -> Index:
    """An index counted from `origin`."""
    return tuple(slice(s.start - o, s.stop - o) for s, o in zip(index, origin, strict=True))
