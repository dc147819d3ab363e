"""MurmurHash3's finalizer, for checksums and for random bits. This module does not import JAX."""

from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    from jax import Array

FACTOR = 0x9E3779B9
"""Odd factor on the index of an element, before it is hashed."""

MULTIPLIERS = 0x85EBCA6B, 0xC2B2AE35
"""Multipliers of MurmurHash3's finalizer, fmix32."""

AnyArray = TypeVar("AnyArray", "Array", np.ndarray)


def fmix32(h: AnyArray) -> AnyArray:
    """Apply MurmurHash3's finalizer to uint32: a bijection in which each bit depends on all."""
    h = (h ^ (h >> 16)) * np.uint32(MULTIPLIERS[0])
    h = (h ^ (h >> 13)) * np.uint32(MULTIPLIERS[1])
    return h ^ (h >> 16)
