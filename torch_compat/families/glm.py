"""GLM-4, GLM-4-0414, GLM 4.5, GLM-4.7-Flash and GLM-5."""

import dataclasses
import reprlib

from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from torch_compat.families import common, experts
from torch_compat.families.common import COMMON
from torch_compat.families.deepseek import (
    DEEPSEEK_V3_FAMILY,
    DEEPSEEK_V3_RULES,
    DEEPSEEK_V32_FAMILY,
    index_rules,
    read_indexed,
    write_indexed,
)
from torch_compat.families.family import (
    HF_NAME,
    LLAMA,
    NAME,
    OUTSIDE,
    PAIRED_ATTENTION,
    PRE_NORMS,
    PREDICTION,
    QK_NORMS,
    Config,
    Family,
    Table,
    consecutive_rows,
    fused,
    name_map,
)
from torch_compat.families.qwen import BIASES
from torch_compat.families.values import list_of
from torch_compat.formats.limits import is_name
from torch_compat.names.table import INDEXER_HEADS, Rule

# GLM-4 9B (arXiv:2406.12793).

_PROJECTIONS = (
    *(rule for rule in PAIRED_ATTENTION if not rule.name.endswith("o_proj.bias")),
    *fused(
        tuple(f"{NAME}mlp.{m}_proj.weight" for m in ("gate", "up")),
        f"{HF_NAME}mlp.gate_up_proj.weight",
        lambda model: consecutive_rows(model.ffn_dim, model.ffn_dim),
    ),
    Rule(f"{NAME}mlp.down_proj.weight", f"{HF_NAME}mlp.down_proj.weight"),
)
"""Rules of attention and feed-forward."""
_DEFAULTS = {
    **COMMON, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-07,
    "attention_bias": True, "partial_rotary_factor": None,
}  # fmt: skip


def _read_glm(c: Config, where: str) -> Table:
    """Read a model without the placement of its norms."""
    table = common.shape(c) | common.feed_forward(c, where)
    table |= common.rotary(c, where, partial=0.5)
    return {**table, "qkv_bias": True} if c["attention_bias"] else table


def _write_glm(model: ModelConfig) -> Table:
    """Return the keys that `_read_glm` reads."""
    keys = {**common.llama_keys(model), **common.rotary_keys(model, partial=True)}
    return {**keys, "attention_bias": model.qkv_bias}


GLM_FAMILY = Family(
    "glm",
    name_map("hf-glm", "GlmForCausalLM", *OUTSIDE, *PRE_NORMS, *_PROJECTIONS),
    _DEFAULTS,
    summary="GLM-4 9B: rotary pairs of neighbouring channels, half of a head",
    read=_read_glm,
    write=_write_glm,
)


# GLM-4-0414 (9B and 32B).

_NORMS = (
    Rule(f"{NAME}attention_norm.weight", f"{HF_NAME}input_layernorm.weight"),
    Rule(f"{NAME}attention_post_norm.weight", f"{HF_NAME}post_self_attn_layernorm.weight"),
    Rule(f"{NAME}mlp_norm.weight", f"{HF_NAME}post_attention_layernorm.weight"),
    Rule(f"{NAME}mlp_post_norm.weight", f"{HF_NAME}post_mlp_layernorm.weight"),
)


def _read_glm4(c: Config, where: str) -> Table:
    return {**_read_glm(c, where), "norm_placement": "sandwich"}


GLM4_FAMILY = Family(
    "glm4",
    name_map("hf-glm4", "Glm4ForCausalLM", *OUTSIDE, *_NORMS, *_PROJECTIONS),
    _DEFAULTS,
    summary="GLM-4-0414 (9B, 32B): GLM-4 with norms before and after each part",
    read=_read_glm4,
    write=_write_glm,
)


# GLM 4.5 (arXiv:2508.06471).

_OPTIONAL = tuple(rule._replace(optional=True) for rule in (*QK_NORMS, *BIASES))


def _read_glm4_moe(c: Config, where: str) -> Table:
    table = common.shape(c) | common.feed_forward(c, where)
    table |= common.rotary(c, where, partial=0.5) | experts.sigmoid(c, where)
    norms = {"qk_norm": True, "qk_norm_eps": c["rms_norm_eps"]} if c["use_qk_norm"] else {}
    return table | norms | {"qkv_bias": c["attention_bias"]}


def _write_glm4_moe(model: ModelConfig) -> Table:
    return {
        **common.llama_keys(model),
        **common.rotary_keys(model, partial=True),
        **experts.sigmoid_keys(model),
        "use_qk_norm": model.qk_norm,
        "attention_bias": model.qkv_bias,
        "num_nextn_predict_layers": model.mtp_depth,
    }


