"""`state.checksum` of arrays in host memory, in one pass without temporaries.

XLA:CPU does not fuse the mixing of bits into the sum and would store four bytes per element. Rows
are therefore accumulated into one sum per column, which stays in the cache of a core.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped, UInt, UInt32

from jaxforge.kernels.hashing import FACTOR, fmix32

_WIDTH = 4096
"""Smallest number of elements per row, if the array has as many."""

SMALL = 1 << 16
"""Number of elements up to which NumPy with temporaries is faster than compiling a program."""


def checksum(array: Shaped[Array, "..."]) -> int:
    """Return the value of `state.checksum` for an array on CPUs of this process, on any mesh."""
    # Keyed by region and not by `replica_id`, so that each region counts once.
    regions = {
        tuple(axis.start or 0 for axis in shard.index): shard for shard in array.addressable_shards
    }
    return (
        sum(
            _checksum(np.asarray(shard.data), start, array.shape)
            for start, shard in regions.items()
        )
        % 2**32
    )


def _checksum(part: np.ndarray, start: Sequence[int], shape: Sequence[int]) -> int:
    """Return the contribution of a shard to the sum."""
    # The flat index of an element in the whole array is a sum over axes of (index * stride). With
    # the axes split into two groups, it is a row term plus a column term: [row] + [column].
    axes = range(part.ndim)
    steps = [
        (np.arange(part.shape[i]) + start[i]).astype(np.uint32)
        * np.uint32(math.prod(shape[i + 1 :]) % 2**32)
        for i in axes
    ]
    split = max((i for i in axes if math.prod(part.shape[i:]) >= _WIDTH), default=0)
    rows, columns = _sums(steps[:split]), _sums(steps[split:])
    bits = part.reshape(rows.size, columns.size).view(f"uint{8 * part.itemsize}")
    if part.size <= SMALL:
        position = rows[:, None] + columns
        return int(
            fmix32(bits.astype(np.uint32) + position * np.uint32(FACTOR)).sum(dtype=np.uint32)
        )
    return int(mixed_sum(bits, rows, columns))


def _sums(steps: Sequence[UInt32[np.ndarray, " size"]]) -> UInt32[np.ndarray, " product"]:
    """Return the sums of one step per axis for all combinations, in row-major order."""
    sums = np.zeros(1, np.uint32)
    for axis_steps in steps:
        sums = (sums[:, None] + axis_steps).reshape(-1)
    return sums


@jax.jit
def mixed_sum(
    bits: UInt[Array, "row column"], rows: UInt32[Array, " row"], columns: UInt32[Array, " column"]
) -> UInt32[Array, ""]:
    """Return the sum of mixed bits; the index of an element is its row term plus column term."""

    def add(i: UInt32[Array, ""], sums: UInt32[Array, " column"]) -> UInt32[Array, " column"]:
        position = rows[i] + columns
        return sums + fmix32(bits[i].astype(jnp.uint32) + position * jnp.uint32(FACTOR))

    sums = jax.lax.fori_loop(0, len(rows), add, jnp.zeros_like(columns))
    return jnp.sum(sums, dtype=jnp.uint32)
