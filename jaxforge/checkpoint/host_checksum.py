"""`state.checksum` of arrays in the host's memory, in one pass that stores nothing.

XLA:CPU does not fuse the mixing of bits into their sum: it stores four bytes for each element. So
the sum is kept for each column of a row that stays in a core's cache, and rows are mixed into it.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped, UInt, UInt32

from jaxforge.state.block_checksum import FACTOR
from jaxforge.state.checksum import fmix32

_WIDTH = 4096
"""Elements of a row, at least, where there are as many."""

_SMALL = 1 << 16
"""Elements that NumPy, with temporaries, goes through sooner than a program is compiled."""


def checksum(array: Shaped[Array, "..."]) -> int:
    """Return the value of `state.checksum` for an array on CPUs of this process, on any mesh."""
    # By region and not by `replica_id`: whatever JAX lists twice counts once.
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
    """Return a part's contribution to the sum."""
    axes = range(part.ndim)
    steps = [
        (np.arange(part.shape[i]) + start[i]).astype(np.uint32)
        * np.uint32(math.prod(shape[i + 1 :]) % 2**32)
        for i in axes
    ]
    split = max((i for i in axes if math.prod(part.shape[i:]) >= _WIDTH), default=0)
    rows, columns = _sums(steps[:split]), _sums(steps[split:])
    bits = part.reshape(rows.size, columns.size).view(f"uint{8 * part.itemsize}")
    if part.size <= _SMALL:
        position = rows[:, None] + columns
        return int(
            fmix32(bits.astype(np.uint32) + position * np.uint32(FACTOR)).sum(dtype=np.uint32)
        )
    return int(_mixed_sum(bits, rows, columns))


def _sums(steps: Sequence[UInt32[np.ndarray, " size"]]) -> UInt32[np.ndarray, " product"]:
    """The sum of one step along each axis, for all their combinations in row-major order."""
    sums = np.zeros(1, np.uint32)
    for along in steps:
        sums = (sums[:, None] + along).reshape(-1)
    return sums


@jax.jit
def _mixed_sum(
    bits: UInt[Array, "row column"], rows: UInt32[Array, " row"], columns: UInt32[Array, " column"]
) -> UInt32[Array, ""]:
    """Return the sum of mixed bits; an element's index is the sum of its row and column offsets."""

    def add(i: UInt32[Array, ""], sums: UInt32[Array, " column"]) -> UInt32[Array, " column"]:
        position = rows[i] + columns
        return sums + fmix32(bits[i].astype(jnp.uint32) + position * jnp.uint32(FACTOR))

    sums = jax.lax.fori_loop(0, len(rows), add, jnp.zeros_like(columns))
    return jnp.sum(sums, dtype=jnp.uint32)