GLM4_MOE_FAMILY = Family(
    "glm4_moe",
    name_map(
        "hf-glm4-moe", "Glm4MoeForCausalLM", *LLAMA, *experts.EXPERTS, experts.BIAS,
        *experts.shared("shared_experts"), *_OPTIONAL, *PREDICTION,
    ),
    {**COMMON, **experts.SIGMOID, "rms_norm_eps": 1e-5, "num_key_value_heads": 8,
     "num_experts_per_tok": 8, "n_routed_experts": 128, "n_shared_experts": 1,
     "first_k_dense_replace": 1, "norm_topk_prob": True, "attention_bias": False,
     "use_qk_norm": False, "partial_rotary_factor": None, "num_nextn_predict_layers": 0},
    summary="GLM 4.5, 4.6: DeepSeek-V3's router and experts; partial rotary positions",
    read=_read_glm4_moe,
    write=_write_glm4_moe,
    aliases={"num_mtp_layers": "num_nextn_predict_layers"},
    unused=experts.LOSSES,
    further_layers_key="num_nextn_predict_layers",
    float32=experts.FLOAT32,
)  # fmt: skip


# GLM-4.7-Flash.

_FIRST = "first_k_dense_replace"


def _read_glm4_moe_lite(c: Config, where: str) -> Table:
    layers = experts.listed_layers(c, where)
    return DEEPSEEK_V3_FAMILY.read({**c, _FIRST: 0}, where) | layers


def _write_glm4_moe_lite(model: ModelConfig) -> Table:
    keys = DEEPSEEK_V3_FAMILY.write(model)
    del keys[_FIRST]
    return keys | experts.listed_layer_keys(model)


GLM4_MOE_LITE_FAMILY = dataclasses.replace(
    DEEPSEEK_V3_FAMILY,
    model_type="glm4_moe_lite",
    dialect=dataclasses.replace(
        DEEPSEEK_V3_FAMILY.dialect, name="hf-glm4-moe-lite", about="Glm4MoeLiteForCausalLM"
    ),
    defaults={
        **{key: value for key, value in DEEPSEEK_V3_FAMILY.defaults.items() if key != _FIRST},
        "num_key_value_heads": 20, "rms_norm_eps": 1e-5, "q_lora_rank": 768,
        "qk_nope_head_dim": 192, "v_head_dim": 256, "n_routed_experts": 64,
        "routed_scaling_factor": 1.8, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536, "num_nextn_predict_layers": 0,
        "partial_rotary_factor": None, experts.KINDS: None,
    },
    summary="GLM-4.7-Flash: DeepSeek-V3's latent attention, router and experts",
    read=_read_glm4_moe_lite,
    write=_write_glm4_moe_lite,
    only={**DEEPSEEK_V3_FAMILY.only, _FIRST: 1},  # in files, and ignored by transformers
    ranges={experts.KINDS: list_of(is_name)},
    aliases={"num_local_experts": "n_routed_experts"},
)  # fmt: skip


# GLM-5 (arXiv:2602.15763).

_PATTERN, _EVERY = "index_topk_pattern", "index_topk_freq"


def _read_glm_moe_dsa(c: Config, where: str) -> Table:
    """Read a model whose layers each have an indexer.

    Raises:
        UserError: some layers use the selection of an earlier layer.
    """
    key = next((key for key in ("indexer_types", _PATTERN) if c[key]), _EVERY)
    if c[_EVERY] > 1 if key == _EVERY else {"S", "shared"} & set(c[key]):
        raise UserError(
            f"{where}: {key} = {reprlib.repr(c[key])}: layers that use the selection of an earlier "
            "layer have no counterpart in jaxforge's model"
        )
    return read_indexed(c, where)


def _write_glm_moe_dsa(model: ModelConfig) -> Table:
    return write_indexed(model) | {"indexer_types": ["full"] * model.n_layers}


GLM_MOE_DSA_FAMILY = dataclasses.replace(
    DEEPSEEK_V32_FAMILY,
    model_type="glm_moe_dsa",
    dialect=name_map(
        "hf-glm-moe-dsa", "GlmMoeDsaForCausalLM", *DEEPSEEK_V3_RULES, *index_rules(INDEXER_HEADS)
    ),
    defaults={
        **DEEPSEEK_V32_FAMILY.defaults,
        "num_key_value_heads": 64, "rms_norm_eps": 1e-5, "q_lora_rank": 2048,
        "qk_nope_head_dim": 192, "v_head_dim": 256, "n_group": 1, "topk_group": 1,
        "index_n_heads": 32, "indexer_types": None, _PATTERN: None, _EVERY: 1,
    },
    summary="GLM-5: DeepSeek-V3.2's attention with interleaved rotary pairs in the indexer",
    read=_read_glm_moe_dsa,
    write=_write_glm_moe_dsa,
    ranges={**DEEPSEEK_V32_FAMILY.ranges, "indexer_types": list_of(is_name),
            _PATTERN: lambda value: is_name(value) or list_of(is_name)(value)},
)  # fmt: skip
