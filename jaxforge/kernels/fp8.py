"""Matrix products in 8 bits: quantization to fp8, scales and products.

    y   = x Wᵀ      x, W in e4m3: 4 exponent bits, 3 of mantissa, up to 448
    dx  = dy W      dy in e5m2: 5 and 2, up to 57344; W as in the forward pass
    dW  = dyᵀ x     x as in the forward pass, with sums in `train.reduce_dtype`

A tensor is multiplied by a scale before it is rounded, and a product is divided by the scales of
both operands: scale = 2^⌊log2(largest / amax)⌋, where `largest` is the largest number of the format
and amax = max |x|. Multiplication by a power of two is exact. So a scaled product is the same
number in bf16 and in float32, before and after a sum over devices. (torchao has the option
`round_scales_to_power_of_2`.) `train.fp8_scaling` selects what shares a scale:

    tensor    The whole tensor, by its current amax, as torchao's "tensorwise" and KempnerForge.
    delayed   The whole tensor. x and W are scaled by the largest amax of the last updates
              (Transformer Engine's DelayedScaling, arXiv:2209.05433), so that products do not wait
              for an amax. dy is scaled by its current amax: a history would have to travel with
              gradients, which are summed over microbatches and devices, and amax needs a maximum.
    block     Blocks of 1 x 128 of x and dy along the summed dimension, and 128 x 128 of W. dy is in
              e4m3, too (DeepSeek-V3, arXiv:2412.19437, section 3.3). The rounded numbers are
              multiplied in bf16: the result is the same, but no faster, because XLA has no product
              of such blocks for Hopper.

The amax of a tensor that the partitioner splits is that of the whole tensor. If data axes are
manual (`grad_sync = "update"`), each group of devices scales its own rows of x and dy.

A `LayerPrecision` describes layers that stay in bf16 among 8-bit layers, and layers that record
amax.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxforge.aux_outputs import Max
from jaxforge.parallel import collectives
from jaxforge.parallel.sharding import Axes, constrain

E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
BLOCK = 128
_MIN_AMAX = 2.0**-64  # so that the scale of an all-zero tensor is finite


class Fp8(NamedTuple):
    """Precision settings of the products of a linear layer.

    Attributes:
        name: name of the layer in its block, such as "attention.q_proj".
        scaling: `train.fp8_scaling`.
        axes: logical axes of the weight.
        sums: dtype in which devices sum the gradients of the weight.
        regathers: whether the backward pass gathers the weight again (`linear.Backward`).
    """

    name: str
    scaling: str
    axes: Axes
    sums: jnp.dtype
    regathers: bool


class Amaxes(NamedTuple):
    """Amax values for delayed scaling; 0 before the first update, which makes the scale 1."""

    x: Float[Array, ""]
    weight: Float[Array, ""]


class Scaled(NamedTuple):
    """An array in 8 bits: x ≈ values * unit.

    Attributes:
        values: x times a scale, rounded.
        unit: 1 / scale, a power of two.
    """

    values: Array
    unit: Float[Array, ""]


@dataclasses.dataclass
class LayerPrecision:
    """Precision of one layer's products, and the amax that its linear layers record.

    Attributes:
        in_8_bits: whether the products are in 8 bits; a traced array if pipeline stages differ.
        records_amax: whether linear layers add to `amax`.
        amax: amax of x and W [2], by name of the linear layer.
    """

    in_8_bits: bool | Bool[Array, ""]
    records_amax: bool = False
    amax: dict[str, Max] = dataclasses.field(default_factory=dict)


def product(
    fp8: Fp8,
    x: Float[Array, "*t i"],
    weight_OI: Float[Array, "o i"],
    bias_O: Float[Array, "o"] | None,
    amaxes: Amaxes | None,
    precision: LayerPrecision,
) -> Float[Array, "*t o"]:
    """Return x Wᵀ + b in the dtype of `x`, multiplied in 8 bits.

    Args:
        fp8: settings of the linear layer.
        x: inputs, a row for each token.
        weight_OI: stored weight.
        bias_O: stored bias; None: no bias.
        amaxes: amax of earlier updates, for delayed scaling.
        precision: precision of the layer, not static False. The amax of x and W is recorded in it.
    """
    in_8_bits = precision.in_8_bits
    if precision.records_amax:
        amax_2 = jnp.stack([amax(x), amax(weight_OI.astype(x.dtype))])
        amax_2 = jnp.where(in_8_bits, jax.lax.stop_gradient(amax_2), 0)
        precision.amax[fp8.name] = Max(amax_2)
    return _multiply(fp8, None if in_8_bits is True else in_8_bits, x, weight_OI, bias_O, amaxes)


def amax(x: Float[Array, "..."], **by: Any) -> Float[Array, "..."]:  # noqa: ANN401
    """Return max |x| in float32; `by` holds options of `jnp.max`."""
    return jnp.max(jnp.abs(_to_float32(x)), **by)


def _to_float32(x: Array) -> Array:
    """Cast to float32, with exactly the values that the dtype of `x` can hold."""
    # XLA may fuse a bfloat16 producer in float32 and keep more digits. `reduce_precision` cannot be
    # removed, so that amax and rounded numbers do not depend on fusion.
    info = jnp.finfo(x.dtype)
    wide = x.astype(jnp.float32)
    return wide if x.dtype == jnp.float32 else jax.lax.reduce_precision(wide, info.nexp, info.nmant)


def power_of_two_scale(amax: Float[Array, "..."], dtype: jnp.dtype) -> Float[Array, "..."]:
    """Return 2^⌊log2(largest / amax)⌋; 0 for an infinite amax, so that scaled values are NaN."""
    ratio = float(jnp.finfo(dtype).max) / jnp.maximum(amax, _MIN_AMAX)
    # Clearing mantissa and sign bits of a positive float32 rounds it down to a power of two,
    # exactly. An infinite amax gives ratio 0, scale 0 and then 0 * inf = NaN: the guard sees it.
    bits = jax.lax.bitcast_convert_type(ratio, jnp.uint32) & jnp.uint32(0x7F800000)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def round_to_fp8(x: Array, dtype: jnp.dtype, scale: Float[Array, "..."]) -> Array:
    """Scale and round to 8 bits. Values that are too large are clipped; NaN stays NaN."""
    largest = float(jnp.finfo(dtype).max)
    # A cast to fp8 would turn overflow into NaN (e4m3fn has no infinity); `clip` saturates, and
    # keeps NaN.
    return jnp.clip(_to_float32(x) * scale, -largest, largest).astype(dtype)


def quantize_tensor(
    x: Array, dtype: jnp.dtype, earlier_amax: Float[Array, ""] | None = None
) -> Scaled:
    """Quantize with one scale, from an earlier amax (0: unknown, scale 1) or the current one."""
    if earlier_amax is None:
        scale = power_of_two_scale(amax(x), dtype)
    else:
        scale = jnp.where(earlier_amax > 0, power_of_two_scale(earlier_amax, dtype), 1.0)
    return Scaled(round_to_fp8(x, dtype, scale), 1 / scale)


def fake_quantize_blocks(
    x: Float[Array, "*r c"], dtype: jnp.dtype, rows: int, columns: int
) -> Array:
    """Round to 8 bits with a scale for each block of rows and columns, and return to x's dtype."""
    x_RC = x.reshape(-1, x.shape[-1])
    padding = [-size % block for size, block in zip(x_RC.shape, (rows, columns), strict=True)]
    padded = jnp.pad(x_RC, [(0, n) for n in padding])
    blocks = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    scale = power_of_two_scale(amax(blocks, axis=(1, 3), keepdims=True), dtype)
    rounded = round_to_fp8(blocks, dtype, scale).astype(x.dtype) * (1 / scale).astype(x.dtype)
    return rounded.reshape(padded.shape)[: x_RC.shape[0], : x_RC.shape[1]].reshape(x.shape)


