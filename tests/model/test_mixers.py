"""Tests of layers with registered mixers, and of layers that lack a part."""

import functools
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from pydantic import ValidationError

from jaxforge.config.model import ModelConfig
from jaxforge.model.decoding import Decoder
from jaxforge.model.flops import causal_flops_per_token, flops_per_token
from jaxforge.model.layer import LayerSettings
from jaxforge.model.runtime import Runtime
from jaxforge.model.sampling import Sampling
from jaxforge.model.transformer import Model, build_model, join
from jaxforge.parallel.mesh import make_mesh
from jaxforge.parallel.sharding import param_shardings
from tests import helpers
from tests.conftest import tiny_config
from tests.helpers import drawn, initial_params, random_batches
from torch_compat.checkpoint import shapes

LENGTH = 12
SHAPE = {"dim": 32, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 64, "ffn_hidden_dim": 48,
         "init_std": 0.3}  # fmt: skip
COMBINED = {  # any registered mixers, next to layers with one of them
    "n_layers": 3,
    "mixer_pattern": ("attention+decayed_sum", "none", "decayed_sum"),
    "mixer_multipliers": {"decayed_sum": 0.25},
}
HYBRID = {  # a leading layer, two periods, and all combinations of parts
    "n_layers": 7,
    "mixer_pattern": ("decayed_sum", *("decayed_sum", "none", "attention") * 2),
    "feed_forward_pattern": ("none", *("dense", "experts", "none") * 2),
    "num_experts": 4,
    "moe_router": "sigmoid_topk",
    "moe_bias_update": "sign",
}


@pytest.fixture(autouse=True)
def own_mixer(own_names):
    """Register the mixer of docs/library.md: s_t = s_{t-1} / 2 + v(x_t), y_t = o(s_t)."""
    page = (Path(__file__).parents[2] / "docs" / "library.md").read_text()
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", page, re.S) if "register_mixer" in b]
    exec(block, {"__name__": "page"})


def random_tokens(rows=2, length=LENGTH):
    return np.random.default_rng(0).integers(64, size=(rows, length), dtype=np.int32)


def build(layers=HYBRID, **runtime):
    return Model(ModelConfig(**SHAPE, **layers), runtime=Runtime(**runtime))


@functools.cache
def params_of_hybrid():
    return jax.device_get(initial_params(build()))


def test_mixers_side_by_side_add_their_outputs():
    model, tokens = build(COMBINED), random_tokens()
    params = jax.device_get(initial_params(model))
    layer = jax.tree.map(lambda leaf: leaf[0], params["attention_decayed_sum_layers"])
    assert {"attention", "decayed_sum"} < layer.keys()
    block = model.module("attention_decayed_sum_layers", layer)
    x = model.embed(params, {"input_ids": tokens})
    context = model.context(x)
    settings = LayerSettings(model.plan.layers[0], model.plan, model.runtime)
    normed = block.attention_norm(x)
    attended, summed = (
        mixer(normed, context, settings=settings).y
        for mixer in (block.attention, block.decayed_sum)
    )
    block.mlp = None
    np.testing.assert_allclose(
        block(x, context, settings=settings)[0], x + attended + 0.25 * summed, atol=1e-6
    )


def joined(model, params):
    state = model.initial_state()
    for stack, part in state.items():
        router = part["mlp"]["router"]
        params = {**params, stack: {**params[stack], "mlp": {**params[stack]["mlp"]}}}
        params[stack]["mlp"]["router"] = {**params[stack]["mlp"]["router"], **router}
    return params


def test_stacks_are_named_after_parts_that_differ():
    stacks = ModelConfig(**SHAPE, **HYBRID).stacks
    assert stacks == {
        "attention_layers": (3, 6),
        "decayed_sum_dense_layers": (1, 4),
        "decayed_sum_layers": (0,),
        "moe_layers": (2, 5),
    }
    own = ModelConfig(**SHAPE, n_layers=3, mixer_pattern=("decayed_sum", "attention"))
    assert own.stacks == {"attention_layers": (1,), "decayed_sum_layers": (0, 2)}
    assert set(ModelConfig(**SHAPE, mixer_pattern=("decayed_sum",)).stacks) == {"layers"}


