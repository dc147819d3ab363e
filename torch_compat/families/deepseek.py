"""DeepSeek-V2, V3 and V3.2, Kimi K2, and dots.llm1, which has DeepSeek's experts."""

import dataclasses
import reprlib
from collections.abc import Mapping
from typing import Any

from jaxforge.config.mixers import INDEXER, LATENT_ATTENTION
from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from torch_compat.families import common, experts
from torch_compat.families.common import COMMON, FULL, SLIDING
from torch_compat.families.family import (
    ATTENTION_BIASES,
    GATED,
    HF_NAME,
    LLAMA,
    NAME,
    OUTSIDE,
    PRE_NORMS,
    PREDICTION,
    QK_NORMS,
    Config,
    Family,
    Table,
    name_map,
)
from torch_compat.families.values import list_of
from torch_compat.formats.limits import is_name
from torch_compat.names.table import LATENT_KEYS, LATENT_QUERIES, InterleavedChannels, Rule

# Parameter names and config keys of multi-head latent attention, shared by DeepSeek's families.

_LATENT_DEFAULTS: Mapping[str, Any] = {
    **COMMON, "qk_head_dim": None, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "attention_bias": False,
}  # fmt: skip
"""Keys of a model with latent attention and their defaults in transformers."""
_UNUSED = ("ep_size", "pretraining_tp", "aux_loss_alpha", "seq_aux", "output_router_logits")
"""Keys that concern training and its machines only."""


def _latent_rule(
    name: str, hf_name: str, change: InterleavedChannels | None = None, *, optional: bool = False
) -> Rule:
    return Rule(
        f"{NAME}{LATENT_ATTENTION}.{name}", f"{HF_NAME}self_attn.{hf_name}", change, optional
    )


LATENT_RULES = (
    _latent_rule("q_proj.weight", "q_proj.weight", LATENT_QUERIES, optional=True),
    _latent_rule("q_a_proj.weight", "q_a_proj.weight", optional=True),
    _latent_rule("q_a_proj.bias", "q_a_proj.bias", optional=True),
    _latent_rule("q_a_norm.weight", "q_a_layernorm.weight", optional=True),
    _latent_rule("q_b_proj.weight", "q_b_proj.weight", LATENT_QUERIES, optional=True),
    _latent_rule("kv_a_proj.weight", "kv_a_proj_with_mqa.weight", LATENT_KEYS),
    _latent_rule("kv_a_proj.bias", "kv_a_proj_with_mqa.bias", LATENT_KEYS, optional=True),
    _latent_rule("kv_a_norm.weight", "kv_a_layernorm.weight"),
    _latent_rule("kv_b_proj.weight", "kv_b_proj.weight"),
    _latent_rule("o_proj.weight", "o_proj.weight"),
    _latent_rule("o_proj.bias", "o_proj.bias", optional=True),
)

_SIZES = {
    "q_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
    "nope_head_dim": "qk_nope_head_dim",
    "rope_head_dim": "qk_rope_head_dim",
    "value_head_dim": "v_head_dim",
}
"""Key of `[model.latent_attention]` -> key of `config.json`."""


def _read_latent(c: Config, where: str) -> Table:
    """Read a model with latent attention, apart from its experts.

    Raises:
        UserError: a key that follows from others has another value.
    """
    rotated = c["qk_rope_head_dim"]
    implied = {
        "num_key_value_heads": ("num_attention_heads", c["num_attention_heads"]),
        "head_dim": ("qk_rope_head_dim", rotated),  # transformers writes them
        "qk_head_dim": ("qk_nope_head_dim + qk_rope_head_dim", c["qk_nope_head_dim"] + rotated),
    }
    for key, (name, value) in implied.items():
        if c[key] not in (None, value):
            raise UserError(
                f"{where}: {key} = {reprlib.repr(c[key])} must equal {name} = {value} in this "
                "family"
            )
    table = common.shape({**c, "head_dim": None}) | common.rotary(c, where)
    table |= common.feed_forward(c, where) | common.biases(c)
    # Latent attention has no key heads: keys of all heads come from one vector.
    del table["n_kv_heads"]
    return table | {
        "mixer_pattern": [LATENT_ATTENTION],
        "latent_attention": {
            key: c[hf_key] for key, hf_key in _SIZES.items() if c[hf_key] is not None
        },
    }


def _latent_keys(model: ModelConfig) -> Table:
    """Return the keys that `_read_latent` reads."""
    written = common.llama_keys(model)
    del written["head_dim"]
    return {
        **written,
        **{hf_key: getattr(model.latent_attention, key) for key, hf_key in _SIZES.items()},
        "attention_bias": model.qkv_bias and model.o_bias,
    }


# DeepSeek-V3 and R1 (arXiv:2412.19437).

