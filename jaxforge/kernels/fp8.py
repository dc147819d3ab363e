"""Matrix products in 8 bits: rounding to fp8, scales and products.

    y   = x Wᵀ      x, W in e4m3: 4 exponent bits, 3 of mantissa, up to 448
    dx  = dy W      dy in e5m2: 5 and 2, up to 57344; W as in the forward pass
    dW  = dyᵀ x     x as in the forward pass, in sums of `train.reduce_dtype`

Values are multiplied by a scale before they are rounded, and products are divided by the scales of
both operands: scale = 2^⌊log2(largest / amax)⌋, where largest is the largest value of the format
and amax = max |x|. Multiplication by a power of two is exact. So a scaled product is the same
number in bf16 and float32, before and after a sum over devices. (torchao has the option
`round_scales_to_power_of_2`.) `train.fp8_scaling` selects which values share a scale:

    tensor    one scale per tensor, from its current amax ("tensorwise" in torchao, KempnerForge)
    delayed   one scale per tensor; for x and W from the largest amax of the last updates
              (Transformer Engine's DelayedScaling, arXiv:2209.05433), so that products do not wait
              for an amax. dy uses its current amax: gradients add up over microbatches and
              devices, and a maximum does not
    block     one scale per 1 x 128 values of x and dy along the summed dimension, and per
              128 x 128 of W; dy in e4m3, too (DeepSeek-V3, arXiv:2412.19437, section 3.3).
              Products are bf16 products of the rounded values: the result is the same, but not
              faster, because XLA has no product with block scales for Hopper

For a tensor that the partitioner splits, amax is the maximum of the whole tensor. Where data axes
are manual (`grad_sync = "update"`), each group of devices scales its own rows of x and dy.

`LayerPrecision` switches a layer to bf16, or makes it record amax.
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
# Lower bound of amax: the scale of an all-zero tensor must be finite.
_LEAST_AMAX = 2.0**-64


class Fp8(NamedTuple):
    """Precision settings of the products of a linear layer.

    Attributes:
        name: name of the layer in its block, such as "attention.q_proj".
        scaling: `train.fp8_scaling`.
        axes: logical axes of the weight.
        sums: dtype in which devices sum gradients of the weight.
        regathers: see `linear.Backward`.
    """

    name: str
    scaling: str
    axes: Axes
    sums: jnp.dtype
    regathers: bool


class Amaxes(NamedTuple):
    """Amax values for delayed scaling; 0 means that there is none yet, and the scale is 1."""

    x: Float[Array, ""]
    weight: Float[Array, ""]


class Scaled(NamedTuple):
    """An array in 8 bits, x ≈ values * unit.

    Attributes:
        values: x times the scale, rounded.
        unit: 1 / scale, a power of two.
    """

    values: Array
    unit: Float[Array, ""]


@dataclasses.dataclass
class LayerPrecision:
    """Precision of one layer's products, and the amax that its linear layers record.

    Attributes:
        in_8_bits: whether the products are in 8 bits; traced where the stages of a pipeline differ.
        records_amax: whether linear layers add to `amax`.
        amax: amax of x and W, by name of the linear layer.
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
        x: one row per token.
        weight_OI: the stored weight.
        bias_O: the stored bias, if there is one.
        amaxes: amax of earlier updates, for delayed scaling.
        precision: precision of the layer; `in_8_bits` must not be a static False. The amax of x and
            W is added to its `amax`, if it records amax.
    """
    is_on = precision.in_8_bits
    if precision.records_amax:
        amax_2 = jnp.stack([amax(x), amax(weight_OI.astype(x.dtype))])
        amax_2 = jnp.where(is_on, jax.lax.stop_gradient(amax_2), 0)
        precision.amax[fp8.name] = Max(amax_2)
    return _multiply(fp8, None if is_on is True else is_on, x, weight_OI, bias_O, amaxes)


def amax(x: Float[Array, "..."], **options: Any) -> Float[Array, "..."]:  # noqa: ANN401
    """Compute max |x| in float32; `options` are those of `jnp.max`."""
    return jnp.max(jnp.abs(_exact_float32(x)), **options)


def _exact_float32(x: Array) -> Array:
    """Convert to float32 with the precision of the dtype of x."""
    # XLA may fuse a bfloat16 producer in float32 and keep more digits. It cannot remove
    # `reduce_precision`, so amax and rounded values do not depend on fusion.
    info = jnp.finfo(x.dtype)
    wide = x.astype(jnp.float32)
    return wide if x.dtype == jnp.float32 else jax.lax.reduce_precision(wide, info.nexp, info.nmant)


def power_of_two_scale(amax: Float[Array, "..."], dtype: jnp.dtype) -> Float[Array, "..."]:
    """Return 2^⌊log2(largest / amax)⌋; 0 if amax is infinite, so that inf becomes NaN."""
    ratio = float(jnp.finfo(dtype).max) / jnp.maximum(amax, _LEAST_AMAX)
    # Clearing the mantissa bits of a positive float32 rounds it down to a power of two, exactly. An
    # infinite amax gives ratio 0 and scale 0, and 0 * inf = NaN, which the guard detects.
    bits = jax.lax.bitcast_convert_type(ratio, jnp.uint32) & jnp.uint32(0x7F800000)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def round_to_fp8(x: Array, dtype: jnp.dtype, scale: Float[Array, "..."]) -> Array:
    """Round x times a scale to 8 bits; larger values saturate, and NaN stays NaN."""
    largest = float(jnp.finfo(dtype).max)
    # A cast to fp8 would turn overflow into NaN (e4m3fn has no infinity); `clip` saturates, and
    # keeps NaN.
    return jnp.clip(_exact_float32(x) * scale, -largest, largest).astype(dtype)


def quantize_tensor(
    x: Array, dtype: jnp.dtype, earlier_amax: Float[Array, ""] | None = None
) -> Scaled:
    """Quantize with one scale, from `earlier_amax` if given, else from the current amax."""
    if earlier_amax is None:
        scale = power_of_two_scale(amax(x), dtype)
    else:
        scale = jnp.where(earlier_amax > 0, power_of_two_scale(earlier_amax, dtype), 1.0)
    return Scaled(round_to_fp8(x, dtype, scale), 1 / scale)


def fake_quantize_blocks(
    x: Float[Array, "*r c"], dtype: jnp.dtype, rows: int, columns: int
) -> Array:
    """Round x to 8 bits with a scale per block, and return the values in the dtype of x."""
    x_RC = x.reshape(-1, x.shape[-1])
    padding = [-size % block for size, block in zip(x_RC.shape, (rows, columns), strict=True)]
    padded = jnp.pad(x_RC, [(0, n) for n in padding])
    blocks = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    scale = power_of_two_scale(amax(blocks, axis=(1, 3), keepdims=True), dtype)
    values = round_to_fp8(blocks, dtype, scale).astype(x.dtype) * (1 / scale).astype(x.dtype)
    return values.reshape(padded.shape)[: x_RC.shape[0], : x_RC.shape[1]].reshape(x.shape)


Operand = Scaled | Array
"""Operand of a product; an array is multiplied as it is."""


def _einsum(form: str, left: Operand, right: Operand, dtype: jnp.dtype) -> Array:
    """Compute an `einsum` in a dtype.

    The 8-bit values are multiplied directly, and the units afterwards. XLA:GPU compiles this to an
    8-bit kernel, while a product of `values * unit` would be a bf16 kernel (docs/precision.md).
    """
    if not (isinstance(left, Scaled) and isinstance(right, Scaled)):
        return jnp.einsum(form, left, right, preferred_element_type=dtype)
    # Units are powers of two, so that scaling after the sum is exact.
    y = jnp.einsum(form, left.values, right.values, preferred_element_type=dtype)
    return y * (left.unit * right.unit).astype(dtype)


def _quantize_x(fp8: Fp8, x: Array, amaxes: Amaxes | None) -> Operand:
    """Quantize x for the product with W."""
    if fp8.scaling == "block":
        return fake_quantize_blocks(x, E4M3, 1, BLOCK)
    return quantize_tensor(x, E4M3, amaxes.x if amaxes else None)


def _quantize_weight(fp8: Fp8, weight: Array, amaxes: Amaxes | None) -> Operand:
    """Quantize W and gather it over the data axes, in this order where scales allow it."""
    if fp8.scaling == "block":
        return fake_quantize_blocks(
            collectives.all_gather_weight(weight, fp8.axes), E4M3, BLOCK, BLOCK
        )
    # Quantize first, gather second: one byte per weight is transferred. All devices use the same
    # scale, because amax is the maximum of the whole tensor.
    quantized = quantize_tensor(weight, E4M3, amaxes.weight if amaxes else None)
    return quantized._replace(values=collectives.all_gather_weight(quantized.values, fp8.axes))


def _forward(
    fp8: Fp8, x: Array, weight: Array, bias: Array | None, amaxes: Amaxes | None
) -> tuple[Array, Operand, Operand]:
    """Return the result and the quantized operands."""
    x_8 = _quantize_x(fp8, x, amaxes)
    weight_8 = _quantize_weight(fp8, weight.astype(x.dtype), amaxes)
    return _with_bias(_einsum("...i,oi->...o", x_8, weight_8, x.dtype), bias), x_8, weight_8


def _with_bias(y: Array, bias: Array | None) -> Array:
    return y if bias is None else y + bias.astype(y.dtype)


def _backward(fp8: Fp8, x: Operand, weight: Operand, d_y: Array) -> tuple[Array, Array]:
    """Return the gradients of x and W; with block scaling, `x` is not quantized."""
    sums = jnp.promote_types(fp8.sums, d_y.dtype)
    d_rows: Operand
    d_columns: Operand
    # Block scales run along the summed dimension: dx sums over outputs, dW over tokens. So dy is
    # rounded twice, and x is rounded again along tokens.
    if fp8.scaling == "block":
        d_rows = fake_quantize_blocks(d_y, E4M3, 1, BLOCK)
        d_columns = fake_quantize_blocks(d_y, E4M3, BLOCK, 1)
        x = fake_quantize_blocks(jnp.asarray(x), E4M3, BLOCK, 1)
    else:
        d_rows = d_columns = quantize_tensor(d_y, E5M2)
    d_x = _einsum("...o,oi->...i", d_rows, weight, d_y.dtype)
    return d_x, constrain(_einsum("...o,...i->oi", d_columns, x, sums), *fp8.axes)


def _forward_bf16(fp8: Fp8, x: Array, weight: Array, bias: Array | None) -> Array:
    """Return the result in bf16, for layers that stay in bf16."""
    whole = collectives.all_gather_weight(weight.astype(x.dtype), fp8.axes)
    return _with_bias(jnp.einsum("...i,oi->...o", x, whole), bias)


def _backward_bf16(fp8: Fp8, x: Array, weight: Array, d_y: Array) -> tuple[Array, Array]:
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
    """Multiply in 8 bits; with a switch, only if it is set."""
    return _multiply_forward(fp8, switch, x, weight, bias, amaxes)[0]


_named = jax.named_scope("fp8")  # marks the products of these layers in a profile


@_named
def _multiply_forward(
    fp8: Fp8,
    switch: Bool[Array, ""] | None,
    x: Array,
    weight: Array,
    bias: Array | None,
    amaxes: Amaxes | None,
) -> tuple[Array, tuple[Any, ...]]:
    # With a switch, the backward pass may take either branch, so residuals are x and W themselves.
    #
    # residuals    tensor, delayed    block                switch
    # of x         8 bits             x                    x
    # of W         8 bits, gathered   rounded, gathered    W
    #              W if `regathers`   W if `regathers`
    if switch is not None:
        y = jax.lax.cond(
            switch,
            lambda x, weight: _forward(fp8, x, weight, bias, amaxes)[0],
            lambda x, weight: _forward_bf16(fp8, x, weight, bias),
            x, weight,
        )  # fmt: skip
        return y, (switch, x, weight, jnp.zeros((), weight.dtype), bias, amaxes)
    y, x_8, weight_8 = _forward(fp8, x, weight, bias, amaxes)
    # `jnp.zeros((), weight.dtype)` carries the dtype of the weight into the backward pass without
    # its memory.
    saved_x = x if fp8.scaling == "block" else x_8
    saved_weight = weight if fp8.regathers else weight_8
    return y, (None, saved_x, saved_weight, jnp.zeros((), weight.dtype), bias, amaxes)


@_named
def _multiply_backward(
    fp8: Fp8, saved: tuple[Any, ...], d_y: Array
) -> tuple[None, Array, Array, Array | None, None]:
    switch, x, weight, like, bias, amaxes = saved  # x and weight may be `Scaled`
    if switch is not None:

        def in_8_bits(x: Array, weight: Array, d_y: Array) -> tuple[Array, Array]:
            x_8 = _quantize_x(fp8, x, amaxes)
            weight_8 = _quantize_weight(fp8, weight.astype(x.dtype), amaxes)
            return _backward(fp8, x if fp8.scaling == "block" else x_8, weight_8, d_y)

        plain = functools.partial(_backward_bf16, fp8)
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
