"""Flattened tensors of Megatron-Core's optimizer (`fully_sharded_model_space`).

A tensor of shape (X, Y), cut into shards of (x, y), is stored as (X / x, Y / y, x * y): the
position of a shard, then its elements in row-major order. `mcore_data` of `.metadata` has the
original shape.
"""

import functools
import itertools
import math

import numpy as np

from jaxforge.errors import UserError
from torch_compat.formats.lazy import (
    Index,
    LazyTensor,
    index_shape,
    intersection,
    is_shape,
    relative_to,
)

_SHAPE = "nd_reformulated_orig_global_shape"


def original_shape(mcore_data: object, key: str) -> tuple[int, ...] | None:
    """Return the original shape of a flattened tensor; None for any other tensor."""
    of_key = mcore_data.get(key) if isinstance(mcore_data, dict) else None
    shape = of_key.get(_SHAPE) if isinstance(of_key, dict) else None
    return tuple(shape) if isinstance(shape, tuple | list) else None


def unflattened(tensor: LazyTensor, shape: tuple[int, ...]) -> LazyTensor:
    """Return a flattened tensor in its original shape.

    Raises:
        UserError: the tensor does not have the elements of this shape.
    """
    grid = tensor.shape[:-1]
    is_whole = len(grid) == len(shape) and is_shape(shape, tensor.dtype.itemsize)
    if not is_whole or any(not n or size % n for n, size in zip(grid, shape, strict=True)):
        raise UserError(f"{tensor.source}: {list(tensor.shape)} is not a flattened {list(shape)}")
    local = tuple(size // n for n, size in zip(grid, shape, strict=True))
    if math.prod(local) != tensor.shape[-1]:
        raise UserError(f"{tensor.source}: {list(tensor.shape)} is not a flattened {list(shape)}")

    def read(index: Index) -> np.ndarray:
        out = np.empty(index_shape(index), tensor.dtype)
        cells = (
            # The bounds of an empty index may still round to one cell.
            range(s.start // n, -(-s.stop // n)) if s.stop > s.start else range(0)
            for s, n in zip(index, local, strict=True)
        )
        for cell in itertools.product(*cells):
            start = [i * n for i, n in zip(cell, local, strict=True)]
            shard = tuple(slice(i, i + n) for i, n in zip(start, local, strict=True))
            both = intersection(shard, index)
            assert both is not None
            out[relative_to(both, [s.start for s in index])] = _within(
                tensor, cell, relative_to(both, start), local
            )
        return out

    return LazyTensor(shape, tensor.dtype, read, tensor.source, tensor.chunks)


def region(tensor: LazyTensor, start: int, shape: tuple[int, ...]) -> LazyTensor:
    """Return a tensor whose elements lie in row-major order in a one-dimensional tensor.

    Args:
        tensor: the one-dimensional tensor.
        start: position of the first element.
        shape: shape of the result.
    """
    assert start + math.prod(shape) <= tensor.shape[0]

    def read(index: Index) -> np.ndarray:
        if not math.prod(index_shape(index)):
            return np.empty(index_shape(index), tensor.dtype)
        return _within(tensor, (), index, shape, start)

    return LazyTensor(shape, tensor.dtype, read, tensor.source)


def _within(
    tensor: LazyTensor, cell: tuple[int, ...], index: Index, local: tuple[int, ...], start: int = 0
) -> np.ndarray:
    """Return the elements of an index within one shard; only the run that holds them is read.

    Args:
        tensor: the flattened tensor.
        cell: position of the shard.
        index: elements of the shard; not empty.
        local: shape of the shard.
        start: position of the shard's first element.
    """
    strides = [math.prod(local[axis + 1 :]) for axis in range(len(local))]
    axes = [np.arange(s.start, s.stop) * n for s, n in zip(index, strides, strict=True)]
    # Row-major positions in the shard, in the shape of the index.
    positions: np.ndarray = functools.reduce(np.add, np.ix_(*axes), np.zeros((), int))
    first, last = int(positions.min()), int(positions.max())
    of_cell = tuple(slice(i, i + 1) for i in cell)
    run = tensor.read((*of_cell, slice(start + first, start + last + 1))).reshape(-1)
    if run.size == positions.size:  # the usual read: whole rows
        return run.reshape(positions.shape)
    return run[positions - first]