def test_layers_run_in_order_of_pattern():
    """The scan over periods equals the blocks called one after another."""
    model, tokens = build(), random_tokens()
    params = joined(model, params_of_hybrid())
    segment_ids = np.repeat([[0, 0, 1]], 2, axis=0).repeat(LENGTH // 3, axis=1)
    x = model.embed(params, {"input_ids": tokens})
    context = model.context(x, segment_ids=segment_ids)
    used = dict.fromkeys(model.config.stacks, 0)
    for kind, stack in zip(model.plan.layers, model.plan.stacks, strict=True):
        layer = jax.tree.map(lambda leaf, row=used[stack]: leaf[row], params[stack])
        settings = LayerSettings(kind, model.plan, model.runtime)
        x, _ = model.module(stack, layer)(x, context, settings=settings)
        used[stack] += 1
    expected = model.final_norm(params, x)
    actual = jax.jit(model.hidden)(params, tokens, segment_ids)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("layers", "unstacks"),
    [pytest.param(HYBRID, False, marks=pytest.mark.slow), (HYBRID, True),
     pytest.param(COMBINED, False, marks=pytest.mark.slow), (COMBINED, True)],
)  # fmt: skip
def test_generation_equals_whole_passes(layers, unstacks):
    """Prompts of different lengths are padded, which recurrent states must ignore."""
    model = build(layers, unstacks=unstacks)
    params = joined(model, jax.device_get(initial_params(model)))
    prompts = [[5, 9, 33], [7, 1, 60, 2, 8, 44, 21]]
    decoder = Decoder(model, params, 6, Sampling(temperature=0.0))
    forward = jax.jit(lambda params, tokens: model.logits(params, model.hidden(params, tokens)))
    for prompt, completion in zip(prompts, decoder.complete(prompts, range(2)), strict=True):
        tokens = np.array([prompt + completion.tokens])
        padded = np.pad(tokens, ((0, 0), (0, 16 - tokens.size)))
        logits = np.asarray(forward(params, padded))[0]
        greedy = logits.argmax(-1)[len(prompt) - 1 : tokens.size - 1]
        assert greedy.tolist() == completion.tokens


def test_decoding_state_of_recurrent_mixer_does_not_grow():
    model = build()
    cache = model.empty_cache(2, 8)
    longer = model.extend_cache(cache, 4)
    assert cache["moe_layers"] is None
    assert cache["decayed_sum_layers"].shape == longer["decayed_sum_layers"].shape == (1, 2, 32)
    assert (cache["attention_layers"].k.shape[3], longer["attention_layers"].k.shape[3]) == (8, 12)


def test_conversion_knows_parameters_of_registered_mixer():
    config = ModelConfig(**SHAPE, **HYBRID)
    names = shapes.parameters(config)
    assert names["layers.0.decayed_sum.v_proj.weight"] == (32, 32)
    total = sum(int(np.prod(shape)) for shape in names.values())
    assert total == sum(leaf.size for leaf in jax.tree.leaves(build().abstract))


def test_flops_count_parts_that_exist():
    config, length = ModelConfig(**SHAPE, **HYBRID), 16
    expert, attention = 3 * 32 * 48, 2 * 32 * 32 + 2 * 32 * 16
    matrices = 3 * 2 * 32 * 32 + 2 * attention + 2 * 3 * 32 * 48 + 2 * 2 * expert + 32 * 64
    mixing = 3 * 32 + 2 * 2 * 32 * length
    assert flops_per_token(config, length) == 6 * (matrices + mixing)
    causal = 6 * matrices + 6 * (3 * 32 + 2 * 32 * length)
    assert causal_flops_per_token(config, length) == causal


PERIODS = {
    **HYBRID,
    "mixer_pattern": HYBRID["mixer_pattern"][1:4],
    "feed_forward_pattern": HYBRID["feed_forward_pattern"][1:4],
    "max_seq_len": 32,
}


