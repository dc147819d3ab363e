"""Random bits of arrays: a hash of the array's name, the index of an element and the update number.

Rounding and dropout therefore depend neither on the mesh nor on restarts.
"""

import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

from jaxforge.kernels.hashing import FACTOR, fmix32
from jaxforge.state.checksum import element_indices


def draw_key(seed: int, name: str, number: Int[Array, ""]) -> UInt32[Array, ""]:
    """Return the key of an array's random bits for its nth draw.

    Args:
        seed: seed of the run.
        name: name of the array and the purpose of its bits.
        number: n.
    """
    name_hash = zlib.crc32(f"{seed}/{name}".encode())
    return fmix32(number.astype(jnp.uint32) * jnp.uint32(FACTOR) + jnp.uint32(name_hash))


def random_words(key: UInt32[Array, ""], shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """Return 32 random bits per element of an array; the partitioner chooses the layout."""
    return fmix32(element_indices(shape) * jnp.uint32(FACTOR) + key)


def random_words_of_rows(
    key: UInt32[Array, ""],
    whole: Sequence[int],
    here: Sequence[int],
    begin: Sequence[Int[Array, ""] | int],
    first: Int[Array, ""] | int,
    rows: int,
) -> UInt32[Array, "r c"]:
    """Return the elements of `random_words` for consecutive rows of this device's shard.

    Args:
        key: result of `draw_key`.
        whole: shape of the array.
        here: shape of the shard.
        begin: index of the shard's first element in the array.
        first: first row, with all dimensions of the shard but the last flattened.
        rows: number of rows.
    """
    # Row-major index of an element in the whole array, modulo 2^32, as in `element_indices`. A row
    # number of the flattened shard is decomposed from its last dimension to its first; `weight` is
    # the stride of that dimension in the whole array.
    row = first + jax.lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    index, weight = jnp.zeros((rows, 1), jnp.uint32), whole[-1]
    for size, total, start in list(zip(here, whole, begin, strict=True))[-2::-1]:
        index += (row % size + start).astype(jnp.uint32) * jnp.uint32(weight % 2**32)
        row, weight = row // size, weight * total
    column = begin[-1] + jax.lax.broadcasted_iota(jnp.int32, (1, here[-1]), 1)
    return fmix32((index + column.astype(jnp.uint32)) * jnp.uint32(FACTOR) + key)


def uniform(bits: UInt32[Array, "..."]) -> Array:
    """Convert 16 bits to a number in [0, 1), float32."""
    return bits.astype(jnp.int32).astype(jnp.float32) * 2.0**-16