Operand = Scaled | Array
"""Operand of a product: 8-bit values with their unit, or an array that is multiplied directly."""


def _einsum(form: str, left: Operand, right: Operand, dtype: jnp.dtype) -> Array:
    """Return the einsum of two operands in a dtype.

    8-bit values are multiplied first, and the product is scaled by the units. XLA:GPU compiles that
    to one 8-bit kernel; products of `values * unit` would be in bf16 (docs/precision.md).
    """
    if not (isinstance(left, Scaled) and isinstance(right, Scaled)):
        return jnp.einsum(form, left, right, preferred_element_type=dtype)
    # Units are powers of two, so that scaling after the sum is exact.
    y = jnp.einsum(form, left.values, right.values, preferred_element_type=dtype)
    return y * (left.unit * right.unit).astype(dtype)


def _quantize_x(fp8: Fp8, x: Array, amaxes: Amaxes | None) -> Operand:
    if fp8.scaling == "block":
        return fake_quantize_blocks(x, E4M3, 1, BLOCK)
    return quantize_tensor(x, E4M3, amaxes.x if amaxes else None)


def _quantize_weight(fp8: Fp8, weight: Array, amaxes: Amaxes | None) -> Operand:
    """Return the quantized weight, gathered over the data axes."""
    if fp8.scaling == "block":
        return fake_quantize_blocks(
            collectives.all_gather_weight(weight, fp8.axes), E4M3, BLOCK, BLOCK
        )
    # Quantize first, gather second: one byte per weight on the wire, and the same scale on all
    # devices, because amax is that of the whole tensor.
    shard = quantize_tensor(weight, E4M3, amaxes.weight if amaxes else None)
    return shard._replace(values=collectives.all_gather_weight(shard.values, fp8.axes))


def _forward(
    fp8: Fp8, x: Array, weight: Array, bias: Array | None, amaxes: Amaxes | None
) -> tuple[Array, Operand, Operand]:
    """Return the result, and the quantized x and W."""
    x_8 = _quantize_x(fp8, x, amaxes)
    weight_8 = _quantize_weight(fp8, weight.astype(x.dtype), amaxes)
    return _with_bias(_einsum("...i,oi->...o", x_8, weight_8, x.dtype), bias), x_8, weight_8


