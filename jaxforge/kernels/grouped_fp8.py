"""Grouped products of operands that are rounded to 8 bits.

    y  = x Wᵀ      x in e4m3 with one scale, W in e4m3 with one scale per expert
    dx = dy W      dy in e5m2 with one scale
    dW = dyᵀ x     x as in the forward pass

Each device scales its own rows under every `train.fp8_scaling`. The kernels of `grouped.py` get the
rounded values in the dtype of the rows. Results are those of 8-bit products, but not faster.
Residuals take one byte per value, and W is transferred between devices in 8 bits.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxforge.kernels.fp8 import (
    E4M3,
    E5M2,
    Scaled,
    amax,
    power_of_two_scale,
    quantize_tensor,
    round_to_fp8,
)
from jaxforge.kernels.grouped import GROUPED_BACKENDS


def quantize_experts(w_GOI: Float[Array, "g o i"]) -> Scaled:
    """Quantize matrices to 8 bits with one scale each; `unit` is [g, 1, 1]."""
    scale = power_of_two_scale(amax(w_GOI, axis=(1, 2), keepdims=True), E4M3)
    return Scaled(round_to_fp8(w_GOI, E4M3, scale), 1 / scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def grouped_matmul_fp8(
    backend: str,
    x_MI: Float[Array, "m i"],
    w_GOI: Scaled,
    sizes_G: Int[Array, "g"],
    gradient_GOI: Float[Array, "g o i"],
) -> Float[Array, "m o"]:
    """Compute `grouped.grouped_matmul` with both operands in 8 bits.

    Args:
        backend: a key of `GROUPED_BACKENDS`.
        x_MI: rows, sorted by group.
        w_GOI: weights from `quantize_experts`.
        sizes_G: number of rows of each group.
        gradient_GOI: receives the gradient of the weights in its own dtype.
    """
    return _forward(backend, x_MI, w_GOI, sizes_G, gradient_GOI)[0]


def _forward(
    backend: str, x_MI: Array, w_GOI: Scaled, sizes_G: Array, gradient_GOI: Array
) -> tuple[Array, tuple]:
    # Rows beyond the last group are undefined (perhaps NaN) and must not determine the scale.
    x_8 = quantize_tensor(_mask_unused_rows(x_MI, sizes_G), E4M3)
    y_MO = GROUPED_BACKENDS[backend].matmul(
        _dequantize(x_8, x_MI.dtype), _dequantize(w_GOI, x_MI.dtype), sizes_G
    )
    # A scalar carries the dtype of the weights' gradient to the backward pass, without its memory.
    return y_MO, (x_8, w_GOI, sizes_G, jnp.zeros((), gradient_GOI.dtype))


def _backward(backend: str, saved: tuple, dy_MO: Array) -> tuple[Array, None, None, Array]:
    x_8, w_GOI, sizes_G, like = saved
    # The saved x_8 and W take one byte per value. Widening is exact: an 8-bit value times a power
    # of two fits the mantissa of bfloat16.
    products, dtype = GROUPED_BACKENDS[backend], dy_MO.dtype
    # Both products use the same rounded dy, with one scale for all rows of this device.
    rounded_dy = _dequantize(quantize_tensor(_mask_unused_rows(dy_MO, sizes_G), E5M2), dtype)
    dx_MI = products.gradient_of_rows(rounded_dy, _dequantize(w_GOI, dtype), sizes_G)
    dw_GOI = products.gradient_of_weights(_dequantize(x_8, dtype), rounded_dy, sizes_G)
    return dx_MI, None, None, dw_GOI.astype(like.dtype)


grouped_matmul_fp8.defvjp(_forward, _backward)


def _mask_unused_rows(rows: Float[Array, "m i"], sizes_G: Int[Array, "g"]) -> Float[Array, "m i"]:
    """Return the rows with zeros beyond the last group."""
    return jnp.where((jnp.arange(len(rows)) < jnp.sum(sizes_G))[:, None], rows, 0)


def _dequantize(x: Scaled, dtype: jnp.dtype) -> Array:
    """Dequantize exactly: units are powers of two."""
    return x.values.astype(dtype) * x.unit.astype(dtype)
