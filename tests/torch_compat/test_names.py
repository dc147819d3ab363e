"""Name maps of all dialects: translation in both directions, detection, and error messages."""

import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from jaxforge.model.plan import build_layer_plan
from jaxforge.model.rope import rotate, rotation
from tests.conftest import tiny_config
from tests.helpers import each
from tests.torch_compat.tensors import assert_same
from torch_compat.checkpoint import dcp_state
from torch_compat.checkpoint.name_maps import NAME_MAPS
from torch_compat.checkpoint.state import abstract_target
from torch_compat.families import FAMILIES
from torch_compat.families.common import PLAIN
from torch_compat.formats.dcp_reader import Dcp, LazyObjects
from torch_compat.formats.files import Directory
from torch_compat.formats.lazy import DTYPES, from_array
from torch_compat.names.table import EMBEDDING, HEAD
from torch_compat.names.translation import Translation, translate

LAYERS, EXPERTS = 2, 4
SMALL = {
    "dim": 16, "n_layers": LAYERS, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 12,
    "max_seq_len": 8, "ffn_hidden_dim": 24,
}  # fmt: skip
LLAMA = {}
BIASES = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
SANDWICH = {"norm_placement": "sandwich"}
POST = {"norm_placement": "post", "qk_norm": True, "qk_norm_scope": "projection"}
TWO_MATRICES = {"norm_type": "layernorm", "activation": "gelu"}
AFTER_ROTARY = {"qk_norm": True, "qk_norm_after_rotary": True}
MIXTURE = {"num_experts": EXPERTS, "moe_expert_dim": 10}
SIGMOID = {**MIXTURE, "moe_router": "sigmoid_topk", "moe_shared_experts": 1}
DEEPSEEK = {**SIGMOID, "moe_bias_update": "sign", "moe_first_dense_layers": 1}
SHARED = {"moe_shared_experts": 1, "moe_shared_expert_dim": 6, "moe_shared_expert_gate": True}
SOME = {"feed_forward_pattern": ("dense", "experts")}
GPT_OSS = {**MIXTURE, "attention_sinks": True, "activation": "swiglu_oai", "swiglu_limit": 7.0,
           "mlp_bias": True, "moe_router_bias": True}  # fmt: skip
LATENTS = {
    "mixer_pattern": ("latent_attention",), "n_kv_heads": None, "latent_attention": {
        "q_rank": 6, "kv_rank": 5, "nope_head_dim": 3, "rope_head_dim": 8, "value_head_dim": 2
    },
}  # fmt: skip
INDEXED = LATENTS | {"latent_attention": {
    **LATENTS["latent_attention"], "index_heads": 2, "index_head_dim": 9
}}  # fmt: skip
WITHOUT_QUERY_RANK = LATENTS | {
    "latent_attention": {"kv_rank": 5, "nope_head_dim": 3, "rope_head_dim": 4}
}
NEOX = {**TWO_MATRICES, "mlp_bias": True, "n_kv_heads": 4}
SHARED_NORM = {"norm_type": "layernorm", "parallel_residual": True, "shared_norm": True}
COHERE = {**SHARED_NORM, "norm_bias": False}
MAMBA = {"mixer_pattern": ["mamba2", "attention"],
         "mamba2": {"heads": 4, "head_dim": 8, "state_size": 3, "groups": 2}}  # fmt: skip
HYBRID = {**MAMBA, "mixer_pattern": ["mamba2", "none", "attention", "none"], "n_layers": 4}
DELTA = {"mixer_pattern": ["gated_delta_net", "attention"], "qk_norm": True,
         "attention_output_gate": True, "gated_delta_net": {
             "key_heads": 2, "value_heads": 4, "key_head_dim": 3, "value_head_dim": 5}}  # fmt: skip
SIDE_BY_SIDE = {"mixer_pattern": ["attention+mamba2"],
                "mamba2": {**MAMBA["mamba2"], "proj_bias": True, "gated_norm": "none"}}  # fmt: skip
CONVOLUTIONS = {"mixer_pattern": ["short_convolution", "attention"], "qk_norm": True,
                "short_convolution": {"bias": True}}  # fmt: skip
GEMMA4 = {**SANDWICH, "qk_norm": True, "value_norm": True, "layer_multipliers": True,
          "mixer_pattern": ["attention", "global_attention"],
          "global_attention": {"head_dim": 8, "keys_as_values": True}}  # fmt: skip
