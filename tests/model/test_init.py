"""Tests of declared parameters: values, axes, names and stacking."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.config.model import ModelConfig
from jaxforge.model.runtime import Runtime
from jaxforge.model.transformer import Model, parameter_count
from jaxforge.parallel.sharding import RULES
from tests import helpers
from tests.conftest import tiny_config
from tests.helpers import EVERY_OPTION, LEARNED, setup
from tests.torch_names import from_torch, to_torch
from torch_compat.names.kempnerforge import KEMPNERFORGE

SHAPE = {"dim": 64, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 256,
         "init_std": 0.05}  # fmt: skip

VARIANTS = {
    "llama": {},
    "tied": {"tie_embeddings": True},
    "layernorm": {"norm_type": "layernorm"},
    "qk_norm": {"qk_norm": True},
    "qkv_bias": {"qkv_bias": True},
    "head_dim": {"head_dim": 24, "qk_norm": True},
    "gelu": {"activation": "gelu"},
}
OPTIONS = {"every option": EVERY_OPTION, "learned positions": LEARNED}

BLOCK = [
    "attention_norm.weight", "attention.q_proj.weight", "attention.k_proj.weight",
    "attention.v_proj.weight", "attention.o_proj.weight", "mlp_norm.weight",
    "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight",
]  # fmt: skip
OUTSIDE = ["token_embedding.embedding.weight", "norm.weight", "output_head.proj.weight"]


@functools.cache
def model(variant="llama"):
    return Model(ModelConfig(**SHAPE, **{**VARIANTS, **OPTIONS}[variant]))


@functools.cache
def params(variant="llama"):
    return jax.device_get(model(variant).init(jax.random.key(0)))


def flat(tree, **options):
    leaves = jax.tree_util.tree_leaves_with_path(tree, **options)
    return {jax.tree_util.keystr(p, simple=True, separator="."): leaf for p, leaf in leaves}


@pytest.mark.parametrize("variant", VARIANTS)
def test_matrices_are_normal_and_vectors_constant(variant):
    for name, values in flat(params(variant)).items():
        if "norm" in name or name.endswith("bias"):
            expected = np.zeros if name.endswith("bias") else np.ones
            np.testing.assert_array_equal(values, expected(values.shape), err_msg=name)
            continue
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        std = 0.05 / math.sqrt(2 * 3) if residual else 0.05
        n = values.size  # bounds: five standard errors
        assert abs(values.std() / std - 1) < 5 / math.sqrt(2 * n), name
        assert abs(values.mean()) < 5 * std / math.sqrt(n), name
        assert np.abs(values).max() > 3 * std, f"{name} is truncated"


def test_initial_matrices_are_uncorrelated():
    rows = [
        layer.ravel()[:64]
        for name, values in flat(params()).items()
        if "norm" not in name
        for layer in (values if name.startswith("layers.") else [values])
    ]
    standardised = np.stack([row / row.std() for row in rows])
    correlations = np.abs(np.corrcoef(standardised))[np.triu_indices(len(rows), 1)]
    assert correlations.max() < 0.7


def test_init_depends_only_on_key():
    again = model().init(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, params(), again)
    other = flat(model().init(jax.random.key(1)))
    weight = "layers.mlp.up_proj.weight"
    assert np.abs(other[weight] - flat(params())[weight]).max() > 0.05


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param({"dp_shard": 8}, marks=pytest.mark.slow),
        pytest.param({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, marks=pytest.mark.slow),
        {"pp": 2, "tp": 2, "pp_schedule": "interleaved_1f1b"},
    ],
    ids=str,
)
def test_initial_values_do_not_depend_on_mesh(axes, monkeypatch):
    """States of the test helper have the parameters of one device, here those of `init`."""
    monkeypatch.setattr(
        helpers, "initial_params", lambda model, seed: jax.jit(model.init)(jax.random.key(seed))
    )
    monkeypatch.setattr(helpers, "_DRAWN", {})
    monkeypatch.setattr(helpers, "_BEGUN", {})
    train = {"grad_accum_steps": 2, "batch_size": 2}
    many = setup(
        tiny_config(model={"n_layers": 5}, train=train, distributed={"dp_shard": 1, **axes})
    )
    with jax.set_mesh(many.mesh):
        state = many.init()
    weight = state.params["layers"]["mlp"]["up_proj"]["weight"]
    assert len(weight.sharding.device_set) == many.mesh.size
    computed = many.state()
    assert jax.tree.map(lambda x: (x.sharding, x.aval), computed) == jax.tree.map(
        lambda x: (x.sharding, x.aval), state
    )
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((computed, state)))


def test_parameters_are_stored_in_param_dtype():
    half = Model(ModelConfig(**SHAPE, norm_type="layernorm"), param_dtype=jnp.bfloat16)
    shapes = jax.eval_shape(half.init, jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("variant", [*VARIANTS, *OPTIONS])
def test_parameters_have_a_logical_axis_per_dimension(variant):
    shapes = flat(model(variant).abstract)
    axes = flat(model(variant).axes, is_leaf=lambda node: isinstance(node, tuple))
    assert axes.keys() == shapes.keys()
    for name, of_parameter in axes.items():
        assert len(of_parameter) == len(shapes[name].shape), name
        assert set(of_parameter) <= RULES.keys(), name
        assert len(set(of_parameter)) == len(of_parameter), name


@pytest.mark.parametrize("variant", [*VARIANTS, *OPTIONS])
def test_init_matches_abstract_parameters(variant):
    result = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params(variant))
    expected = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), model(variant).abstract)
    assert result == expected


@pytest.mark.parametrize("variant", [*VARIANTS, *OPTIONS])
def test_only_layers_are_stacked(variant):
    axes = flat(model(variant).axes, is_leaf=lambda node: isinstance(node, tuple))
    for name, shape in flat(model(variant).abstract).items():
        assert (axes[name][0] == "layers") == name.startswith("layers."), name
        assert not name.startswith("layers.") or shape.shape[0] == SHAPE["n_layers"], name


def expected_names(variant):
    block, outside = list(BLOCK), list(OUTSIDE)
    if variant == "layernorm":
        block += ["attention_norm.bias", "mlp_norm.bias"]
        outside += ["norm.bias"]
    if variant in ("qk_norm", "head_dim"):
        block += ["attention.q_norm.weight", "attention.k_norm.weight"]
    if variant == "qkv_bias":
        block += [f"attention.{name}_proj.bias" for name in "qkv"]
    if variant == "gelu":
        block.remove("mlp.gate_proj.weight")
    return {f"layers.{i}.{name}" for i in range(SHAPE["n_layers"]) for name in block} | {*outside}


@pytest.mark.parametrize("variant", VARIANTS)
def test_names_match_kempnerforge_and_cover_all_parameters(variant):
    named = to_torch(params(variant), tied=variant == "tied")
    assert named.keys() == expected_names(variant)
    assert all(KEMPNERFORGE.key_for(name) == name for name in named)
    covered = sum(array.size for array in named.values())
    twice = named["output_head.proj.weight"].size if variant == "tied" else 0
    assert covered - twice == parameter_count(model(variant).abstract)
    back = from_torch(named, model(variant).abstract)
    assert jax.tree.structure(back) == jax.tree.structure(params(variant))
    jax.tree.map(np.testing.assert_array_equal, back, params(variant))


def test_layer_numbers_match_stacked_rows():
    named = to_torch(params())
    stacked = params()["layers"]["attention"]["k_proj"]["weight"]
    for i in range(SHAPE["n_layers"]):
        np.testing.assert_array_equal(named[f"layers.{i}.attention.k_proj.weight"], stacked[i])


LLAMA_3_8B = {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256,
              "ffn_hidden_dim": 14336}  # fmt: skip
QWEN_2_5_7B = {"dim": 3584, "n_layers": 28, "n_heads": 28, "n_kv_heads": 4, "vocab_size": 152064,
               "ffn_hidden_dim": 18944, "qkv_bias": True}  # fmt: skip
QWEN_3_0_6B = {"dim": 1024, "n_layers": 28, "n_heads": 16, "n_kv_heads": 8, "vocab_size": 151936,
               "ffn_hidden_dim": 3072, "head_dim": 128, "qk_norm": True,
               "tie_embeddings": True}  # fmt: skip
MISTRAL_NEMO = {"dim": 5120, "n_layers": 40, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 131072,
                "ffn_hidden_dim": 14336, "head_dim": 128}  # fmt: skip


GPT_2 = {"dim": 768, "n_layers": 12, "n_heads": 12, "vocab_size": 50257, "ffn_hidden_dim": 3072,
         "norm_type": "layernorm", "activation": "gelu_tanh", "position_embedding": "learned",
         "max_seq_len": 1024, "qkv_bias": True, "o_bias": True, "mlp_bias": True,
         "tie_embeddings": True}  # fmt: skip
PYTHIA_160M = {**GPT_2, "vocab_size": 50304, "position_embedding": "rotary",
               "partial_rotary_factor": 0.25, "tie_embeddings": False}  # fmt: skip
GEMMA_2_9B = {"dim": 3584, "n_layers": 42, "n_heads": 16, "n_kv_heads": 8, "head_dim": 256,
              "vocab_size": 256000, "ffn_hidden_dim": 14336, "activation": "gelu_tanh",
              "gated_mlp": True, "norm_placement": "sandwich", "tie_embeddings": True}  # fmt: skip
GEMMA_3_1B = {**GEMMA_2_9B, "dim": 1152, "n_layers": 26, "n_heads": 4, "n_kv_heads": 1,
              "vocab_size": 262144, "ffn_hidden_dim": 6912, "qk_norm": True}  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        (GPT_2, 124_439_808),
        (PYTHIA_160M, 162_322_944),
        (GEMMA_2_9B, 9_241_705_984),
        (GEMMA_3_1B, 999_885_952),
        (LLAMA_3_8B, 8_030_261_248),
        (QWEN_2_5_7B, 7_615_616_512),
        (QWEN_3_0_6B, 596_049_920),
        (MISTRAL_NEMO, 12_247_782_400),
    ],
    ids=[
        "GPT-2",
        "Pythia 160M",
        "Gemma 2 9B",
        "Gemma 3 1B",
        "Llama 3 8B",
        "Qwen 2.5 7B",
        "Qwen 3 0.6B",
        "Mistral Nemo 12B",
    ],
)
def test_parameter_count_matches_published_models(shape, parameters):
    assert parameter_count(Model(ModelConfig(**shape)).abstract) == parameters


@pytest.mark.parametrize("save", ["none", "full"])
def test_program_size_does_not_grow_with_depth(save):
    """The program includes the gradient."""

    def size(n_layers):
        deep = Model(ModelConfig(**{**SHAPE, "n_layers": n_layers}), runtime=Runtime(save=save))
        forward = lambda p, t: jnp.sum(deep.hidden(p, t))  # noqa: E731
        tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)
        program = jax.jit(jax.value_and_grad(forward))
        return len(program.lower(deep.abstract, tokens).as_text())

    assert abs(size(16) / size(2) - 1) < 0.05
