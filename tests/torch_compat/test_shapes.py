"""Shapes computed without JAX match those of the model and the optimizer."""

import itertools
import subprocess
import sys

import pytest

from jaxforge.config.model import ModelConfig
from jaxforge.config.section import Invisible
from jaxforge.model.mixers import mixer_shapes
from tests.conftest import tiny_config
from torch_compat.checkpoint import training_state
from torch_compat.checkpoint.shapes import parameters, untrained
from torch_compat.checkpoint.state import abstract_target
from torch_compat.checkpoint.validation import invisible_differences

MODEL = {"dim": 16, "n_layers": 3, "n_heads": 4, "vocab_size": 500, "ffn_hidden_dim": 24}
OPTIONS = {
    "n_kv_heads": [None, 2],
    "head_dim": [None, 6],
    "qkv_bias": [False, True],
    "qk_norm": [False, True],
    "tie_embeddings": [False, True],
    "norm_type": ["rmsnorm", "layernorm"],
    "activation": ["silu", "gelu"],
    "gated_mlp": [None, True],
    "o_bias": [False, True],
    "attention_sinks": [False, True],
    "attention_output_gate": [False, True],
    "mlp_bias": [False, True],
    "norm_placement": ["pre", "sandwich"],
    "position_embedding": ["rotary", "learned"],
    "hyper_connections": ["none", "manifold"],
    "n_kv_shared_layers": [0, 1],
}
EXPERTS = {"num_experts": 4, "moe_top_k": 2}
SIGMOID = {**EXPERTS, "moe_router": "sigmoid_topk"}
MIXTURES = {
    "in all layers": EXPERTS,
    "in some": {**EXPERTS, "feed_forward_pattern": ("dense", "experts"), "n_layers": 5},
    "after the first": {**SIGMOID, "moe_first_dense_layers": 1, "moe_bias_update": "sign"},
    "KempnerForge's bias": {**SIGMOID, "feed_forward_pattern": ("dense", "experts")},
    "no bias": {**SIGMOID, "moe_bias_update": "none"},
    "of their own width": {**EXPERTS, "moe_expert_dim": 20},
    "a shared one": {**EXPERTS, "moe_shared_experts": 2, "moe_expert_dim": 512},
    "a shared one of its own width": {
        **EXPERTS, "moe_shared_experts": 1, "moe_shared_expert_dim": 40,
        "moe_shared_expert_gate": True,
    },
    "biases": {**EXPERTS, "mlp_bias": True, "moe_router_bias": True, "moe_shared_experts": 1},
    "without a gate": {**EXPERTS, "activation": "gelu", "moe_shared_experts": 1},
    "of a latent": {**EXPERTS, "moe_latent_dim": 24, "mlp_bias": True, "moe_shared_experts": 1},
    "gpt-oss": {**EXPERTS, "activation": "swiglu_oai", "mlp_bias": True, "attention_sinks": True},
    "next to a feed-forward": {
        **EXPERTS, "moe_shared_experts": 1, "moe_separate_norms": True, "moe_expert_scales": True,
        "norm_placement": "sandwich",
    },
    "predicting further tokens": {
        **SIGMOID, "moe_first_dense_layers": 1, "moe_shared_experts": 1, "mtp_depth": 2,
    },
    "eleven": {**SIGMOID, "num_experts": 11, "n_layers": 12, "moe_bias_update": "sign"},
}  # fmt: skip