def _with_bias(y: Array, bias: Array | None) -> Array:
    return y if bias is None else y + bias.astype(y.dtype)


def _backward(fp8: Fp8, x: Operand, weight: Operand, d_y: Array) -> tuple[Array, Array]:
    """Return the gradients of x and W, given the quantized operands (unrounded x for blocks)."""
    sums = jnp.promote_types(fp8.sums, d_y.dtype)
    d_rows: Operand
    d_columns: Operand
    # Block scales run along the summed dimension: dx sums over outputs, dW over tokens. So dy is
    # rounded twice, and x is rounded again along tokens.
    if fp8.scaling == "block":
        d_rows, d_columns = (
            fake_quantize_blocks(d_y, E4M3, 1, BLOCK),
            fake_quantize_blocks(d_y, E4M3, BLOCK, 1),
        )
        x = fake_quantize_blocks(jnp.asarray(x), E4M3, BLOCK, 1)
    else:
        d_rows = d_columns = quantize_tensor(d_y, E5M2)
    d_x = _einsum("...o,oi->...i", d_rows, weight, d_y.dtype)
    return d_x, constrain(_einsum("...o,...i->oi", d_columns, x, sums), *fp8.axes)


def _plain(fp8: Fp8, x: Array, weight: Array, bias: Array | None) -> Array:
    """Compute the product without quantization, for layers that stay in bf16."""
    whole = collectives.all_gather_weight(weight.astype(x.dtype), fp8.axes)
    return _with_bias(jnp.einsum("...i,oi->...o", x, whole), bias)


def _plain_backward(fp8: Fp8, x: Array, weight: Array, d_y: Array) -> tuple[Array, Array]:
    whole = collectives.all_gather_weight(weight.astype(x.dtype), fp8.axes)
    sums = jnp.promote_types(fp8.sums, d_y.dtype)
    d_weight = jnp.einsum("...o,...i->oi", d_y, x, preferred_element_type=sums)
    return jnp.einsum("...o,oi->...i", d_y, whole), constrain(d_weight, *fp8.axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(
    fp8: Fp8,
    switch: Bool[Array, ""] | None,
    x: Array,
    weight: Array,
    bias: Array | None,
    amaxes: Amaxes | None,
) -> Array:
    """Multiply in 8 bits; with a traced switch, only if it is True."""
    return _multiply_forward(fp8, switch, x, weight, bias, amaxes)[0]


_in_profile = jax.named_scope("fp8")  # marks the products in a profile


@_in_profile
def _multiply_forward(
    fp8: Fp8,
    switch: Bool[Array, ""] | None,
    x: Array,
    weight: Array,
    bias: Array | None,
    amaxes: Amaxes | None,
) -> tuple[Array, tuple[Any, ...]]:
    # With a switch, residuals are x and W themselves: both branches must return the same types.
    if switch is not None:
        y = jax.lax.cond(
            switch,
            lambda x, weight: _forward(fp8, x, weight, bias, amaxes)[0],
            lambda x, weight: _plain(fp8, x, weight, bias),
            x, weight,
        )  # fmt: skip
        return y, (switch, x, weight, jnp.zeros((), weight.dtype), bias, amaxes)
    y, x_8, weight_8 = _forward(fp8, x, weight, bias, amaxes)
    # `jnp.zeros((), weight.dtype)` carries the dtype of the weight into the backward pass without
    # its memory.
    saved_x = x if fp8.scaling == "block" else x_8
    saved_weight = weight if fp8.regathers else weight_8
    return y, (None, saved_x, saved_weight, jnp.zeros((), weight.dtype), bias, amaxes)


@_in_profile
def _multiply_backward(
    fp8: Fp8, saved: tuple[Any, ...], d_y: Array
) -> tuple[None, Array, Array, Array | None, None]:
    switch, x, weight, like, bias, amaxes = saved  # x and weight may be `Scaled`
    if switch is not None:

        def in_8_bits(x: Array, weight: Array, d_y: Array) -> tuple[Array, Array]:
            x_8 = _quantize_x(fp8, x, amaxes)
            weight_8 = _quantize_weight(fp8, weight.astype(x.dtype), amaxes)
            return _backward(fp8, x if fp8.scaling == "block" else x_8, weight_8, d_y)

        plain = functools.partial(_plain_backward, fp8)
        d_x, d_weight = jax.lax.cond(switch, in_8_bits, plain, x, weight, d_y)
    else:
        if fp8.regathers:
            weight = _quantize_weight(fp8, weight.astype(d_y.dtype), amaxes)
        d_x, d_weight = _backward(fp8, x, weight, d_y)
    d_weight = d_weight.astype(like.dtype)
    if bias is None:
        return None, d_x, d_weight, None, None
    sums, tokens = jnp.promote_types(fp8.sums, d_y.dtype), tuple(range(d_y.ndim - 1))
    return None, d_x, d_weight, jnp.sum(d_y, tokens, sums).astype(bias.dtype), None


_multiply.defvjp(_multiply_forward, _multiply_backward)
