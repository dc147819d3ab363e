"""The feed-forward block against torch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxforge.config.model import ModelConfig
from jaxforge.model.linear import Declare
from jaxforge.model.mlp import ACTIVATIONS, MLP

DIM, HIDDEN = 16, 24


def make(activation):
    """The second of three stacked layers, initialised widely."""
    config = ModelConfig(
        dim=DIM, n_heads=2, ffn_hidden_dim=HIDDEN, activation=activation, init_std=0.5
    )
    mlp = MLP(config, Declare(nnx.Rngs(params=0), jnp.float32, layers=3))
    definition, stacked = nnx.split(mlp)
    return nnx.merge(definition, jax.tree.map(lambda leaf: leaf[1], stacked))


def torch_activation(name):
    functional = pytest.importorskip("torch").nn.functional
    if name == "gelu_tanh":
        return functools.partial(functional.gelu, approximate="tanh")
    return getattr(functional, name)


def by_torch(mlp, activation, x):
    torch = pytest.importorskip("torch")
    act = torch_activation(activation)

    def linear(module, inputs):
        return inputs @ torch.from_numpy(np.array(module.weight[...])).T

    up = linear(mlp.up_proj, torch.from_numpy(x))
    if activation == "silu":
        return linear(mlp.down_proj, act(linear(mlp.gate_proj, torch.from_numpy(x))) * up).numpy()
    return linear(mlp.down_proj, act(up)).numpy()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_block_agrees_with_torch(activation):
    mlp = make(activation)
    x = np.random.default_rng(0).standard_normal((2, 5, DIM)).astype(np.float32)
    np.testing.assert_allclose(mlp(x), by_torch(mlp, activation, x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_agree_with_torch(activation):
    """gelu is the exact one: its approximation by tanh is off by up to 5e-4."""
    torch = pytest.importorskip("torch")
    x = np.linspace(-8, 8, 1001, dtype=np.float32)
    theirs = torch_activation(activation)(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(ACTIVATIONS[activation](x), theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_only_silu_has_a_gate(activation):
    mlp = make(activation)
    assert hasattr(mlp, "gate_proj") == (activation == "silu")
    assert mlp.up_proj.weight.shape == (HIDDEN, DIM)
    assert mlp.down_proj.weight.shape == (DIM, HIDDEN)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_block_multiplies_in_the_dtype_of_its_input(activation):
    assert make(activation)(jnp.ones((1, 2, DIM), jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gelu_and_its_gradient_are_torchs(dtype):
    torch = pytest.importorskip("torch")
    x = np.linspace(-6, 6, 1001, dtype=np.float32)
    theirs = torch.tensor(x).to(getattr(torch, dtype)).requires_grad_()
    y = torch.nn.functional.gelu(theirs)
    y.sum().backward()
    ours, pull = jax.vjp(ACTIVATIONS["gelu"], jnp.asarray(x, dtype))
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-6} if dtype == "float32" else {"rtol": 2**-7, "atol": 1e-6}
    )
    (slope,) = pull(jnp.ones_like(ours))
    assert ours.dtype == slope.dtype == jnp.dtype(dtype)
    for a, b in ((ours, y), (slope, theirs.grad)):
        np.testing.assert_allclose(a.astype(jnp.float32), b.detach().float(), **tolerance)