SIGN_WITHOUT_SHARED = {**DEEPSEEK, "moe_shared_experts": 0}
FEATURES = {
    "kempnerforge": [
        {"qk_norm": True, "norm_type": "layernorm", "qkv_bias": True},
        SIGMOID,
        {**MIXTURE, **SOME},
        DEEPSEEK,
        LLAMA,
    ],
    "kempnerforge-packed": [SIGMOID, {**MIXTURE, **SOME, "activation": "gelu"}],
    "torchtitan": [LLAMA, {"head_dim": 8}],
    "torchtitan-2025": [LLAMA],
    "megatron": [
        LLAMA,
        {**TWO_MATRICES, **BIASES, "position_embedding": "learned"},
        DEEPSEEK,
        {**MIXTURE, **SHARED, "qk_norm": True, "qkv_bias": True},
    ],
    "hf-llama": [LLAMA, BIASES],
    "hf-mistral": [LLAMA],
    "hf-qwen2": [{"qkv_bias": True}],
    "hf-qwen3": [{"qk_norm": True}],
    "hf-gemma": [{}],
    "hf-gemma2": [SANDWICH],
    "hf-gemma3": [{**SANDWICH, "qk_norm": True}],
    "hf-gemma4": [
        {**GEMMA4, "n_layers": 4, "n_kv_shared_layers": 2, "layer_embedding_dim": 3},
        {
            **GEMMA4,
            **MIXTURE,
            "moe_shared_experts": 1,
            "moe_separate_norms": True,
            "moe_expert_scales": True,
            "qkv_bias": True,
            "o_bias": True,
        },
    ],
    "hf-olmo2": [POST],
    "hf-olmo3": [POST],
    "hf-smollm3": [LLAMA],
    "hf-granite": [LLAMA],
    "hf-phi3": [LLAMA],
    "hf-stablelm": [{"norm_type": "layernorm"}, {"norm_type": "layernorm", "qkv_bias": True}],
    "hf-gpt-neox": [NEOX, {**NEOX, "qkv_bias": True, "o_bias": True}],
    "hf-gpt2": [{**NEOX, "qkv_bias": True, "o_bias": True, "position_embedding": "learned"}],
    "hf-starcoder2": [TWO_MATRICES, {**TWO_MATRICES, **BIASES}],
    "hf-arcee": [{"activation": "relu"}, {"activation": "relu", **BIASES}],
    "hf-glm": [{"qkv_bias": True, "partial_rotary_factor": 0.5, "head_dim": 8}],
    "hf-glm4": [SANDWICH],
    "hf-cohere": [COHERE, {**COHERE, "qkv_bias": True, "o_bias": True}],
    "hf-cohere2": [COHERE],
    "hf-ernie4-5": [LLAMA, BIASES],
    "hf-nemotron": [
        {"norm_type": "layernorm", "activation": "relu2"},
        {"norm_type": "layernorm", "activation": "relu2", **BIASES},
    ],
    "hf-ernie4-5-moe": [
        {**MIXTURE, **SOME, "moe_shared_experts": 1, "moe_bias_update": "sign"},
        {**MIXTURE, "moe_bias_update": "sign"},
    ],
    "hf-llama4-text": [
        {**MIXTURE, **SOME, "moe_shared_experts": 1},
        {**MIXTURE, "moe_shared_experts": 1, "qkv_bias": True, "o_bias": True},
    ],
    "hf-falcon-h1": [
        {**MAMBA, "mixer_pattern": ["attention+mamba2"]},
        {**SIDE_BY_SIDE, **BIASES},
    ],
    "hf-lfm2": [CONVOLUTIONS],
    "hf-lfm2-moe": [{**CONVOLUTIONS, **SIGN_WITHOUT_SHARED}],
    "hf-mixtral": [MIXTURE],
    "hf-minimax-m2": [
        {
            **MIXTURE,
            "moe_router": "sigmoid_topk",
            "moe_bias_update": "sign",
            "qk_norm": True,
            "qk_norm_scope": "projection",
        },
    ],
    "hf-hunyuan-v1-dense": [AFTER_ROTARY, {**AFTER_ROTARY, "qkv_bias": True, "o_bias": True}],
    "hf-hunyuan-v1-moe": [{**MIXTURE, **AFTER_ROTARY, "moe_shared_experts": 1}],
    "hf-hy-v3": [
        {**DEEPSEEK, "qk_norm": True},
        {**DEEPSEEK, **BIASES, "mlp_bias": False, "qk_norm": True},
    ],
    "hf-qwen2-moe": [
        {**MIXTURE, **SOME, **SHARED, "qkv_bias": True},
        {**MIXTURE, **SHARED},
    ],
    "hf-qwen3-moe": [{**MIXTURE, **SOME, "qk_norm": True}],
    "hf-olmoe": [{**MIXTURE, "qk_norm": True, "qk_norm_scope": "projection"}],
    "hf-dots1": [{**DEEPSEEK, "qk_norm": True}],
    "hf-glm4-moe": [DEEPSEEK, {**DEEPSEEK, "qkv_bias": True}],
    "hf-granitemoe": [MIXTURE, {**MIXTURE, "qkv_bias": True, "o_bias": True}],
    "hf-granitemoeshared": [{**MIXTURE, "moe_shared_experts": 1}],
    "hf-bamba": [MAMBA, {**MAMBA, **BIASES}],
    "hf-granitemoehybrid": [MAMBA, {**MAMBA, **MIXTURE, "moe_shared_experts": 1}],
    "hf-nemotron-h": [
        {**HYBRID, "activation": "relu2", "feed_forward_pattern": ["none", "dense"]},
        {
            **HYBRID,
            **SIGMOID,
            "moe_bias_update": "sign",
            "activation": "relu2",
            "moe_latent_dim": 7,
            "feed_forward_pattern": ["none", "experts", "none", "dense"],
        },
    ],
    "hf-deepseek-v2": [
        {**MIXTURE, **LATENTS, "moe_shared_experts": 1},
        {**MIXTURE, **WITHOUT_QUERY_RANK, "moe_shared_experts": 1},
    ],
    "hf-deepseek-v3": [
        {**DEEPSEEK, **LATENTS},
        {**DEEPSEEK, **LATENTS, **BIASES, "mlp_bias": False},
    ],
    "hf-deepseek-v32": [{**DEEPSEEK, **INDEXED}],
    "hf-glm-moe-dsa": [{**DEEPSEEK, **INDEXED}],
    "hf-kimi-k2": [{**DEEPSEEK, **LATENTS}],
    "hf-qwen3-next": [{**DELTA, **MIXTURE, **SHARED}, {**DELTA, **MIXTURE, **SHARED, **SOME}],
    "hf-qwen3-5": [DELTA, {**DELTA, "qkv_bias": True, "o_bias": True}],
    "hf-qwen3-5-moe": [{**DELTA, **MIXTURE, **SHARED}],
    "hf-gpt-oss": [GPT_OSS, {**GPT_OSS, "qkv_bias": True, "o_bias": True}],
}


