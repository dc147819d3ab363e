"""Tests of the feed-forward block against torch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxforge.config.model import ModelConfig
from jaxforge.model.linear import Declare, parameter_keys
from jaxforge.model.mlp import ACTIVATIONS, MLP, activated, gated

DIM, HIDDEN = 16, 24


@functools.cache
def make(activation):
    """Return the second of three stacked layers, with a large std."""
    config = ModelConfig(
        dim=DIM, n_heads=2, ffn_hidden_dim=HIDDEN, activation=activation, init_std=0.5
    )

    @nnx.jit
    def drawn():
        mlp = MLP(config, Declare(parameter_keys(jax.random.key(0)), jnp.float32, layers=3))
        definition, stacked = nnx.split(mlp)
        return nnx.merge(definition, jax.tree.map(lambda leaf: leaf[1], stacked))

    return drawn()


GATED = ("silu", "swiglu_oai")


def torch_activation(name):
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    if name == "swiglu_oai":
        return lambda gate: gate * torch.sigmoid(1.702 * gate)
    if name == "relu2":
        return lambda x: functional.relu(x) ** 2
    if name == "gelu_tanh":
        return functools.partial(functional.gelu, approximate="tanh")
    return getattr(functional, name)


def by_torch(mlp, activation, x):
    torch = pytest.importorskip("torch")
    act = torch_activation(activation)

    def linear(module, inputs):
        return inputs @ torch.from_numpy(np.array(module.weight[...])).T

    up = linear(mlp.up_proj, torch.from_numpy(x))
    if activation in GATED:
        times = up + 1 if activation == "swiglu_oai" else up
        gate = linear(mlp.gate_proj, torch.from_numpy(x))
        return linear(mlp.down_proj, act(gate) * times).numpy()
    return linear(mlp.down_proj, act(up)).numpy()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_mlp_matches_torch(activation):
    mlp = make(activation)
    x = np.random.default_rng(0).standard_normal((2, 5, DIM)).astype(np.float32)
    result = jax.jit(lambda x: mlp(x))(x)
    np.testing.assert_allclose(result, by_torch(mlp, activation, x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_match_torch(activation):
    """`gelu` is exact: its tanh approximation differs by up to 5e-4."""
    torch = pytest.importorskip("torch")
    x = np.linspace(-8, 8, 1001, dtype=np.float32)
    reference = torch_activation(activation)(torch.from_numpy(x)).numpy()
    result = jax.jit(ACTIVATIONS[activation])(x)
    np.testing.assert_allclose(result, reference, rtol=0, atol=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_only_gated_activations_declare_gate(activation):
    mlp = make(activation)
    assert hasattr(mlp, "gate_proj") == (activation in GATED)
    assert mlp.up_proj.weight.shape == (HIDDEN, DIM)
    assert mlp.down_proj.weight.shape == (DIM, HIDDEN)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_mlp_computes_in_input_dtype(activation):
    x = jax.ShapeDtypeStruct((1, 2, DIM), jnp.bfloat16)
    assert jax.eval_shape(make(activation), x).dtype == jnp.bfloat16


def value_and_slopes(f, *inputs):
    """Return values and derivatives of an elementwise function."""

    def both(*inputs):
        y, pull = jax.vjp(f, *inputs)
        return y, pull(jnp.ones_like(y))

    return jax.device_get(jax.jit(both)(*inputs))


@pytest.mark.parametrize("activation", ["swiglu_oai", "silu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_clamped_gates_and_gradients_match_torch(activation, dtype):
    """At the limit itself, torch's clamp has the gradient 1."""
    torch = pytest.importorskip("torch")
    at = np.array([-9, -7, -6.5, -1, 0, 0.5, 6.5, 7, 9], np.float32)
    x, y = (each.ravel() for each in np.meshgrid(at, at))
    reference = [torch.tensor(v).to(getattr(torch, dtype)).requires_grad_() for v in (x, y)]
    gate, up = reference[0].clamp(max=7.0), reference[1].clamp(-7.0, 7.0)
    out = torch_activation(activation)(gate) * (up + 1 if activation == "swiglu_oai" else up)
    out.sum().backward()
    config = ModelConfig(activation=activation, swiglu_limit=7.0)
    result, slopes = value_and_slopes(
        lambda gate, up: gated(gate, up, config), x.astype(dtype), y.astype(dtype)
    )
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-6} if dtype == "float32" else {"rtol": 2**-5, "atol": 2**-6}
    )
    for a, b in ((result, out), *zip(slopes, (t.grad for t in reference), strict=True)):
        assert a.dtype == jnp.dtype(dtype)
        np.testing.assert_allclose(a.astype(np.float32), b.detach().float(), **tolerance)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"activation": "swiglu_oai", "gated_mlp": False}, "is always gated: remove gated_mlp"),
        ({"activation": "gelu", "swiglu_limit": 7.0}, "swiglu_limit = 7.0 requires gated_mlp"),
    ],
)
def test_conflicting_gate_settings_raise(keys, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**keys)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gelu_and_gradient_match_torch(dtype):
    torch = pytest.importorskip("torch")
    x = np.linspace(-6, 6, 1001, dtype=np.float32)
    reference = torch.tensor(x).to(getattr(torch, dtype)).requires_grad_()
    y = torch.nn.functional.gelu(reference)
    y.sum().backward()
    result, (slope,) = value_and_slopes(ACTIVATIONS["gelu"], x.astype(dtype))
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-6} if dtype == "float32" else {"rtol": 2**-7, "atol": 1e-6}
    )
    assert result.dtype == slope.dtype == jnp.dtype(dtype)
    for a, b in ((result, y), (slope, reference.grad)):
        np.testing.assert_allclose(a.astype(np.float32), b.detach().float(), **tolerance)


def test_recomputed_activation_saves_only_its_inputs():
    config = ModelConfig(dim=DIM, n_heads=2)
    up, gate = np.random.default_rng(0).standard_normal((2, 5, HIDDEN)).astype(np.float32)
    scale = np.arange(5, dtype=np.float32)

    def result(up, gate, scale):
        return activated(up, gate, config, scale)

    def plain(up, gate, scale):
        return jax.nn.silu(gate) * up * scale[:, None]

    def with_gradients(f, *inputs):
        y, back = jax.vjp(f, *inputs)
        return y, back(y)

    inputs = up, gate, scale
    (y, gradients), (expected, plain_gradients) = (
        jax.jit(functools.partial(with_gradients, f))(*inputs) for f in (result, plain)
    )
    np.testing.assert_allclose(y, expected, rtol=1e-6)
    for ours_gradient, plain_gradient in zip(gradients, plain_gradients, strict=True):
        np.testing.assert_allclose(ours_gradient, plain_gradient, rtol=1e-5, atol=1e-5)
    _, back = jax.eval_shape(functools.partial(jax.vjp, result), *inputs)
    saved = sum(leaf.size for leaf in jax.tree.leaves(back))
    assert saved == sum(each.size for each in inputs)
