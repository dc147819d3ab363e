"""Tests of rematerialization: results do not change, and saved values do."""

import functools
import re
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.config.model import ModelConfig
from jaxforge.config.train import TrainConfig
from jaxforge.model.runtime import Runtime
from jaxforge.model.transformer import Model
from tests.helpers import initial_params

CONFIG = ModelConfig(
    dim=32,
    n_layers=8,
    n_heads=4,
    n_kv_heads=2,
    vocab_size=64,
    ffn_hidden_dim=64,
    init_std=0.1,
    tie_embeddings=True,
)
BATCH = (2, 64)
SAVES = set(get_args(TrainConfig.model_fields["activation_checkpointing"].annotation)) - {"auto"}


@functools.cache
def params():
    return initial_params(Model(CONFIG))


def traced(save, *, offload=False):
    """Trace loss and gradients."""
    model = Model(CONFIG, runtime=Runtime(save=save, offload=offload, saves_elementwise=False))

    def loss(params, tokens):
        return jnp.mean(jnp.square(model.hidden(params, tokens) - 1))

    tokens = jax.ShapeDtypeStruct(BATCH, jnp.int32)
    return jax.jit(jax.value_and_grad(loss)).trace(model.abstract, tokens)


@functools.cache
def program(save, *, offload=False):
    return traced(save, offload=offload).lower().compile()


@functools.cache
def loss_and_gradients(save, *, offload=False):
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, BATCH).astype(np.int32)
    return jax.device_get(program(save, offload=offload)(params(), tokens))


def temporary_bytes(save):
    return program(save).memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    "save",
    [
        pytest.param(save, marks=[pytest.mark.slow] * (save not in ("full", "selective")))
        for save in sorted(SAVES) if save != "everything_saveable"
    ],
)  # fmt: skip
def test_remat_does_not_change_loss_and_gradients(save):
    loss, grads = loss_and_gradients(save)
    expected_loss, expected = loss_and_gradients("everything_saveable")
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert all(np.abs(leaf).max() > 1e-4 for leaf in jax.tree.leaves(expected))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), grads, expected)


def test_full_saves_least_and_none_saves_most():
    assert temporary_bytes("full") < temporary_bytes("selective") < temporary_bytes("none")


def test_none_saves_products_but_no_elementwise_results():
    """CONFIG has 4 query heads of 8 channels over 2 key/value heads, and reference attention."""
    forward = next(eqn for eqn in traced("none").jaxpr.eqns if eqn.primitive.name == "scan")
    stacked = [var.aval.shape for var in forward.outvars if var.aval.shape[:1] == (8,)]
    saved = [shape[1:] for shape in stacked if shape[1] in (2, 128)]  # the others are weights
    (b, s), tokens = BATCH, 128
    assert sorted(saved) == sorted([
        (b, s, 32),  # input of the block
        *((tokens, width) for width in (32, 16, 16)),  # queries, keys and values
        (b, 2, s, 2, s), (b, 2, 2, s, 1),  # logits of attention, and the largest of each query
        (b, 2, 8, 2, s), (tokens, 32),  # values of attention, and its output
        (tokens, 64), (tokens, 64),  # gate and up
    ])  # fmt: skip


def test_unrolled_layers_are_not_saved_by_reuse():
    def barriers(unroll):
        model = Model(CONFIG, runtime=Runtime(save="none", unroll=unroll, saves_elementwise=False))
        tokens = jax.ShapeDtypeStruct(BATCH, jnp.int32)
        gradient = jax.grad(lambda params, tokens: jnp.sum(model.hidden(params, tokens)))
        return (
            jax.jit(gradient).lower(model.abstract, tokens).as_text().count("optimization_barrier")
        )

    assert barriers(CONFIG.n_layers) > barriers(1)


def test_full_does_not_save_scores():
    """`none` saves at least the scores of every block, B · H · S² · 4 bytes."""
    scores = BATCH[0] * CONFIG.n_heads * BATCH[1] ** 2 * 4
    assert temporary_bytes("none") > CONFIG.n_layers * scores
    assert temporary_bytes("none") - temporary_bytes("full") > CONFIG.n_layers * scores


def test_named_policies_order_memory_use():
    everything, nothing = (
        temporary_bytes("everything_saveable"),
        temporary_bytes("nothing_saveable"),
    )
    assert nothing < temporary_bytes("dots_saveable") <= everything


@pytest.mark.parametrize(
    ("save", "offloaded"),
    [
        ("full", {"8,2,64,32"}),  # input of a block
        ("dots_with_no_batch_dims_saveable", {"8,128,32", "8,128,16", "8,128,64"}),
    ],
)
def test_offloaded_activations_move_to_host(save, offloaded):
    """On CPUs, host and device memory are the same, so nothing is moved."""
    loss, grads = loss_and_gradients(save, offload=True)
    jax.tree.map(np.testing.assert_array_equal, (loss, grads), loss_and_gradients(save))
    jaxpr = str(traced(save, offload=True).jaxpr)
    assert set(re.findall(r":f32<host>\[(8,[\d,]+)\]", jaxpr)) == offloaded