def default_features(family):
    """Return the keys of `[model]` of a small model with the family's defaults."""
    sizes = {key: min(value, 8) for key, value in family.defaults.items() if type(value) is int}
    small = {hf_key: SMALL[key] for key, hf_key in PLAIN.items()}
    heads = {"num_key_value_heads": SMALL["n_heads"]}
    table = family.read({**family.defaults, **sizes, **small, **heads}, "here")
    return {"n_kv_heads": None, **table}  # latent attention has no key heads


BY_DEFAULTS = {
    family.dialect.name: [default_features(family)]
    for family in FAMILIES.values() if family.dialect.name not in FEATURES
}  # fmt: skip
FEATURES |= BY_DEFAULTS
CASES = [(name, features) for name, several in FEATURES.items() for features in several]


def model_of(**features):
    return ModelConfig.model_validate({**SMALL, **features})


@functools.cache
def _shapes(features):
    model = {**SMALL, **json.loads(features)}
    target = abstract_target(tiny_config(model=model, train={"seq_len": 8}))
    return {**target.params, **target.model_state}


def shapes_of(features):
    return _shapes(json.dumps(features, sort_keys=True))


def native_of(features, dtype="float32"):
    """Return random, distinct parameters by jaxforge's names."""
    rng = np.random.default_rng(0)
    return {
        name: rng.standard_normal(shape, np.float32).astype(DTYPES[dtype])
        for name, shape in shapes_of(features).items()
    }


def lazy(arrays):
    return {name: from_array(array, name) for name, array in arrays.items()}


def theirs_of(dialect, features, dtype="float32"):
    """Return tensors by a dialect's keys, as its code base saves them."""
    result = NAME_MAPS[dialect].to_dialect(lazy(native_of(features, dtype)), model_of(**features))
    return {key: np.ascontiguousarray(tensor.all()) for key, tensor in result.items()}


