"""Lazy tensors: shape, dtype and a function that reads a part of the values.

Every format is read as a mapping of names to lazy tensors. A name map, a cast or a permutation
returns another such mapping. Values are read only when a writer requests them, one block at a time,
so that a conversion never holds a whole tensor in memory.
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
"""One slice per dimension, with start and stop given and step 1."""

DTYPES: Mapping[str, np.dtype] = {
    name: np.dtype(kind)
    for name, kind in {
        "float64": np.float64,
        "float32": np.float32,
        "float16": np.float16,
        "bfloat16": ml_dtypes.bfloat16,
        "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
        "float8_e5m2": ml_dtypes.float8_e5m2,
        "float8_e8m0fnu": ml_dtypes.float8_e8m0fnu,
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
"""Dtype name in torch and NumPy -> NumPy dtype."""

_MAX_DIMENSIONS = 64  # limit of NumPy
_COMPARED = 32 << 20  # bytes that `equal` reads at a time


@dataclasses.dataclass(frozen=True)
class LazyTensor:
    """Tensor whose values are read on request.

    Attributes:
        shape: shape of the tensor.
        dtype: dtype of the arrays that `read` returns.
        read: index -> values. The caller may keep the array but must not write to it.
        source: location of the tensor for messages.
        chunks: number of chunks in which the tensor is stored.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[Index], np.ndarray]
    source: str = ""
    chunks: int = 1

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def all(self) -> np.ndarray:
        """Read all values."""
        return self.read(full_index(self.shape))

    def cast(self, dtype: np.dtype) -> "LazyTensor":
        """Cast to another dtype, rounding to nearest.

        Reading the result raises UserError if a finite value becomes infinite.
        """
        if dtype == self.dtype:
            return self

        def read(index: Index) -> np.ndarray:
            before = self.read(index)
            # The error below reports an overflow, with the name of the tensor.
            with np.errstate(over="ignore"):
                after = before.astype(dtype)
            # Nearly all blocks have no infinity and skip the second, more expensive test.
            if np.isinf(after).any() and (np.isinf(after) & np.isfinite(before)).any():
                largest = np.abs(before[np.isfinite(before)].astype(np.float64)).max()
                raise UserError(
                    f"{self.source}: values up to {largest:.3g} are infinite as {dtype.name}: "
                    "convert to bfloat16 or float32"
                )
            return after

        return dataclasses.replace(self, dtype=dtype, read=read)

    def part(self, i: int) -> "LazyTensor":
        """Return entry `i` of the first dimension."""
        return dataclasses.replace(
            self, shape=self.shape[1:], read=lambda index: self.read((slice(i, i + 1), *index))[0]
        )

    def transposed(self) -> "LazyTensor":
        """Return the transposed matrix."""
        return dataclasses.replace(
            self, shape=self.shape[::-1], read=lambda index: self.read(index[::-1]).T
        )

    def without_axis(self, axis: int) -> "LazyTensor":
        """Remove a dimension of size 1."""

        def read(index: Index) -> np.ndarray:
            whole = self.read((*index[:axis], slice(0, 1), *index[axis:]))
            return np.squeeze(whole, axis)

        shape = self.shape[:axis] + self.shape[axis + 1 :]
        return dataclasses.replace(self, shape=shape, read=read)

    def with_axis(self, axis: int) -> "LazyTensor":
        """Insert a dimension of size 1."""

        def read(index: Index) -> np.ndarray:
            values = np.expand_dims(self.read(index[:axis] + index[axis + 1 :]), axis)
            # The index of the new axis may be empty.
            return values[(slice(None),) * axis + (index[axis],)]

        shape = (*self.shape[:axis], 1, *self.shape[axis:])
        return dataclasses.replace(self, shape=shape, read=read)

    def flattened(self) -> "LazyTensor":
        """Return the entries of a matrix [n, m] as a vector [n m]."""
        n, m = self.shape

        def read(index: Index) -> np.ndarray:
            (at,) = index
            first = at.start // m
            rows = self.read((slice(first, max(first, -(-at.stop // m))), slice(0, m)))
            return rows.reshape(-1)[at.start - first * m : at.stop - first * m]

        return dataclasses.replace(self, shape=(n * m,), read=read)

    def folded(self, width: int) -> "LazyTensor":
        """Return a vector [n m] as a matrix [n, m] of a given width m."""

        def read(index: Index) -> np.ndarray:
            rows, columns = index
            values = self.read((slice(rows.start * width, rows.stop * width),))
            return values.reshape(-1, width)[:, columns]

        return dataclasses.replace(self, shape=(self.shape[0] // width, width), read=read)

    def rows(self, order: Sequence[int] | np.ndarray) -> "LazyTensor":
        """Gather entries of the first dimension: entry i of the result is entry `order[i]`."""
        order = np.asarray(order)

        def read(index: Index) -> np.ndarray:
            positions = order[index[0]]
            if not len(positions):
                return self.read((slice(0, 0), *index[1:]))
            # One contiguous read of the span, as each read of a file may be a request to a server.
            first = int(positions.min())
            window = self.read((slice(first, int(positions.max()) + 1), *index[1:]))
            return window[positions - first]

        return dataclasses.replace(self, shape=(len(order), *self.shape[1:]), read=read)

    def resized(self, rows: int) -> "LazyTensor":
        """Truncate the first dimension to `rows` entries, or extend it by zeros."""
        size = self.shape[0]

        def read(index: Index) -> np.ndarray:
            first, *tail = index
            values = self.read((slice(min(first.start, size), min(first.stop, size)), *tail))
            missing = (first.stop - first.start) - len(values)
            return np.concatenate([values, np.zeros((missing, *values.shape[1:]), values.dtype)])

        return dataclasses.replace(self, shape=(rows, *self.shape[1:]), read=read)


def from_array(array: np.ndarray, source: str = "") -> LazyTensor:
    """Return a lazy tensor of an array in memory."""
    return LazyTensor(array.shape, array.dtype, lambda index: np.asarray(array[index]), source)


def to_number(value: Any) -> float:  # noqa: ANN401 (untrusted)
    """Convert a number or a tensor of one element to a Python number.

    Raises:
        ValueError: the value is not a number, or not finite.
    """
    if isinstance(value, LazyTensor):
        if math.prod(value.shape) != 1:
            raise ValueError(f"a tensor of {list(value.shape)}")
        array = value.all().reshape(())
        # A float64 would round integers beyond 2^53.
        value = int(array) if array.dtype.kind in "iu" else float(array)
    # `bool` is a subclass of `int`, but a flag is not a number.
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.number):
        raise ValueError(f"a {type(value).__name__}")
    number = int(value) if isinstance(value, int | np.integer) else float(value)
    # In this form the test refuses NaN, too.
    if not abs(number) < 1e300:
        raise ValueError("not finite, or far too large")
    return number


def to_count(value: Any) -> int:  # noqa: ANN401 (untrusted)
    """Convert a number or a tensor of one element to an integer from 0 to 2**53.

    Raises:
        ValueError: the value is not such an integer.
    """
    number = to_number(value)
    if not 0 <= number <= limits.COUNT or number != int(number):
        raise ValueError(f"{number:g} is not an integer from 0 to 2^53")
    return int(number)


def zeros(shape: tuple[int, ...], dtype: np.dtype) -> LazyTensor:
    """Return a lazy tensor of zeros, which are allocated on read."""
    return LazyTensor(shape, dtype, lambda index: np.zeros(index_shape(index), dtype), "zeros")


def stack(tensors: Sequence[LazyTensor]) -> LazyTensor:
    """Stack tensors of one shape and dtype along a new first dimension."""
    first = tensors[0]
    assert all(t.shape == first.shape and t.dtype == first.dtype for t in tensors)

    def read(index: Index) -> np.ndarray:
        chosen = tensors[index[0]]
        # Without a copy: data of a local file stay mapped.
        if len(chosen) == 1:
            return chosen[0].read(index[1:])[None]
        out = np.empty(index_shape(index), first.dtype)
        for i, tensor in enumerate(chosen):
            out[i] = tensor.read(index[1:])
        return out

    return LazyTensor((len(tensors), *first.shape), first.dtype, read, first.source)


def interleave_rows(tensors: Sequence[LazyTensor], positions: Sequence[np.ndarray]) -> LazyTensor:
    """Merge rows of tensors: row i of tensor t becomes row `positions[t][i]` of the result."""
    first, n_rows = tensors[0], sum(map(len, positions))
    # For each row of the result: the tensor that holds it, and its row there.
    owner, row = np.empty(n_rows, np.int64), np.empty(n_rows, np.int64)
    for i, of_tensor in enumerate(positions):
        owner[of_tensor], row[of_tensor] = i, np.arange(len(of_tensor))

    def read(index: Index) -> np.ndarray:
        out = np.empty(index_shape(index), first.dtype)
        owners, rows = owner[index[0]], row[index[0]]
        for i, tensor in enumerate(tensors):
            if (mine := owners == i).any():
                selected = tensor.rows(rows[mine])
                out[mine] = selected.read((slice(0, selected.shape[0]), *index[1:]))
        return out

    return LazyTensor((n_rows, *first.shape[1:]), first.dtype, read, first.source)


def is_shape(sizes: Sequence[Any], itemsize: int) -> bool:
    """Return whether NumPy supports an array of these untrusted sizes."""
    if len(sizes) > _MAX_DIMENSIONS:
        return False
    nbytes = itemsize
    for n in sizes:  # called for each of many tensors; a generator takes twice as long
        if type(n) is not int or not 0 <= n < 2**63:
            return False
        # NumPy limits the product of the sizes that are not 0.
        nbytes *= n or 1
    return nbytes < 2**63


def equal(a: LazyTensor, b: LazyTensor) -> bool:
    """Return whether two tensors are bitwise equal, comparing one block at a time."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    indices = blocks(a.shape, a.dtype.itemsize, _COMPARED)
    # Bytes and not values: NaN differs from itself, and 0.0 equals -0.0.
    return all(a.read(i).tobytes() == b.read(i).tobytes() for i in indices)


def full_index(shape: Sequence[int]) -> Index:
    """Return the index of all elements."""
    return tuple(slice(0, size) for size in shape)


def index_shape(index: Index) -> tuple[int, ...]:
    """Return the shape of the elements that an index selects."""
    return tuple(s.stop - s.start for s in index)


def first_position(index: Index, shape: Sequence[int]) -> int:
    """Return the row-major index, in a tensor, of the first element that `index` selects."""
    position = 0
    for axis, size in zip(index, shape, strict=True):
        position = position * size + axis.start
    return position


def blocks(shape: tuple[int, ...], itemsize: int, limit: int) -> Iterator[Index]:
    """Split a tensor into contiguous blocks of at most `limit` bytes or one row of a matrix.

    The first dimension is cut, and the next dimension only if one entry of the first is too large.
    Blocks are as equal as possible, because a zarr store pads all chunks to the size of the first.
    """
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:]) * itemsize
    if row > limit and len(shape) > 2:
        within = list(blocks(shape[1:], itemsize, limit))
        yield from ((slice(i, i + 1), *index) for i in range(shape[0]) for index in within)
        return
    # Equal blocks: 10 rows with at most 4 each become 4, 3 and 3 and not 4, 4 and 2.
    most = max(1, limit // row) if row else max(1, shape[0])
    n_blocks = max(1, -(-shape[0] // most))
    rows = max(1, -(-shape[0] // n_blocks))
    for start in range(0, shape[0], rows):
        yield (slice(start, min(start + rows, shape[0])), *full_index(shape[1:]))
    # One empty block, so that writers store an empty tensor.
    if not shape[0]:
        yield full_index(shape)


def intersection(a: Index, b: Index) -> Index | None:
    """Return the intersection of two indices of one tensor, or None."""
    both = tuple(
        slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True)
    )
    return None if any(s.start >= s.stop for s in both) else both


def relative_to(index: Index, origin: Sequence[int]) -> Index:
    """Return an index relative to `origin`."""
    return tuple(slice(s.start - o, s.stop - o) for s, o in zip(index, origin, strict=True))
