"""Random bits for rounding: a hash of what is rounded and when.

So neither another mesh nor a restart changes them.
"""

import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

from jaxforge.state.block_checksum import FACTOR
from jaxforge.state.checksum import element_indices, fmix32


def key_of(seed: int, name: str, number: Int[Array, ""]) -> UInt32[Array, ""]:
    """Return the key of an array's random bits for its nth draw.

    Args:
        seed: of the run.
        name: of the array, another one for each use.
        number: n.
    """
    own = zlib.crc32(f"{seed}/{name}".encode())
    return fmix32(number.astype(jnp.uint32) * jnp.uint32(FACTOR) + jnp.uint32(own))


def words_of(key: UInt32[Array, ""], shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """32 random bits for each number of an array, laid out by the partitioner."""
    return fmix32(element_indices(shape) * jnp.uint32(FACTOR) + key)


def words(
    key: UInt32[Array, ""],
    whole: Sequence[int],
    here: Sequence[int],
    begin: Sequence[Int[Array, ""] | int],
    first: Int[Array, ""] | int,
    rows: int,
) -> UInt32[Array, "r c"]:
    """Return the random words of some rows of this device's part of an array.

    Args:
        key: as of `key_of`.
        whole: shape of the array.
        here: shape of the part.
        begin: where in the array the part begins.
        first: the first of the rows, where all dimensions of the part but the last are one.
        rows: how many.
    """
    row = first + jax.lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    index, weight = jnp.zeros((rows, 1), jnp.uint32), whole[-1]
    for size, total, start in list(zip(here, whole, begin, strict=True))[-2::-1]:
        index += (row % size + start).astype(jnp.uint32) * jnp.uint32(weight % 2**32)
        row, weight = row // size, weight * total
    column = begin[-1] + jax.lax.broadcasted_iota(jnp.int32, (1, here[-1]), 1)
    return fmix32((index + column.astype(jnp.uint32)) * jnp.uint32(FACTOR) + key)


def uniform(bits: UInt32[Array, "..."]) -> Array:
    """16 bits as a number in [0, 1), float32."""
    return bits.astype(jnp.int32).astype(jnp.float32) * 2.0**-16
