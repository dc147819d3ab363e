"""MurmurHash3's finalizer, for checksums and for random bits.

This module does not import JAX: a conversion hashes each block of an array while it has the block
in memory.
"""

from typing import TYPE_CHECKING, TypeVar

import numpy as np
from jaxtyping import Shaped

if TYPE_CHECKING:
    from jax import Array

FACTOR = 0x9E3779B9
"""Odd factor on the index of an element, before it is hashed."""

_MULTIPLIERS = 0x85EBCA6B, 0xC2B2AE35  # of MurmurHash3's finalizer, fmix32

_CHUNK = 1 << 15
"""Elements hashed at a time: three buffers of 128 KiB fit in a core's cache. Chunks of 2^18
elements took 1.6 times as long."""

AnyArray = TypeVar("AnyArray", "Array", np.ndarray)


def fmix32(h: AnyArray) -> AnyArray:
    """Apply MurmurHash3's finalizer to uint32: a bijection in which each bit depends on all."""
    h = (h ^ (h >> 16)) * np.uint32(_MULTIPLIERS[0])
    h = (h ^ (h >> 13)) * np.uint32(_MULTIPLIERS[1])
    return h ^ (h >> 16)


def block_checksum(block: Shaped[np.ndarray, "..."], start: int) -> int:
    """Return the summand of a block in the checksum of its array (`state.checksum`), modulo 2^32.

    The checksum is a sum over elements, so blocks that cover the array add up to it.

    Args:
        block: consecutive elements of the array in row-major order.
        start: row-major index of the first element of the block in the array.
    """
    bits = np.ascontiguousarray(block).reshape(-1).view(f"uint{8 * block.dtype.itemsize}")
    offsets = np.arange(min(_CHUNK, bits.size), dtype=np.uint32)
    offsets = (offsets + np.uint32(start % 2**32)) * np.uint32(FACTOR)
    mixed, shifted = np.empty_like(offsets), np.empty_like(offsets)
    total = 0
    for first in range(0, bits.size, _CHUNK):
        chunk = bits[first : first + _CHUNK]
        h = mixed[: chunk.size]
        np.add(chunk, offsets[: chunk.size], out=h, dtype=np.uint32, casting="unsafe")
        _fmix32(h, shifted[: chunk.size])
        total += int(h.sum(dtype=np.uint32))
        offsets += np.uint32(_CHUNK * FACTOR % 2**32)
    return total % 2**32


def _fmix32(h: Shaped[np.ndarray, " size"], shifted: Shaped[np.ndarray, " size"]) -> None:
    """Replace h by `fmix32` of h; overwrite `shifted`."""
    for shift, multiplier in zip((16, 13), _MULTIPLIERS, strict=True):
        np.right_shift(h, shift, out=shifted)
        np.bitwise_xor(h, shifted, out=h)
        np.multiply(h, np.uint32(multiplier), out=h)
    np.right_shift(h, 16, out=shifted)
    np.bitwise_xor(h, shifted, out=h)
