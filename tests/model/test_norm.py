"""Tests of norms against torch, and of their rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.model.linear import Declare, parameter_keys
from jaxforge.model.norm import NORMS, LayerNorm

DIM = 48


def make(kind, eps, dtype=jnp.float32):
    norm = NORMS[kind](DIM, eps, Declare(parameter_keys(jax.random.key(0)), dtype))
    rng = np.random.default_rng(1)
    norm.weight[...] = jnp.asarray(rng.uniform(0.5, 1.5, DIM), dtype)
    if kind == "layernorm":
        norm.bias[...] = jnp.asarray(rng.standard_normal(DIM), dtype)
    return norm


def random_input(scale=1.0):
    x = np.random.default_rng(0).standard_normal((5, 7, DIM)) + 0.5
    return (scale * x).astype(np.float32)


def by_torch(norm, kind, x):
    torch = pytest.importorskip("torch")
    x, weight = torch.from_numpy(x), torch.from_numpy(np.array(norm.weight[...]))
    if kind == "rmsnorm":
        return torch.nn.functional.rms_norm(x, (DIM,), weight, norm.eps).numpy()
    bias = torch.from_numpy(np.array(norm.bias[...]))
    return torch.nn.functional.layer_norm(x, (DIM,), weight, bias, norm.eps).numpy()


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize(("eps", "scale"), [(1e-5, 1.0), (1e-6, 1e-3), (1e-2, 0.1), (1e-5, 1e4)])
def test_norms_match_torch(kind, eps, scale):
    norm, x = make(kind, eps), random_input(scale)
    np.testing.assert_allclose(norm(jnp.asarray(x)), by_torch(norm, kind, x), rtol=0, atol=3e-6)


def in_float64(norm, kind, x):
    x, weight = np.asarray(x, np.float64), np.asarray(norm.weight[...], np.float64)
    if kind == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + norm.eps) * weight
    return x + np.asarray(norm.bias[...], np.float64) if kind == "layernorm" else x


@pytest.mark.parametrize("weights", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", NORMS)
def test_bfloat16_norm_is_rounded_once(kind, weights):
    norm, x = make(kind, 1e-5, weights), jnp.asarray(random_input(), jnp.bfloat16)
    result = norm(x)
    assert result.dtype == jnp.bfloat16
    exact = in_float64(norm, kind, x)
    half_unit = 2.0 ** (np.floor(np.log2(np.abs(exact))) - 8)
    # float32 itself may lose 2^-24 of terms up to 4, for any size of the sum.
    error = np.abs(np.asarray(result, np.float64) - exact)
    assert (error <= half_unit + 4 * 2**-20).all()


@pytest.mark.parametrize("kind", NORMS)
def test_norm_of_zero_vector_is_finite(kind):
    norm = make(kind, 1e-5)
    expected = np.zeros(DIM) if kind == "rmsnorm" else norm.bias[...]
    np.testing.assert_array_equal(norm(jnp.zeros(DIM)), expected)


@pytest.mark.parametrize("kind", NORMS)
def test_initial_norm_weights_are_ones(kind):
    norm = NORMS[kind](DIM, 1e-5, Declare(parameter_keys(jax.random.key(0)), jnp.float32))
    np.testing.assert_array_equal(norm.weight[...], np.ones(DIM))
    if kind == "layernorm":
        np.testing.assert_array_equal(norm.bias[...], np.zeros(DIM))


@pytest.mark.parametrize("bias", [True, False])
def test_layernorm_with_unit_offset_multiplies_by_one_plus_weight(bias):
    """Initially it is plain normalization; without a bias it declares none."""
    declare = Declare(parameter_keys(jax.random.key(0)), jnp.float32)
    norm, x = LayerNorm(DIM, 1e-5, declare, unit_offset=True, bias=bias), random_input()
    assert hasattr(norm, "bias") is bias
    plain = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(norm(jnp.asarray(x)), plain, rtol=0, atol=3e-6)
    weight = np.linspace(-0.5, 0.5, DIM, dtype=np.float32)
    norm.weight[...] = jnp.asarray(weight)
    np.testing.assert_allclose(norm(jnp.asarray(x)), plain * (1 + weight), rtol=0, atol=3e-6)