@functools.cache
def _keys(dialect, features):
    return list(theirs_of(dialect, json.loads(features)))


def keys_of(dialect, features):
    """Return the keys of a dialect's tensors, in the order of its files."""
    return _keys(dialect, json.dumps(features))


def translated(dialect, features, theirs, *, resize_vocab=False):
    by = Translation(NAME_MAPS[dialect], model_of(**features), resize_vocab, "here")
    return translate(lazy(theirs), shapes_of(features), by)


def as_dcp(keys):
    """Write a checkpoint with these keys."""
    return Dcp(Directory("/nowhere"), lazy({key: np.zeros(1) for key in keys}), LazyObjects())


def test_every_dialect_is_tested():
    assert FEATURES.keys() == NAME_MAPS.keys()


@each([(*case, dtype) for case in CASES for dtype in ("float32", "bfloat16")])
def test_names_roundtrip_bit_exactly(dialect, features, dtype):
    native = native_of(features, dtype)
    back = translated(dialect, features, theirs_of(dialect, features, dtype))
    assert list(back) == list(native)
    for name, array in native.items():
        assert_same(np.ascontiguousarray(back[name].all()), array)


@each(CASES)
def test_parameters_have_distinct_keys(dialect, features):
    native, theirs = native_of(features), theirs_of(dialect, features)
    assert theirs.keys() == {NAME_MAPS[dialect].key_for(name) for name in native}
    assert sum(array.size for array in theirs.values()) == sum(a.size for a in native.values())
    assert all(NAME_MAPS[dialect].knows(key) for key in theirs)
    values = np.concatenate([array.ravel() for array in theirs.values()])
    all_native = np.concatenate([array.ravel() for array in native.values()])
    np.testing.assert_array_equal(np.sort(values), np.sort(all_native))


