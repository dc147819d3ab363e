"""Bit-exact hashes of arrays, for device memory and for checkpoints."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped, UInt32

from jaxforge.kernels.hashing import FACTOR, fmix32


def checksum(x: Shaped[Array, "..."]) -> UInt32[Array, ""]:
    """Return a hash of the bits of x and their positions.

    The hash is the sum over elements of fmix32(bits + FACTOR * index), modulo 2^32. fmix32 is a
    bijection, so a single changed element always changes the hash; several changes cancel with
    probability 2^-32. NaNs are hashed by their bits.

    Programs for TPUs compute the hash in one pass without temporary arrays. On CPUs it takes four
    bytes per element (`checkpoint.checksums.host_checksum` does not).
    """
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)
    return jnp.sum(fmix32(bits + element_indices(x.shape) * jnp.uint32(FACTOR)), dtype=jnp.uint32)


def element_indices(shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """Return the row-major index of each element of an array, modulo 2^32."""
    index = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    return index
