"""Tests of linear layers: heads are dimensions of their products."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.config.fine_tuning import LoraConfig
from jaxforge.config.model import ModelConfig
from jaxforge.model import linear
from jaxforge.model.linear import Backward, Matrix
from jaxforge.model.runtime import Runtime
from jaxforge.model.transformer import Model
from tests.helpers import with_random_biases

HEADS, HEAD, WIDTH = 3, 4, 6
AXES = (None, None)
PRODUCTS = [linear._product, linear._product_with_explicit_backward]


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("regathers", [False, True])
@pytest.mark.parametrize(
    ("matrix", "shapes"),
    [
        (Matrix(AXES, out_head=HEAD), ((WIDTH,), (HEADS, HEAD))),
        (Matrix(AXES, inp_head=HEAD), ((HEADS, HEAD), (WIDTH,))),
        (Matrix(AXES, out_head=HEAD, inp_head=2), ((3, 2), (HEADS, HEAD))),
    ],
)
def test_products_with_heads_match_the_formula(product, regathers, matrix, shapes):
    """y = x Wᵀ + b, dx = dy W, dW = dyᵀ x and db = Σ dy, for heads that follow each other."""
    inp, out = (int(np.prod(shape)) for shape in shapes)
    rng = np.random.default_rng(0)
    x, d_y, weight, bias = (
        rng.standard_normal(shape, np.float32) for shape in ((5, inp), (5, out), (out, inp), (out,))
    )

    def by_head(x, weight, bias):
        backward = Backward(regathers=regathers)
        return product(matrix, jnp.dtype(jnp.float32), backward, x, weight, bias)

    y, pullback = jax.vjp(by_head, x.reshape(5, *shapes[0]), weight, bias)
    assert y.shape == (5, *shapes[1])
    results = y, *pullback(jnp.asarray(d_y.reshape(y.shape)))
    right = x @ weight.T + bias, d_y @ weight, d_y.T @ x, d_y.sum(0)
    for result, expected in zip(results, right, strict=True):
        np.testing.assert_allclose(np.ravel(result), expected.ravel(), rtol=1e-5, atol=1e-5)


SHAPE = {"dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 64, "ffn_hidden_dim": 32}
LATENT = {"kv_rank": 8, "nope_head_dim": 6, "rope_head_dim": 4, "value_head_dim": 5}
MODELS = {
    "biases, gate": {"n_kv_heads": 2, "qkv_bias": True, "o_bias": True,
                     "attention_output_gate": True, "qk_norm": True},
    "norm of all heads": {"qk_norm": True, "qk_norm_scope": "projection", "clip_qkv": 0.5},
    "latent": {"mixer_pattern": ("latent_attention",), "latent_attention": {**LATENT, "q_rank": 7}},
}  # fmt: skip


@pytest.mark.parametrize(
    "adapters",
    [pytest.param(None, marks=pytest.mark.slow), LoraConfig(rank=2)],
    ids=["plain", "adapters"],
)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(model, id=name, marks=[pytest.mark.slow] * (name != "latent"))
        for name, model in MODELS.items()
    ],
)
def test_model_of_tpus_equals_that_of_flat_products(options, adapters):
    """On TPUs, heads are a dimension of products and never of a split result."""
    config, results = ModelConfig(**SHAPE, **options), []
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 12)))
    for heads in (False, True):
        model = Model(config, adapters=adapters, runtime=Runtime(heads_in_products=heads))
        params = with_random_biases(model.init(jax.random.key(0)))

        def loss(params, model=model):
            return jnp.sum(jnp.sin(model.forward(params, {"input_ids": tokens})[0]))

        program = jax.make_jaxpr(loss)(params)
        assert (re.search(r"f32\[24,4,\d+\] = dot_general", str(program)) is not None) == heads
        results.append(jax.jit(jax.value_and_grad(loss))(params))
    for computed, flat in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(computed, flat, rtol=1e-4, atol=1e-5)
