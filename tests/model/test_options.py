"""Tests of model options: packed documents, caches, and several devices."""

import functools

import jax
import numpy as np
import pytest

from jaxforge.config.model import ModelConfig, RopeScaling
from jaxforge.errors import UserError
from jaxforge.model.decoding import Decoder
from jaxforge.model.sampling import Sampling
from jaxforge.model.transformer import Model, build_model
from jaxforge.parallel.mesh import make_mesh
from jaxforge.parallel.sharding import param_shardings
from tests.conftest import tiny_config
from tests.helpers import EVERY_OPTION, LEARNED, drawn, initial_params, with_random_biases

GREEDY = Sampling(temperature=0.0)
LONGROPE = {"rope_scaling": RopeScaling(
    rope_type="longrope", original_max_seq_len=8, factor=4.0,
    short_factor=(1.0,) * 4, long_factor=(1.0, 2.0, 4.0, 8.0),
)}  # fmt: skip
# Llama 4 multiplies queries by a factor of their position in layers without rotary positions.
LLAMA4 = {"rope_pattern": (False, True), "qk_l2_norm": True, "attn_temperature_scale": 0.7,
          "attn_temperature_floor": 4, "attention_chunk_size": 5}  # fmt: skip
HUNYUAN = {"qk_norm": True, "qk_norm_after_rotary": True}
MODELS = {"every option": EVERY_OPTION, "learned": LEARNED, "longrope": LONGROPE,
          "llama4": LLAMA4, "hunyuan": HUNYUAN}  # fmt: skip
BOTH = pytest.mark.parametrize(
    "name",
    ["every option", "learned", "llama4", pytest.param("hunyuan", marks=pytest.mark.slow)],
)


def config_of(name, **axes):
    shape = {"dim": 32, "vocab_size": 64, "init_std": 0.3, "max_seq_len": 32}
    return tiny_config(model={**shape, **MODELS[name]}, distributed={"dp_shard": 1, **axes})


@functools.cache
def toy(name):
    config = config_of(name)
    model = Model(config.model)
    hidden, extend = jax.jit(model.hidden), jax.jit(model.extend)
    return model, with_random_biases(drawn(config)), hidden, extend


def random_tokens(length=24):
    return np.random.default_rng(0).integers(0, 64, (2, length))


@BOTH
def test_packed_document_matches_document_alone(name):
    _, params, hidden, _ = toy(name)
    tokens = random_tokens()
    segment_ids = np.array([[0] * 7 + [1] * 10 + [2] * 7, [0] * 3 + [1] + [2] * 20])
    packed = np.asarray(hidden(params, tokens, segment_ids))
    for row in range(2):
        for document in range(3):
            location = segment_ids[row] == document
            alone = np.zeros((2, 24), int)  # earlier tokens do not see later ones
            alone[0, : location.sum()] = tokens[row, location]
            expected = np.asarray(hidden(params, alone))[0, : location.sum()]
            np.testing.assert_allclose(packed[row, location], expected, rtol=0, atol=2e-5)
    assert np.abs(packed - np.asarray(hidden(params, tokens))).max() > 0.1


@BOTH
def test_cache_rows_may_have_different_positions(name):
    model, params, hidden, extend = toy(name)
    tokens = random_tokens()
    expected = np.asarray(jax.jit(model.logits)(params, hidden(params, tokens)))
    cache = model.empty_cache(2, 24)
    for begins in ([0, 0], [8, 4], [16, 12]):
        at = np.array(begins)[:, None] + np.arange(8)
        out, cache = extend(params, np.take_along_axis(tokens, at, 1), at, cache)
        there = np.take_along_axis(expected, at[..., None], 1)
        np.testing.assert_allclose(out, there, rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["every option", "learned"])
