"""Device counters beyond 2^31: JAX's integers have 32 bits by default."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

_LOW_BITS = 30


class WideCount(NamedTuple):
    """The number high · 2^30 + low, up to 2^61.

    Attributes:
        high: multiple of 2^30, int32.
        low: remainder below 2^30, int32.
    """

    high: Int[Array, ""]
    low: Int[Array, ""]

    @classmethod
    def of(cls, value: int) -> "WideCount":
        """Return a count of `value`."""
        high, low = divmod(value, 1 << _LOW_BITS)
        return cls(jnp.asarray(high, jnp.int32), jnp.asarray(low, jnp.int32))

    def plus(self, n: Int[Array, ""] | int) -> "WideCount":
        """Return the count increased by `n`, 0 <= n < 2^30."""
        low = self.low + n
        return WideCount(self.high + (low >> _LOW_BITS), low & ((1 << _LOW_BITS) - 1))

    def __int__(self) -> int:
        return (int(self.high) << _LOW_BITS) + int(self.low)
