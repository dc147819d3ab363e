"""Eight-bit storage of moments: blocks of numbers share a scale.

32 numbers along the last dimension but one are a block. Its scale is the smallest power of two that
none of them exceeds, stored as its exponent: size and scale of a block are those of the OCP MX
formats (arXiv:2310.10537), that moments bear it block by block is arXiv:2110.02861's. Between 0 and
the scale, steps are finer where numbers are small, as in that paper's map, but by a root in place
of its table. With u uniform in [0, 1):

    signed   q = ⌊127 √(|x| / scale) + u⌋ · sign x            x ≈ scale · (q / 127)² · sign q
    root     q = max(1, ⌊255 √(√x / scale) + u⌋), 0 of 0      x ≈ (scale · (q / 255)²)²

`signed` is for means of gradients, `root` for means of their squares; no positive one
becomes 0. A running mean that moves by less than a step would stand still for ever if it were
rounded to the nearest; so it moves by a step now and then, and on average as it should.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8, UInt32

from jaxforge.config.model import EXPERTS, LAYERS
from jaxforge.model.linear import is_matrix
from jaxforge.parallel.sharding import Axes

BLOCK = 32
SIGNED, ROOT = jnp.dtype("int8"), jnp.dtype("uint8")
"""Which of the formats values are in, by their dtype."""

_TOP = {SIGNED: 127, ROOT: 255}
_LARGEST = 253  # exponent, with its bias: of a scale whose inverse is a normal number, too


class Packed(NamedTuple):
    """Numbers in eight bits.

    Attributes:
        values: of the shape of the numbers, int8 (signed) or uint8 (root).
        scales: exponents with float32's bias, one of 32 rows; 0: the block is of zeros.
    """

    values: Array
    scales: UInt8[Array, "..."]


def packs(shape: tuple[int, ...], axes: Axes) -> bool:
    """Return whether moments of a parameter can be packed: a matrix of whole blocks.

    What cannot is small (norms, biases), or of a shape that no model of ours has.
    """
    return is_matrix(axes) and axes[-2] not in (LAYERS, EXPERTS) and shape[-2] % BLOCK == 0


def scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the scales; it is sharded like the numbers."""
    return (*shape[:-2], shape[-2] // BLOCK, shape[-1])


def pack(x: Float[Array, "r c"], u: Float[Array, "r c"], like: Packed) -> Packed:
    """Numbers in the format of `like`.

    Args:
        x: float32; not negative where the format is `root`.
        u: random, in [0, 1).
        like: packed before.
    """
    kind = like.values.dtype
    size = jnp.sqrt(x) if kind == ROOT else jnp.abs(x)
    blocks = size.reshape(-1, BLOCK, x.shape[-1])
    exponents = _exponents(jnp.max(blocks, axis=1))
    shares = (blocks * _power(254 - exponents)[:, None]).reshape(x.shape)
    q = jnp.floor(_TOP[kind] * jnp.sqrt(shares) + u)
    q = jnp.maximum(q, jnp.sign(size)) if kind == ROOT else q * jnp.sign(x)
    return Packed(q.astype(kind), exponents.astype(jnp.uint8))


def unpack(packed: Packed) -> Float[Array, "r c"]:
    """The numbers, float32."""
    kind, shape = packed.values.dtype, packed.values.shape
    q = packed.values.astype(jnp.float32) * (1 / _TOP[kind])
    blocks = (q * jnp.abs(q)).reshape(-1, BLOCK, shape[-1])
    scales = _power(packed.scales.astype(jnp.uint32))
    x = (blocks * scales[:, None]).reshape(shape)
    return jnp.square(x) if kind == ROOT else x


def _exponents(x: Float[Array, "..."]) -> UInt32[Array, "..."]:
    """Return biased float32 exponents of the smallest powers of two not below x; 0 for 0."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    above = (bits & 0x7FFFFF) != 0
    return jnp.minimum((bits >> 23) + above.astype(jnp.uint32), _LARGEST)


def _power(exponents: UInt32[Array, "..."]) -> Float[Array, "..."]:
    return jax.lax.bitcast_convert_type(exponents << 23, jnp.float32)