def test_generation_does_not_depend_on_mesh(name):
    model, params, _, _ = toy(name)
    prompts = [[5, 9, 33], [7, 1, 60, 2, 8, 44, 21]]
    alone = Decoder(model, params, 8, GREEDY).complete(prompts, range(2))
    assert len({token for row in alone for token in row.tokens}) > 2
    axes = {"pp": 2, "dp_shard": 2, "tp": 2}
    split = build_model(config_of(name, **axes))
    mesh = make_mesh(config_of(name, **axes), jax.devices())
    placed = jax.device_put(params, param_shardings(split.abstract, split.axes, mesh))
    with jax.set_mesh(mesh):
        assert Decoder(split, placed, 8, GREEDY, mesh=mesh).complete(prompts, range(2)) == alone


def test_prompt_padding_does_not_change_sequence_length():
    """Prompts are padded to 16 tokens; beyond 8 tokens, LongRoPE has other frequencies."""
    model, params, hidden, extend = toy("longrope")
    tokens, lengths = random_tokens(16), np.array([5, 10])
    at = np.broadcast_to(np.arange(16), (2, 16))
    last, _ = extend(params, tokens, at, model.empty_cache(2, 16), only=lengths - 1)
    last, logits = np.asarray(last), jax.jit(model.logits)
    for row, length in enumerate(lengths):
        alone = logits(params, hidden(params, tokens[row : row + 1, :length])[:, -1:])
        np.testing.assert_allclose(last[row], alone[0], rtol=0, atol=2e-5)


def test_unit_offset_norms_start_with_same_logits():
    """Initial logits do not depend on how norms store their weights."""
    shape = {"dim": 32, "n_layers": 1, "n_heads": 4, "vocab_size": 64, "ffn_hidden_dim": 48}
    logits = []
    for offset in (False, True):
        model = Model(ModelConfig(**shape, norm_unit_offset=offset, qk_norm=True))
        params = jax.device_get(initial_params(model))
        forward = jax.jit(lambda p, t, model=model: model.logits(p, model.hidden(p, t)))
        logits.append(forward(params, random_tokens()))
    np.testing.assert_array_equal(*logits)
    assert not params["norm"]["weight"].any()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"partial_rotary_factor": 0.3}, "turns 19 of 64 channels: rotary embeddings require "
                                         "an even number"),
        ({"qk_norm_type": "layernorm"}, "has no effect with qk_norm = false"),
        ({"attn_temperature_scale": 0.1}, "has no effect: all layers have rotary positions"),
        ({"attn_temperature_floor": 7}, "has no effect without attn_temperature_scale"),
        ({"qk_l2_norm": True, "qk_norm": True}, "qk_l2_norm = true requires layers with rotary"),
        ({"num_experts": 4, "moe_score_inputs": True, "moe_gradient_scale": True}, "excludes moe_"),
        ({"shared_norm": True, "parallel_residual": True, "mixer_pattern": ["attention", "none"]},
         "requires a mixer and a feed-forward in each layer"),
        ({"norm_bias": False}, 'norm_bias = false has no effect with norm_type = "rmsnorm"'),
        ({"shared_norm": True}, "has no effect with parallel_residual = false"),
        ({"shared_norm": True, "parallel_residual": True, "norm_placement": "post"},
         'has no effect with norm_placement = "post"'),
        ({"qk_norm_scope": "projection"}, "has no effect with qk_norm = false"),
        ({"qk_norm_after_rotary": True}, "has no effect with qk_norm = false"),
        *(({"qk_norm": True, "qk_norm_after_rotary": True, **keys}, "requires layers with rotary")
          for keys in ({"qk_norm_scope": "projection"}, {"rope_pattern": [False]})),
        ({"position_embedding": "learned", "partial_rotary_factor": 0.5},
         'partial_rotary_factor = 0.5 has no effect with position_embedding = "learned"'),
        ({"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0] * 32}},
         "rope_scaling.short_factor has 0 numbers, but there are 32 pairs"),
        ({"rope_scaling": {"rope_type": "yarn"}, "rope_theta": 1.0}, "must be greater than 1"),
        ({"rope_scaling": {"rope_type": "yarn", "beta_slow": 64.0}}, "less than beta_fast = 32.0"),
    ],
)  # fmt: skip
def test_conflicting_model_keys_raise(keys, message):
    with pytest.raises((UserError, ValueError), match=message):
        ModelConfig(dim=256, n_heads=4, **keys)
