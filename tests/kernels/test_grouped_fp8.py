"""Tests of grouped products in 8 bits against NumPy with the same rounding."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxforge.kernels.fp8 import E4M3, E5M2
from jaxforge.kernels.grouped_fp8 import grouped_matmul_fp8, quantize_experts

BFLOAT16 = ml_dtypes.bfloat16
SIZES = np.array([5, 0, 7], np.int32)
ROWS, INPUTS, OUTPUTS = 16, 8, 6
"""Shapes; four of the rows belong to no expert."""


def quantized(x, dtype):
    """Return the 8-bit values with one scale that is a power of two."""
    largest = float(ml_dtypes.finfo(dtype).max)
    scale = 2.0 ** np.floor(np.log2(largest / np.abs(x).max()))
    return np.clip(x * scale, -largest, largest).astype(dtype).astype(np.float32) / scale


def test_grouped_fp8_products_match_rounded_operands():
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(ROWS, INPUTS)), rng.normal(size=(ROWS, OUTPUTS))
    w = rng.normal(size=(3, OUTPUTS, INPUTS)) * np.array([1.0, 9.0, 0.01])[:, None, None]
    x, w, dy = (item.astype(BFLOAT16).astype(np.float32) for item in (x, w, dy))
    n_used = int(SIZES.sum())
    x[n_used:], dy[n_used:] = 1e6, np.nan  # must not determine a scale

    def product(x, gradient):
        packed = quantize_experts(jnp.asarray(w, BFLOAT16))
        return grouped_matmul_fp8("blocks", x, packed, jnp.asarray(SIZES), gradient)

    @jax.jit
    def with_gradients(x, dy):
        y, back = jax.vjp(product, x, jnp.zeros(w.shape, jnp.float32))
        return y, *back(dy)

    y, dx, dw = map(np.asarray, with_gradients(x.astype(BFLOAT16), dy.astype(BFLOAT16)))
    x_8, dy_8 = quantized(x[:n_used], E4M3), quantized(dy[:n_used], E5M2)
    w_8 = np.stack([quantized(item, E4M3) for item in w])
    begin = 0
    for expert, size in enumerate(SIZES):
        rows = slice(begin, begin + size)
        begin += size
        for result, expected in (
            (y[rows], x_8[rows] @ w_8[expert].T),
            (dx[rows], dy_8[rows] @ w_8[expert]),
        ):
            np.testing.assert_allclose(result.astype(np.float32), expected, rtol=2**-7, atol=1e-6)
        np.testing.assert_allclose(dw[expert], dy_8[rows].T @ x_8[rows], rtol=1e-5, atol=1e-5)
