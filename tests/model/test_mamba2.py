"""Tests of Mamba-2 as a mixer: meshes, packed documents, decoding state, initial values, rules."""

import functools
import re

import jax
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from pydantic import ValidationError

from jaxforge.config import rules
from jaxforge.config.mixers import Mamba2Config
from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from jaxforge.model.flops import flops_per_token
from jaxforge.model.transformer import Model
from tests.conftest import tiny_config
from tests.helpers import initial_params, losses_and_gradients, random_batches, setup

TOKENS, ROWS = 48, 4
SETTINGS = {"heads": 8, "head_dim": 4, "state_size": 6, "groups": 2, "chunk_size": 5}
SHAPE = {"dim": 32, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 64,
         "ffn_hidden_dim": 48, "init_std": 0.2}  # fmt: skip
HYBRID = {
    **SHAPE, "n_layers": 3, "mamba2": SETTINGS, "mixer_pattern": ["mamba2", "attention", "none"],
    "feed_forward_pattern": ["none", "none", "dense"], "rope_pattern": [False],
}  # fmt: skip
PURE = {
    **SHAPE, "mamba2": {**SETTINGS, "groups": 1, "proj_bias": True}, "mixer_pattern": ("mamba2",),
    "feed_forward_pattern": ["none"],
}  # fmt: skip
RING, ULYSSES = {"cp_strategy": "ring"}, {"cp_strategy": "ulysses"}
UPDATE, MICROBATCH = {"grad_sync": "update"}, {"grad_sync": "microbatch"}
MESHES = [
    (HYBRID, {"dp_shard": 2, "cp": 2, "tp": 2, **RING}, MICROBATCH),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            (HYBRID, {"dp_shard": 2, "cp": 2, "tp": 2, **RING}, UPDATE),
            (HYBRID, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}, UPDATE),
            (PURE, {"dp_shard": 2, "cp": 2, "tp": 2, **ULYSSES}, UPDATE),
            (PURE, {"cp": 4, "tp": 2, **ULYSSES}, MICROBATCH),
            (PURE, {"pp": 2, "dp_shard": 2, "tp": 2}, MICROBATCH),
            (PURE, {"pp": 2, "cp": 2, **RING}, UPDATE),
            (PURE, {"pp": 2, "pp_schedule": "interleaved_1f1b", "pp_chunks": 2}, UPDATE),
        )
    ),
]


def config(model, mesh=None, train=UPDATE):
    mesh = mesh or {}
    shared = mesh.get("dp_shard", 1) * mesh.get("dp_replicate", 1)
    rows = {"grad_accum_steps": 2, "batch_size": ROWS // shared, "seq_len": TOKENS, **train}
    return tiny_config(model=model, train=rows, distributed={"dp_shard": 1, **mesh})


def packed_batch(config):
    (batch,) = random_batches(config, 1)
    shape = batch["labels"].shape
    ids = np.sort(np.random.default_rng(1).integers(0, 4, shape), axis=-1)
    ids[:, 0] = 0  # a document over all devices
    return {**batch, "segment_ids": ids}


def run(config):
    """Return the loss and all gradients of a packed batch, with the layers in their order."""
    program = setup(config)
    losses, grads = losses_and_gradients(program, [packed_batch(config)])
    order = np.argsort(program.model.stack.rows())  # of the layers in the rows of all stages
    if "layers" in grads:
        grads["layers"] = jax.tree.map(lambda x: x.reshape(len(order), -1)[order], grads["layers"])
    return losses, ravel_pytree(grads)[0]


@functools.cache
def alone(is_hybrid):
    return run(config(HYBRID if is_hybrid else PURE))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "mesh", "train"), MESHES, ids=str)
def test_losses_and_gradients_match_single_device(model, mesh, train):
    loss, gradients = run(config(model, mesh, train))
    want, d_want = alone(model is HYBRID)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    np.testing.assert_allclose(gradients, d_want, atol=1e-5 * np.abs(d_want).max())


@functools.cache
def model_and_params():
    model = Model(ModelConfig(**HYBRID))
    return model, jax.device_get(initial_params(model))


def test_packed_documents_equal_separate_ones():
    model, params = model_and_params()
    tokens = np.random.default_rng(0).integers(0, 64, (1, 24))
    ids = np.repeat([[0, 1, 2]], [7, 4, 13], axis=1)
    hidden = jax.jit(model.hidden)
    packed = hidden(params, np.repeat(tokens, 3, axis=0), np.repeat(ids, 3, axis=0))
    documents = [tokens[0, ids[0] == i] for i in range(3)]
    padded = np.stack([np.pad(document, (0, 24 - len(document))) for document in documents])
    separate = hidden(params, padded, np.zeros_like(padded))
    for i in range(3):
        length = np.sum(ids == i)
        np.testing.assert_allclose(packed[0, ids[0] == i], separate[i, :length], atol=2e-5)


