"""Eight-bit storage of moments: blocks of numbers share a scale.

A block is 32 numbers along the second-to-last dimension. Its scale is the smallest power of two
that no number of the block exceeds, stored as an exponent. Block size and scale follow the OCP MX
formats (arXiv:2310.10537); block-wise quantization of moments follows arXiv:2110.02861. As in that
paper, quantization steps are finer for small numbers, but a root replaces the paper's table.
With u uniform in [0, 1):

    signed   q = ⌊127 √(|x| / scale) + u⌋ · sign x             x ≈ scale · (q / 127)² · sign q
    root     q = max(1, ⌊255 √(√x / scale) + u⌋), 0 if x = 0   x ≈ (scale · (q / 255)²)²

`signed` stores means of gradients and `root` means of squared gradients. `root` never rounds a
positive number to 0: optimizers divide by its square root. Rounding is stochastic: under rounding
to nearest, a running mean that changes by less than half a quantization step per update would
never change.

    moment x   [..., R, C]       float32 while it is updated
    values     [..., R, C]       int8 or uint8
    scales     [..., R/32, C]    uint8, biased exponent of float32
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
"""The two formats, identified by the dtype of the values."""

_MAX_VALUE = {SIGNED: 127, ROOT: 255}
# Exponents are biased by 127, so the inverse of scale 2^(e-127) has the exponent 254 - e. It is a
# normal number up to e = 253.
_MAX_EXPONENT = 253


class Packed(NamedTuple):
    """Numbers in eight bits.

    Attributes:
        values: quantized numbers in the original shape, int8 (signed) or uint8 (root).
        scales: exponents with float32's bias, one per 32 rows; 0 for a block of zeros.
    """

    values: Array
    scales: UInt8[Array, "..."]


def is_packable(shape: tuple[int, ...], axes: Axes) -> bool:
    """Return whether the moments of a parameter can be packed: a matrix of whole blocks.

    Other parameters are small (norms, biases), or have a shape that no built-in model has.
    """
    return is_matrix(axes) and axes[-2] not in (LAYERS, EXPERTS) and shape[-2] % BLOCK == 0


def scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the scales, which are sharded like the numbers."""
    return (*shape[:-2], shape[-2] // BLOCK, shape[-1])


def pack(x: Float[Array, "r c"], u: Float[Array, "r c"], like: Packed) -> Packed:
    """Quantize numbers to the format of `like`.

    Args:
        x: numbers, float32; nonnegative for the format `root`.
        u: random numbers in [0, 1).
        like: packed numbers of the same format.
    """
    kind = like.values.dtype
    magnitude = jnp.sqrt(x) if kind == ROOT else jnp.abs(x)
    blocks = magnitude.reshape(-1, BLOCK, x.shape[-1])
    exponents = _exponents(jnp.max(blocks, axis=1))
    # Times the inverse scale, a power of two: no rounding, apart from underflow.
    fractions = (blocks * _power_of_two(254 - exponents)[:, None]).reshape(x.shape)
    q = jnp.floor(_MAX_VALUE[kind] * jnp.sqrt(fractions) + u)
    # `sign(magnitude)` is 1 for positive numbers: those round up to at least 1.
    q = jnp.maximum(q, jnp.sign(magnitude)) if kind == ROOT else q * jnp.sign(x)
    return Packed(q.astype(kind), exponents.astype(jnp.uint8))


def unpack(packed: Packed) -> Float[Array, "r c"]:
    """Dequantize numbers to float32."""
    kind, shape = packed.values.dtype, packed.values.shape
    q = packed.values.astype(jnp.float32) * (1 / _MAX_VALUE[kind])
    blocks = (q * jnp.abs(q)).reshape(-1, BLOCK, shape[-1])  # q² with the sign of q
    scales = _power_of_two(packed.scales.astype(jnp.uint32))
    x = (blocks * scales[:, None]).reshape(shape)
    return jnp.square(x) if kind == ROOT else x


def _exponents(x: Float[Array, "..."]) -> UInt32[Array, "..."]:
    """Return biased float32 exponents of the smallest powers of two not below x; 0 for 0."""
    # float32 bits of x >= 0: 8 bits of biased exponent, 23 bits of mantissa. A nonzero mantissa
    # means that x lies above the power of two of its exponent: round up to the next.
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    is_above = (bits & 0x7FFFFF) != 0
    return jnp.minimum((bits >> 23) + is_above.astype(jnp.uint32), _MAX_EXPONENT)


def _power_of_two(exponents: UInt32[Array, "..."]) -> Float[Array, "..."]:
    # The mantissa is 0. The biased exponent 0 gives 0.0, the scale of a block of zeros.
    return jax.lax.bitcast_convert_type(exponents << 23, jnp.float32)
