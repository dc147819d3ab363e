"""Hashes of arrays, bit for bit: of what devices hold, and of what checkpoints do."""

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped, UInt32

from jaxforge.state.block_checksum import FACTOR, MULTIPLIERS

_Hashed = TypeVar("_Hashed", Array, np.ndarray)


def checksum(x: Shaped[Array, "..."]) -> UInt32[Array, ""]:
    """An exact hash of the bits of x and of where they stand.

    In one pass that stores nothing, which was seen in the programs for TPUs; on CPUs it
    takes four bytes per element while it runs (`checkpoint.host_checksum` does not).

    Sum over elements of fmix32(bits + FACTOR * place), modulo 2^32. fmix32 is a
    bijection, so one changed element always shows; several cancel once in 2^32. NaNs are bits like
    any other.
    """
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)
    return jnp.sum(fmix32(bits + element_indices(x.shape) * jnp.uint32(FACTOR)), dtype=jnp.uint32)


def element_indices(shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """Return the place of each element of an array in row-major order, modulo 2^32."""
    index = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    return index


def fmix32(h: UInt32[_Hashed, "..."]) -> UInt32[_Hashed, "..."]:
    """MurmurHash3's finalizer: a bijection in which each bit depends on all."""
    h = (h ^ (h >> 16)) * np.uint32(MULTIPLIERS[0])
    h = (h ^ (h >> 13)) * np.uint32(MULTIPLIERS[1])
    return h ^ (h >> 16)