def test_decoding_state_has_the_size_of_the_paper():
    """A head has head_dim x state_size float32 numbers, a channel the last conv_size - 1 inputs."""
    model, _ = model_and_params()
    short, long = (model.empty_cache(2, length)["mamba2_layers"] for length in (8, 1 << 20))
    assert jax.tree.map(np.shape, short) == jax.tree.map(np.shape, long)
    assert short.state.shape == (1, 2, 8, 4, 6)
    channels = sum(x.shape[2] for x in short[:3])
    assert (channels, short.x.shape[3]) == (8 * 4 + 2 * 2 * 6, 4 - 1)
    assert model.extend_cache({"mamba2_layers": short}, 9)["mamba2_layers"] is short


def test_cost_of_decoding_does_not_depend_on_length():
    """A decoding step of a model without attention is one program for any number of tokens."""
    model = Model(ModelConfig(**PURE))

    def step(length):
        cache = jax.eval_shape(functools.partial(model.empty_cache, 2, length))
        tokens = jax.ShapeDtypeStruct((2, 1), np.int32)
        return jax.jit(model.extend).lower(model.abstract, tokens, tokens, cache).as_text()

    assert step(16) == step(1 << 20)


def test_step_has_no_pairs_of_all_tokens():
    """Neither the forward nor the backward pass has an array of tokens x tokens."""
    tokens = 96  # no other dimension is as long
    c = config({**PURE, "max_seq_len": tokens}, train={"seq_len": tokens})
    program = setup(c)
    text = jax.jit(program.gradients).lower(
        *jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (
            program.abstract_state().params, program.abstract_state().model_state, packed_batch(c)
        ))
    ).as_text()  # fmt: skip
    shapes = {tuple(dims.split("x")[:-1]) for dims in re.findall(r"tensor<([\dx]+x\w+)>", text)}
    assert any(str(tokens) in shape for shape in shapes)
    assert not [shape for shape in shapes if shape.count(str(tokens)) > 1]


def test_initial_values_are_those_of_the_paper():
    settings = {**SETTINGS, "heads": 4096, "head_dim": 1, "groups": 1}
    model = Model(ModelConfig(**{**PURE, "n_layers": 1, "mamba2": settings}))
    layer = initial_params(model)["layers"]["mamba2"]
    rates, steps = np.exp(layer["a_log"]), np.log1p(np.exp(layer["dt_bias"]))
    assert 1 <= rates.min() < 1.1
    assert 15.9 < rates.max() <= 16
    np.testing.assert_allclose(np.mean(rates), 8.5, atol=0.3)
    np.testing.assert_allclose([steps.min(), steps.max()], [0.001, 0.1], rtol=0.02)
    np.testing.assert_allclose(np.mean(np.log10(steps)), -2, atol=0.05)
    assert set(np.unique(layer["skip"])) == {1}
    assert np.abs(layer["x_conv"]["weight"]).max() <= 0.5  # 1 / √conv_size


def test_flops_count_projections_convolutions_and_states():
    model, length = ModelConfig(**PURE), 16
    inner, groups, heads = 32, 6, 8
    matrices = 32 * (3 * inner + 2 * groups + heads)
    of_token = 4 * (inner + 2 * groups) + 2 * inner * 6
    assert flops_per_token(model, length) == 6 * (4 * (matrices + of_token) + 32 * 64)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"multipliers": (1.0, 2.0)}, "multipliers must have five factors, not 2"),
        ({"groups": 3}, "heads = 80 must be a multiple of groups = 3"),
        ({"time_step_min": 0.2, "time_step_max": 0.1}, "time_step_min = 0.2 must be less than"),
        ({"init_time_step_min": 0.5}, "init_time_step_min = 0.5 must be less than"),
    ],
)
def test_contradicting_settings_are_refused(keys, message):
    with pytest.raises(ValidationError, match=message):
        ModelConfig(mamba2=keys)


def test_mup_is_refused():
    with pytest.raises(ValidationError, match="muP has no rules for its parameters"):
        ModelConfig(mixer_pattern=("mamba2",), mup_base_width=64)


@pytest.mark.parametrize(
    ("mesh", "settings", "message"),
    [
        ({"tp": 2}, {"heads": 3}, r"model\.mamba2\.heads = 3 must be a multiple of distributed"),
        ({"tp": 4}, {"heads": 8, "groups": 2}, r"model\.mamba2\.groups = 2 must be a multiple of"),
        ({"cp": 8, **RING}, {"conv_size": 8}, "in 16 parts is shorter than the 7 earlier tokens"),
    ],
)  # fmt: skip
def test_meshes_that_split_heads_or_convolutions_are_refused(mesh, settings, message):
    c = config({**HYBRID, "n_heads": 8, "n_kv_heads": 8, "mamba2": settings}, mesh)
    with pytest.raises(UserError, match=message):
        rules.check(c, 8)


def test_default_settings_are_those_of_the_paper():
    settings = Mamba2Config()
    assert settings.inner_size == 2 * 2560
    assert settings.time_step_limits == (0.0, float("inf"))