@functools.cache
def trained(n_layers, save="none", **axes):
    """Losses of three updates, and the final parameters and router biases by layer."""
    data = axes.get("dp_shard", 1) * axes.get("ep", 1)  # rows of each device
    train = {"batch_size": 8 // data, "grad_accum_steps": 4, "activation_checkpointing": save}
    model = {**SHAPE, **PERIODS, "n_layers": n_layers}
    program = helpers.new_setup(tiny_config(model=model, distributed=axes, train=train))
    state, metrics = program.run(program.state(), random_batches(program.config, 3))
    stacks, stack = program.model.config.stacks, program.model.stack
    arrays = {
        name: jax.tree.map(stack.of(name).unstack, part) if name in stacks else part
        for name, part in join(*jax.device_get((state.params, state.model_state))).items()
    }
    return metrics["loss"], metrics["grad_norm"], arrays


INTERLEAVED = {"pp": 2, "pp_schedule": "interleaved_1f1b", "pp_chunks": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "axes"),
    [
        (6, {"dp_shard": 2, "tp": 2, "ep": 2}),
        (6, {"pp": 2, "dp_shard": 2, "tp": 2}),
        (6, {"pp": 2, "ep": 2}),
        (12, INTERLEAVED),
        (4, {"pp": 2}),  # stages of different layers
        (7, {"pp": 2, "dp_shard": 2, "tp": 2, "save": "full"}),
        (7, {**INTERLEAVED, "ep": 2, "save": "full"}),
    ],
)
def test_training_on_mesh_equals_single_device(layers, axes):
    *losses, arrays = trained(layers, **axes)
    *expected_losses, expected = trained(layers)
    np.testing.assert_allclose(losses, expected_losses, rtol=2e-5)
    close = functools.partial(np.testing.assert_allclose, atol=1e-5)
    jax.tree.map(close, arrays, expected)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [6, 7])
def test_stages_of_several_mixers_decode_like_single_device(layers):
    prompts = [[5, 9, 33], [7, 1, 60, 2, 8, 44, 21]]
    config = tiny_config(model={**SHAPE, **PERIODS, "n_layers": layers}, distributed={"pp": 2})
    plain, staged = Model(config.model), build_model(config)
    params = drawn(config)
    greedy = Sampling(temperature=0.0)
    alone = Decoder(plain, joined(plain, params), 6, greedy).complete(prompts, range(2))
    mesh = make_mesh(config, jax.devices()[:2])
    rows = {
        name: jax.tree.map(staged.stack.of(name).stack, part)
        if name in config.model.stacks
        else part
        for name, part in params.items()
    }
    placed = jax.device_put(rows, param_shardings(staged.abstract, staged.axes, mesh))
    with jax.set_mesh(mesh):
        decoder = Decoder(staged, joined(staged, placed), 6, greedy, mesh=mesh)
        assert decoder.complete(prompts, range(2)) == alone


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"mixer_pattern": ("none",), "feed_forward_pattern": ("none",)}, "neither a mixer nor"),
        ({"feed_forward_pattern": ("experts",)}, "requires num_experts"),
        ({"mixer_pattern": ("attention+attention",)}, "side by side must be distinct"),
        ({"mixer_pattern": ("attention+none",)}, "side by side must be distinct"),
        ({"mixer_pattern": ("attention+mamba",)}, "not a name that is registered"),
        ({"mixer_pattern": ("attention+mamba2", "latent_attention")}, "choose one of them"),
        ({"mixer_multipliers": {"mamba2": 0.5}}, 'mixer_pattern has no "mamba2"'),
        ({"mlp_multipliers": (1.0, 0.5), "activation": "gelu"}, "requires a gated feed-forward"),
        ({"mlp_multipliers": (1.0, 0.5), "num_experts": 4}, "requires a gated feed-forward"),
        ({"mtp_mixer": "mamba2"}, '"mamba2" is not the mixer of a layer: set it to attention'),
        ({"num_experts": 4, "feed_forward_pattern": ("dense",)}, "num_experts = 4 has no effect"),
    ],
)
def test_contradicting_patterns_are_refused(keys, message):
    with pytest.raises(ValidationError, match=message):
        ModelConfig(**keys)