DEEPSEEK_V3_RULES = (
    *OUTSIDE, *PRE_NORMS, *GATED, *LATENT_RULES, *experts.EXPERTS, experts.BIAS,
    *experts.shared("shared_experts"), *PREDICTION,
)  # fmt: skip
_DEEPSEEK_V3_DEFAULTS = {
    **_LATENT_DEFAULTS, **experts.SIGMOID, "num_key_value_heads": 128, "n_shared_experts": 1,
    "n_routed_experts": 256, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "norm_topk_prob": True,
    "moe_intermediate_size": 2048, "num_nextn_predict_layers": 1,
}  # fmt: skip
_ONLY = {
    "rope_interleave": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}  # fmt: skip


def _read_deepseek_v3(c: Config, where: str) -> Table:
    """Read `[model]`."""
    return _read_latent(c, where) | experts.sigmoid(c, where)


def _write_deepseek_v3(model: ModelConfig) -> Table:
    """Return the keys that `_read_deepseek_v3` reads."""
    return {
        **_latent_keys(model),
        **experts.sigmoid_keys(model),
        "num_nextn_predict_layers": model.mtp_depth,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


DEEPSEEK_V3_FAMILY = Family(
    "deepseek_v3",
    name_map("hf-deepseek-v3", "DeepseekV3ForCausalLM", *DEEPSEEK_V3_RULES),
    _DEEPSEEK_V3_DEFAULTS,
    summary="DeepSeek-V3 and R1, Moonlight: latent attention with interleaved rotary pairs, YaRN's "
    "`mscale`; a sigmoid router with groups and a bias for selection only, shared experts, "
    "dense first layers; weights in 8 bits",
    read=_read_deepseek_v3,
    write=_write_deepseek_v3,
    only=_ONLY,
    aliases={"num_mtp_layers": "num_nextn_predict_layers", "num_local_experts": "n_routed_experts"},
    unused=_UNUSED,
    further_layers_key="num_nextn_predict_layers",
    float32=experts.FLOAT32,
)


# DeepSeek-V2 and V2-Lite (arXiv:2405.04434).

_GREEDY, _BY_GROUPS = "greedy", "group_limited_greedy"


def _read_deepseek_v2(c: Config, where: str) -> Table:
    method = c["topk_method"]
    if method not in (_GREEDY, _BY_GROUPS):
        raise UserError(
            f"{where}: jaxforge's model has no counterpart of topk_method = {method!r}; supported "
            f"are {_GREEDY} and {_BY_GROUPS}"
        )
    needed = ["num_experts_per_tok", *(["n_group", "topk_group"] if method == _BY_GROUPS else [])]
    if missing := [key for key in needed if c[key] is None]:
        raise UserError(f"{where}: the config does not give {', '.join(missing)}")
    table = _read_latent(c, where) | experts.shared_sizes(c) | {
        "moe_norm_topk": False,
        "moe_routed_scaling": c["routed_scaling_factor"],
    }  # fmt: skip
    if method == _GREEDY:
        return table
    return table | {
        "moe_groups": c["n_group"],
        "moe_top_k_groups": c["topk_group"],
        "moe_group_score": "max",
    }


def _write_deepseek_v2(model: ModelConfig) -> Table:
    has_groups = model.moe_groups != model.moe_top_k_groups
    return {
        **_latent_keys(model),
        **experts.shared_size_keys(model),
        "norm_topk_prob": False,
        "routed_scaling_factor": model.moe_routed_scaling,
        "topk_method": _BY_GROUPS if has_groups else _GREEDY,
        "n_group": model.moe_groups,
        "topk_group": model.moe_top_k_groups,
        "scoring_func": "softmax",
    }


DEEPSEEK_V2_FAMILY = Family(
    "deepseek_v2",
    name_map(
        "hf-deepseek-v2", "DeepseekV2ForCausalLM", *OUTSIDE, *PRE_NORMS, *GATED, *LATENT_RULES,
        *experts.EXPERTS, *experts.shared("shared_experts"),
    ),
    {**_LATENT_DEFAULTS, "n_routed_experts": 64, "num_experts_per_tok": None, "n_shared_experts": 2,
     "moe_intermediate_size": 1407, "routed_scaling_factor": 1.0, "topk_method": _GREEDY,
     "n_group": None, "topk_group": None, "first_k_dense_replace": 0},
    summary="DeepSeek-V2, V2-Lite: latent attention; a softmax router, also limited to groups by "
            "their best expert",
    read=_read_deepseek_v2,
    write=_write_deepseek_v2,
    only={"norm_topk_prob": False, "scoring_func": "softmax", "mlp_bias": False,
          "moe_layer_freq": 1},
    aliases={"num_experts": "n_routed_experts"},
    unused=_UNUSED,
    float32=experts.FLOAT32,
)  # fmt: skip


# DeepSeek-V3.2 (arXiv:2512.02556): DeepSeek-V3 with an indexer in each layer.

_INDEX_SIZES = {
    "index_heads": "index_n_heads", "index_head_dim": "index_head_dim", "index_top_k": "index_topk",
}  # fmt: skip
"""Key of `[model.latent_attention]` -> key of `config.json`."""
_OF_ALL_LAYERS = "indexed_attention"


def index_rules(heads: InterleavedChannels | None = None) -> tuple[Rule, ...]:
    """Return the rules of indexers.

    Args:
        heads: layout of the channels of a head, if it is not that of jaxforge.
    """
    names = {
        "q_proj.weight": ("wq_b.weight", heads),
        "k_proj.weight": ("wk.weight", heads),
        "k_norm.weight": ("k_norm.weight", heads),
        "k_norm.bias": ("k_norm.bias", heads),
        "weights_proj.weight": ("weights_proj.weight", None),
    }
    return tuple(
        _latent_rule(f"{INDEXER}.{name}", f"{INDEXER}.{hf_name}", change)
        for name, (hf_name, change) in names.items()
    )


def read_indexed(c: Config, where: str) -> Table:
    """Read DeepSeek-V3's model with an indexer in each layer.

    Raises:
        UserError: some layers have other attention.
    """
    if c["layer_types"] is not None:
        kinds = c["layer_types"], c["num_hidden_layers"], (_OF_ALL_LAYERS,)
        common.check_layer_types(*kinds, where)
    layers = {} if c[experts.KINDS] is None else experts.listed_layers(c, where)
    table = _read_deepseek_v3(c, where) | layers
    table[LATENT_ATTENTION] |= {key: c[hf_key] for key, hf_key in _INDEX_SIZES.items()}
    return table


def write_indexed(model: ModelConfig) -> Table:
    """Return the keys that `read_indexed` reads."""
    sizes = model.latent_attention
    return {
        **_write_deepseek_v3(model),
        **{hf_key: getattr(sizes, key) for key, hf_key in _INDEX_SIZES.items()},
        **experts.listed_layer_keys(model),
        "layer_types": [_OF_ALL_LAYERS] * model.n_layers,
    }


DEEPSEEK_V32_FAMILY = dataclasses.replace(
    DEEPSEEK_V3_FAMILY,
    model_type="deepseek_v32",
    dialect=name_map(
        "hf-deepseek-v32", "DeepseekV32ForCausalLM", *DEEPSEEK_V3_RULES, *index_rules()
    ),
    defaults={
        **_DEEPSEEK_V3_DEFAULTS,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
        "num_nextn_predict_layers": 0,
        "layer_types": None,
        experts.KINDS: None,
    },
    summary="DeepSeek-V3.2: DeepSeek-V3 with sparse attention to the keys that an indexer selects",
    read=read_indexed,
    write=write_indexed,
    ranges={experts.KINDS: list_of(is_name), "layer_types": list_of(is_name)},
    float32=experts.FLOAT32 | {"float16": r".*\.(router\.gate|indexer\.weights_proj)\.weight"},
)


# Kimi K2 (arXiv:2507.20534).

KIMI_K2_FAMILY = Family(
    "kimi_k2",
    name_map("hf-kimi-k2", "DeepseekV3ForCausalLM", *DEEPSEEK_V3_RULES),
    _DEEPSEEK_V3_DEFAULTS,
    summary="Kimi K2: DeepSeek-V3's architecture",
    read=_read_deepseek_v3,
    write=_write_deepseek_v3,
    only=_ONLY,
    aliases=DEEPSEEK_V3_FAMILY.aliases,
    unused=DEEPSEEK_V3_FAMILY.unused,
    further_layers_key=DEEPSEEK_V3_FAMILY.further_layers_key,
    float32=experts.FLOAT32,
)


# dots.llm1 (arXiv:2506.05767): DeepSeek-V3's experts with Qwen 3's attention.


def _windows(c: Config, where: str) -> Table:
    """Read windows from `layer_types`; by default layers from `max_window_layers` on have one."""
    layers = range(c["num_hidden_layers"])
    kinds = [SLIDING if i >= c["max_window_layers"] else FULL for i in layers]
    return common.windows(c, c["layer_types"] or kinds, where)


def _read_dots1(c: Config, where: str) -> Table:
    table = common.llama(c, where) | {"qk_norm": True, "qk_norm_eps": c["rms_norm_eps"]}
    return table | _windows(c, where) | experts.sigmoid(c, where)


def _write_dots1(model: ModelConfig) -> Table:
    return {
        **common.llama_keys(model),
        **common.window_keys(model),
        **experts.sigmoid_keys(model),
        "layer_types": common.layer_kinds(model),
        "max_window_layers": model.n_layers,
        "attention_bias": model.qkv_bias and model.o_bias,
    }


DOTS1_FAMILY = Family(
    "dots1",
    name_map(
        "hf-dots1", "Dots1ForCausalLM", *LLAMA, *QK_NORMS, *experts.EXPERTS, experts.BIAS,
        *experts.shared("shared_experts"), *ATTENTION_BIASES,
    ),
    {**COMMON, **experts.SIGMOID, "num_key_value_heads": 32, "attention_bias": False,
     "sliding_window": 4096, "max_window_layers": 62, "layer_types": None},
    summary="dots.llm1: DeepSeek-V3's router and experts; Qwen 3's attention",
    read=_read_dots1,
    write=_write_dots1,
    unused=("output_router_logits",),
    float32=experts.FLOAT32,
)  # fmt: skip