def test_parameters_have_documented_shapes():
    # All pairs of values: a declaration depends on two options at most.
    settings = [
        dict(zip(OPTIONS, values, strict=True)) for values in zip(*OPTIONS.values(), strict=True)
    ]
    for a, b in itertools.combinations(OPTIONS, 2):
        settings.append({**settings[0], a: OPTIONS[a][1], b: OPTIONS[b][1]})
    settings += [{"layer_embedding_dim": 5, "layer_multipliers": True, "n_kv_shared_layers": 1},
                 {"n_kv_shared_layers": 1, "kv_shared_ffn_dim": 40},
                 {"mixer_pattern": ("global_attention",), "qk_norm": True},
                 {"mtp_depth": 2, "norm_type": "layernorm"}, {"norm_placement": "post"},
                 {"qk_norm": True, "qk_norm_scope": "projection"},
                 {"qk_norm": True, "qk_norm_scope": "each_head", "n_kv_heads": 2},
                 {"norm_type": "layernorm", "norm_bias": False},
                 {"norm_type": "layernorm", "shared_norm": True,
                  "parallel_residual": True}]  # fmt: skip
    for chosen in settings:
        config = tiny_config(model={**MODEL, **chosen})
        expected, _ = training_state.model_shapes(config)
        assert list(parameters(config.model).items()) == list(expected.items()), chosen


@pytest.mark.parametrize("name", MIXTURES)
def test_expert_state_has_documented_shapes(name):
    config = tiny_config(model={**MODEL, **MIXTURES[name]})
    params, model_state = training_state.model_shapes(config)
    assert list(parameters(config.model).items()) == list(params.items())
    assert list(untrained(config.model).items()) == list(model_state.items())
    assert abstract_target(config).model_state == model_state
    assert any(".experts.3." in entry for entry in params)
    assert bool(model_state) == (config.model.bias_update != "none")


@pytest.mark.parametrize("name", ["adamw", "lion", "muon", "schedule_free_adamw"])
@pytest.mark.parametrize("mixture", ["in some", "KempnerForge's bias", "biases"])
def test_optimizer_state_of_experts_has_documented_shapes(name, mixture):
    scheduler = {"name": "none"} if name.startswith("schedule_free") else {}
    model = {**MODEL, **MIXTURES[mixture]}
    config = tiny_config(model=model, optimizer={"name": name}, scheduler=scheduler)
    moments, _ = training_state.fields(config)
    assert abstract_target(config).moments == moments


@pytest.mark.parametrize("name", ["adamw", "lion", "muon", "schedule_free_adamw"])
def test_optimizer_state_has_documented_shapes(name):
    scheduler = {"name": "none"} if name.startswith("schedule_free") else {}
    config = tiny_config(model=MODEL, optimizer={"name": name}, scheduler=scheduler)
    moments, scalars = training_state.fields(config)
    assert abstract_target(config).moments == moments
    assert abstract_target(config).scalars == scalars


@pytest.mark.parametrize(
    ("mixer", "trained", "changed", "key"),
    [
        (
            "gated_delta_net",
            {"key_heads": 2, "key_head_dim": 8, "value_heads": 4},
            {"key_heads": 4, "key_head_dim": 4, "value_heads": 4},
            "key_heads",
        ),
        (
            "mamba2",
            {"heads": 8, "groups": 2, "state_size": 6},
            {"heads": 8, "groups": 1, "state_size": 12},
            "groups",
        ),
    ],
)
def test_heads_that_change_no_shape_are_compared_with_those_of_the_weights(
    mixer, trained, changed, key
):
    models = [
        ModelConfig(dim=32, n_heads=4, mixer_pattern=(mixer,), **{mixer: table})
        for table in (trained, changed)
    ]
    assert mixer_shapes(models[0], mixer) == mixer_shapes(models[1], mixer)
    (difference,) = invisible_differences(*models, Invisible)
    was, now = trained[key], changed[key]
    assert difference == f"model.{mixer}.{key} is {now} and the weights were trained with {was}"


def test_mixers_are_found_in_a_new_process():
    """A command reads shapes before it has imported any mixer."""
    program = (
        "from jaxforge.config.model import MIXERS, ModelConfig\n"
        "from torch_compat.checkpoint.shapes import parameters\n"
        "models = [ModelConfig(mixer_pattern=(name,)) for name in MIXERS.built_in]\n"
        "print(sum(len(parameters(model)) > 0 for model in models), len(models))"
    )
    command = [sys.executable, "-c", program]
    counts = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert counts[0] == counts[1]