@each(CASES)
def test_partial_read_matches_full_read(dialect, features):
    """An import reads some rows and columns."""
    native = native_of(features)
    back = translated(dialect, features, theirs_of(dialect, features))
    for name, array in native.items():
        index = tuple(slice(n // 3, max(1, n - 1)) for n in array.shape)
        assert_same(
            np.ascontiguousarray(back[name].read(index)), np.ascontiguousarray(array[index])
        )


NAMES = {
    "kempnerforge": {
        "token_embedding.embedding.weight": EMBEDDING, "output_head.proj.weight": HEAD,
        "layers.1.mlp.experts.3.up_proj.weight": "layers.1.mlp.experts.3.up_proj.weight",
    },
    "torchtitan": {
        "tok_embeddings.weight": EMBEDDING, "lm_head.weight": HEAD, "norm.weight": "norm.weight",
        "layers.1.attention.qkv_linear.wv.weight": "layers.1.attention.v_proj.weight",
        "layers.1.attention.wo.weight": "layers.1.attention.o_proj.weight",
        "layers.1.attention_norm.weight": "layers.1.attention_norm.weight",
        "layers.1.ffn_norm.weight": "layers.1.mlp_norm.weight",
        "layers.1.feed_forward.w1.weight": "layers.1.mlp.gate_proj.weight",
        "layers.1.feed_forward.w2.weight": "layers.1.mlp.down_proj.weight",
        "layers.1.feed_forward.w3.weight": "layers.1.mlp.up_proj.weight",
    },
    "torchtitan-2025": {
        "output.weight": HEAD, "layers.0.attention.wv.weight": "layers.0.attention.v_proj.weight",
    },
    "hf-llama": {
        "model.embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD,
        "model.norm.weight": "norm.weight",
        "model.layers.1.self_attn.k_proj.weight": "layers.1.attention.k_proj.weight",
        "model.layers.1.self_attn.o_proj.weight": "layers.1.attention.o_proj.weight",
        "model.layers.1.input_layernorm.weight": "layers.1.attention_norm.weight",
        "model.layers.1.post_attention_layernorm.weight": "layers.1.mlp_norm.weight",
        "model.layers.1.mlp.down_proj.weight": "layers.1.mlp.down_proj.weight",
    },
    "hf-qwen2": {"model.layers.1.self_attn.v_proj.bias": "layers.1.attention.v_proj.bias"},
    "hf-qwen3": {"model.layers.1.self_attn.q_norm.weight": "layers.1.attention.q_norm.weight"},
    "hf-mixtral": {
        "model.layers.1.block_sparse_moe.gate.weight": "layers.1.mlp.router.gate.weight",
        "model.layers.1.block_sparse_moe.experts.3.w1.weight":
            "layers.1.mlp.experts.3.gate_proj.weight",
        "model.layers.1.block_sparse_moe.experts.3.w2.weight":
            "layers.1.mlp.experts.3.down_proj.weight",
        "model.layers.1.block_sparse_moe.experts.3.w3.weight":
            "layers.1.mlp.experts.3.up_proj.weight",
    },
    "hf-qwen3-moe": {
        "model.layers.1.mlp.gate.weight": "layers.1.mlp.router.gate.weight",
        "model.layers.1.mlp.experts.0.down_proj.weight": "layers.1.mlp.experts.0.down_proj.weight",
    },
    "hf-qwen2-moe": {
        "model.layers.1.mlp.shared_expert.up_proj.weight":
            "layers.1.mlp.shared_expert.up_proj.weight",
        "model.layers.1.mlp.shared_expert_gate.weight": "layers.1.mlp.shared_expert_gate.weight",
    },
    "hf-dots1": {
        "model.layers.1.mlp.gate.e_score_correction_bias": "layers.1.mlp.router.expert_bias",
        "model.layers.1.mlp.shared_experts.up_proj.weight":
            "layers.1.mlp.shared_expert.up_proj.weight",
    },
}  # fmt: skip


@each([(dialect, *pair) for dialect, pairs in NAMES.items() for pair in pairs.items()])
def test_keys_match_code_base(dialect, theirs, native):
    assert NAME_MAPS[dialect].key_for(native) == theirs


def test_packed_experts_are_stacked_as_in_out():
    features = FEATURES["kempnerforge-packed"][0]
    native, theirs = native_of(features), theirs_of("kempnerforge-packed", features)
    for m in ("gate", "up", "down"):
        packed = theirs[f"layers.1.mlp.{m}_w"]
        for j in range(EXPERTS):
            np.testing.assert_array_equal(
                packed[j], native[f"layers.1.mlp.experts.{j}.{m}_proj.weight"].T
            )


@pytest.mark.parametrize("features", FEATURES["torchtitan"])
@pytest.mark.parametrize("dialect", ["torchtitan", "torchtitan-2025"])
def test_rotary_scores_match_torchtitan(dialect, features):
    """Rotating neighbouring channels (Meta) and halves (jaxforge) gives equal q·k."""
    config = model_of(**features)
    head, positions = config.head_size, np.arange(8)
    x = np.random.default_rng(1).standard_normal((8, 16))
    turns = np.exp(1j * np.outer(positions, 10000.0 ** -(np.arange(0, head, 2) / head)))

    def meta(weight):
        pairs = (x @ weight.T).reshape(8, -1, head // 2, 2)
        turned = (pairs[..., 0] + 1j * pairs[..., 1]) * turns[:, None]
        return np.stack([turned.real, turned.imag], axis=-1).reshape(8, -1, head)

    def halves(weight):
        heads = jnp.asarray((x @ weight.T).reshape(1, 8, -1, head), jnp.float32)
        return np.asarray(
            rotate(heads, rotation(build_layer_plan(config).ropes[0], jnp.asarray(positions)[None]))
        )[0]

    def scores(queries, keys):
        groups = queries.shape[1] // keys.shape[1]
        return np.einsum("snh,tnh->nst", queries, np.repeat(keys, groups, axis=1))

    names = [f"layers.1.attention.{m}_proj.weight" for m in "qk"]
    theirs = theirs_of(dialect, features)
    as_they_are = [theirs[NAME_MAPS[dialect].key_for(name)] for name in names]
    back = translated(dialect, features, theirs)
    expected = scores(*map(meta, as_they_are))
    result = scores(*(halves(back[name].all()) for name in names))
    np.testing.assert_allclose(result, expected, atol=2e-4)
    assert np.abs(scores(*map(halves, as_they_are)) - expected).max() > 1  # the layout matters


PREFIXES = ["", "model.", "app.model.", "state_dict.model.", "module.", "model.module.",
            "model.model."]  # fmt: skip
WRAPPERS = [
    lambda key: key,
    lambda key: f"_orig_mod.{key}",
    lambda key: f"module._orig_mod.{key}",
    lambda key: f"_orig_mod.module.module.{key}",
    lambda key: key.replace("layers.0.", "layers.0._checkpoint_wrapped_module."),
    lambda key: (
        "_fsdp_wrapped_module."
        + key.replace("layers.1.", "layers.1._fsdp_wrapped_module._checkpoint_wrapped_module.")
    ),
    lambda key: key.replace("layers.0.", "layers.0._orig_mod._orig_mod."),
]


# Every name map, and every prefix with twelve of them.
@each([(*case, PREFIXES[i % len(PREFIXES)]) for i, case in enumerate(CASES)])
def test_dialect_is_detected_from_keys(dialect, features, prefix):
    keys = keys_of(dialect, features)
    llamas = ("hf-mistral", "hf-gemma", "hf-smollm3", "hf-granite", "hf-ernie4-5")
    same = {**dict.fromkeys(llamas, "hf-llama"), "hf-olmo3": "hf-olmo2", "hf-cohere2": "hf-cohere",
            "hf-kimi-k2": "hf-deepseek-v3", "hf-bamba": "hf-falcon-h1",
            "hf-glm-moe-dsa": "hf-deepseek-v32"}  # fmt: skip
    expected = NAME_MAPS[same.get(dialect, dialect)]  # identical names
    for wrapped in WRAPPERS:
        result = dcp_state.sort_keys(as_dcp([prefix + wrapped(key) for key in keys]))
        if dialect in BY_DEFAULTS:
            assert all(
                result.dialect.find_key(n) == expected.find_key(n) for n in shapes_of(features)
            )
        else:
            assert result.dialect is expected
        assert list(result.params) == keys


@pytest.mark.parametrize("dialect", ["torchtitan", "torchtitan-2025", "kempnerforge", "hf-llama"])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_dialect_is_detected_without_tied_head(dialect, prefix):
    keys = [key for key in theirs_of(dialect, LLAMA) if key != NAME_MAPS[dialect].key_for(HEAD)]
    assert dcp_state.sort_keys(as_dcp([prefix + key for key in keys])).dialect.name == dialect


def test_additional_keys_do_not_hide_model():
    keys = [f"model.{key}" for key in theirs_of("torchtitan", LLAMA)]
    beside = ["optimizer.state.norm.weight.exp_avg", "train_state.step", "dataloader.dp_rank_0",
              "model.layers.0._extra_state", "lr_scheduler.last_epoch", "rng_state"]  # fmt: skip
    result = dcp_state.sort_keys(as_dcp([*keys, *beside]))
    assert result.dialect is NAME_MAPS["torchtitan"]
    assert len(result.params) == len(keys)
    assert result.state.keys() == {"norm.weight"}
    assert set(result.unassigned) == set(beside[1:])


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (np.zeros(2, np.float32), "is not a number"),
        (np.array(np.nan), "is not a number .not finite"),
        (np.array(np.inf), "is not a number .not finite"),
        (np.array(1e300), "far too large"),
        (np.array(-1.0), "-1 is not an integer from 0"),
        (np.array(4.0), None),
    ],
    ids=str,
)
def test_invalid_number_of_updates_raises(step, says):
    params = theirs_of("kempnerforge", LLAMA)
    state = {
        f"optimizer.state.{key}.{field}": value
        for key, array in params.items()
        for field, value in (("exp_avg", array), ("exp_avg_sq", array), ("step", step))
    }
    result = Dcp(Directory("/nowhere"), lazy({**params, **state}), LazyObjects())
    settings = abstract_target(tiny_config(model=SMALL, train={"seq_len": 8}))
    if says is None:
        checkpoint = dcp_state.read(result, settings, dcp_state.ReadOptions())
        assert checkpoint.scalars["updates"] == checkpoint.progress.step == 4
        return
    with pytest.raises(UserError, match=says):
        dcp_state.read(result, settings, dcp_state.ReadOptions())


def test_frequency_tables_are_ignored():
    for dialect, keys in (
        ("torchtitan", ["freqs_cis"]),
        ("torchtitan", ["rope.cache"]),
        ("hf-llama", [f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(LAYERS)]),
    ):
        theirs = theirs_of(dialect, LLAMA) | {key: np.zeros(3) for key in keys}
        assert translated(dialect, LLAMA, theirs).keys() == shapes_of(LLAMA).keys()
        assert dcp_state.sort_keys(as_dcp(theirs)).dialect.name == dialect


def test_duplicate_keys_of_parameter_raise():
    keys = ["model.norm.weight", "model.module.norm.weight"]
    with pytest.raises(UserError, match=r"model\.module\.norm\.weight and another key are both"):
        dcp_state.sort_keys(as_dcp(keys))


def test_unknown_names_suggest_nearest_dialect():
    keys = [*theirs_of("torchtitan", LLAMA), "vision.patches.weight"]
    settings = abstract_target(tiny_config(model=SMALL, train={"seq_len": 8}))
    with pytest.raises(UserError, match=r"nearest is torchtitan, .* know vision\.patches\.weight"):
        dcp_state.read(as_dcp(keys), settings, dcp_state.ReadOptions())
    with pytest.raises(UserError, match="it holds no model"):
        dcp_state.read(as_dcp([]), settings, dcp_state.ReadOptions())
    with pytest.raises(UserError, match=r"no dialect 'titan'; there are kempnerforge, .*titan"):
        dcp_state.read(as_dcp(keys), settings, dcp_state.ReadOptions(dialect="titan"))


def test_all_mismatches_are_listed_together():
    theirs = theirs_of("hf-llama", LLAMA)
    del theirs["model.norm.weight"], theirs["model.layers.1.mlp.up_proj.weight"]
    theirs["model.layers.2.mlp.up_proj.weight"] = np.zeros((24, 16))
    theirs["model.layers.0.self_attn.k_proj.weight"] = np.zeros((16, 16))
    theirs["model.layers.0.mlp.down_proj.weight"] = np.zeros(())
    with pytest.raises(UserError) as caught:
        translated("hf-llama", LLAMA, theirs)
    assert str(caught.value).splitlines() == [
        "here does not fit [model]:",
        "  missing: layers.1.mlp.up_proj.weight",
        "  missing: norm.weight",
        "  left over: model.layers.2.mlp.up_proj.weight",
        "  layers.0.attention.k_proj.weight is [16, 16], but [8, 16] in the model",
        "  layers.0.mlp.down_proj.weight is [], but [16, 24] in the model",
    ]


def test_long_list_is_shortened():
    with pytest.raises(UserError, match=r"(?s)(  missing: \S+\n){20}  \.\.\. and \d+ more$"):
        translated("hf-llama", LLAMA, {})


@pytest.mark.parametrize("shape", [(), (7,), (7, 16), (6, 16), (12, 16), (0, 16), (8, 16, 1)])
def test_unpermutable_tensor_reports_its_shape(shape):
    """This includes tensors whose rows would match if rounded up to whole heads."""
    theirs = theirs_of("torchtitan", LLAMA)
    theirs["layers.0.attention.qkv_linear.wk.weight"] = np.zeros(shape)
    says = rf"k_proj\.weight is \[{', '.join(map(str, shape))}\], but .* in the model"
    with pytest.raises(UserError, match=says):
        translated("torchtitan", LLAMA, theirs)


@pytest.mark.parametrize("count", [EXPERTS - 1, EXPERTS + 1, 0])
def test_wrong_number_of_packed_experts_raises(count):
    features = FEATURES["kempnerforge-packed"][0]
    theirs = theirs_of("kempnerforge-packed", features)
    theirs["layers.1.mlp.up_w"] = np.zeros((count, 16, 10))
    says = rf"experts\.0\.up_proj\.weight is \[{count}, 16, 10\], but .* in the model"
    with pytest.raises(UserError, match=says):
        translated("kempnerforge-packed", features, theirs)


def test_overwritten_experts_are_reported_lost():
    features = FEATURES["hf-mixtral"][0]
    theirs = theirs_of("hf-mixtral", features)
    retained = {
        key: a for key, a in theirs.items() if ".experts.2" not in key and ".experts.3" not in key
    }
    with pytest.raises(UserError, match=r"experts are missing: .*distributed\.ep > 1"):
        translated("hf-mixtral", features, retained)
    item = {key: a for key, a in theirs.items() if "layers.0.block_sparse_moe.experts.3" not in key}
    with pytest.raises(UserError, match=r"missing: layers\.0\.mlp\.experts\.3\."):
        translated("hf-mixtral", features, item)
    dense = {key: array for key, array in theirs.items() if "moe" not in key}
    with pytest.raises(UserError) as caught:
        translated("hf-mixtral", features, dense)
    assert "lost" not in str(caught.value)


TIED = {"tie_embeddings": True}
CAN_BE_TIED = [name for name, several in FEATURES.items() if LLAMA in several]


@pytest.mark.parametrize("dialect", CAN_BE_TIED)
def test_copy_of_tied_head_is_optional(dialect):
    assert HEAD not in shapes_of(TIED)
    theirs = theirs_of(dialect, TIED)
    embedding = theirs[NAME_MAPS[dialect].key_for(EMBEDDING)]
    copied = theirs | {NAME_MAPS[dialect].key_for(HEAD): embedding.copy()}
    for source in (theirs, copied):
        back = translated(dialect, TIED, source)
        assert back.keys() == shapes_of(TIED).keys()
        assert_same(back[EMBEDDING].all(), embedding)


@pytest.mark.parametrize("dialect", CAN_BE_TIED)
def test_different_head_of_tied_model_raises(dialect):
    theirs = theirs_of(dialect, TIED)
    embedding = theirs[NAME_MAPS[dialect].key_for(EMBEDDING)]
    other = embedding.copy()
    other[-1, -1] = np.nextafter(other[-1, -1], np.float32(9))
    for head in (other, embedding[:-1], embedding.astype(DTYPES["bfloat16"])):
        with pytest.raises(UserError, match="tie_embeddings is true, but the output head differs"):
            translated(dialect, TIED, theirs | {NAME_MAPS[dialect].key_for(HEAD): head})


def test_tied_head_does_not_replace_embedding():
    theirs = theirs_of("hf-llama", TIED)
    theirs["lm_head.weight"] = theirs.pop("model.embed_tokens.weight")
    with pytest.raises(UserError, match=f"missing: {EMBEDDING}"):
        translated("hf-llama", TIED, theirs)


@pytest.mark.parametrize("rows", [16, 12, 9])
@pytest.mark.parametrize("dialect", ["hf-llama", "torchtitan"])
def test_vocabulary_is_resized_on_request(dialect, rows):
    theirs = theirs_of(dialect, LLAMA)
    padded = np.random.default_rng(0).standard_normal((16, 16), np.float32)
    for name in (EMBEDDING, HEAD):
        theirs[NAME_MAPS[dialect].key_for(name)] = padded[:rows]
    expected = padded[:12].copy()
    expected[rows:] = 0
    back = translated(dialect, LLAMA, theirs, resize_vocab=True)
    for name in (EMBEDDING, HEAD):
        assert_same(back[name].all(), expected)
    assert back["norm.weight"].shape == (16,)


@pytest.mark.parametrize("rows", [16, 9])
def test_other_vocabulary_is_refused_with_advice(rows):
    theirs = theirs_of("hf-llama", LLAMA)
    theirs["model.embed_tokens.weight"] = theirs["lm_head.weight"] = np.zeros((rows, 16))
    says = f"has {rows} rows in the checkpoint and model.vocab_size is 12: --resize-vocab"
    with pytest.raises(UserError, match=says):
        translated("hf-llama", LLAMA, theirs)


@pytest.mark.parametrize(
    ("dialect", "features"),
    [
        ("torchtitan", {"qk_norm": True}),
        ("torchtitan-2025", {"qkv_bias": True}),
        ("torchtitan", {"norm_type": "layernorm"}),
        ("torchtitan", {"num_experts": EXPERTS}),
        ("hf-llama", {"qk_norm": True}),
        ("hf-mistral", {"qkv_bias": True}),
        ("hf-llama", {"norm_type": "layernorm"}),
        ("hf-llama", {"num_experts": EXPERTS}),
        ("hf-mixtral", LLAMA),
        ("hf-mixtral", {**MIXTURE, "attention_sinks": True}),
        ("hf-qwen3-moe", {**MIXTURE, "moe_router": "sigmoid_topk"}),
        ("hf-dots1", {**SIGMOID, "qk_norm": True}),
        ("hf-qwen3-moe", {**MIXTURE, "moe_shared_experts": 1}),
        ("hf-glm4-moe", {**DEEPSEEK, **SHARED, "moe_first_dense_layers": 0}),
        ("hf-mixtral", {**MIXTURE, "moe_router_bias": True}),
        ("kempnerforge", {**MIXTURE, **SHARED}),
    ],
)
def test_unsupported_names_are_refused(dialect, features):
    with pytest.raises(UserError, match=rf"layers\.0\.\S+ has no counterpart in {dialect} "):
        theirs_of(dialect, features)


def test_shared_expert_in_mixtral_raises():
    name = "layers.0.mlp.shared_expert.up_proj.weight"
    with pytest.raises(UserError, match=f"{name} has no counterpart in hf-mixtral"):
        NAME_MAPS["hf-mixtral"].key_for(name)
