"""Liquid AI's LFM2, dense and with experts: short convolutions and attention with q/k norms."""

import math
from typing import Any

from jaxforge.config.mixers import SHORT_CONVOLUTION
from jaxforge.config.model import ATTENTION, ModelConfig
from torch_compat.families import common, state_space
from torch_compat.families.common import COMMON, FULL
from torch_compat.families.family import (
    HF_NAME,
    NAME,
    OUTSIDE,
    Config,
    Family,
    Table,
    consecutive_rows,
    fused,
    name_map,
)
from torch_compat.families.values import LAYER, integer, is_size, list_of, nullable
from torch_compat.names.table import DepthwiseConvolution, Rule

_CONVOLUTION = "conv"
_ATTENTION, _MLP = f"{HF_NAME}self_attn.", f"{HF_NAME}feed_forward."
_MODULE, _HF_MODULE = f"{NAME}{SHORT_CONVOLUTION}.", f"{HF_NAME}{_CONVOLUTION}."
_MATRICES = {"gate": "w1", "down": "w2", "up": "w3"}
_RULES = (
    *(rule for rule in OUTSIDE if rule.name != "norm.weight"),
    Rule("norm.weight", "model.embedding_norm.weight"),
    Rule(f"{NAME}attention_norm.weight", f"{HF_NAME}operator_norm.weight"),
    Rule(f"{NAME}mlp_norm.weight", f"{HF_NAME}ffn_norm.weight"),
    *(Rule(f"{NAME}attention.{m}_proj.weight", f"{_ATTENTION}{m}_proj.weight") for m in "qkv"),
    Rule(f"{NAME}attention.o_proj.weight", f"{_ATTENTION}out_proj.weight"),
    *(Rule(f"{NAME}attention.{m}_norm.weight", f"{_ATTENTION}{m}_layernorm.weight") for m in "qk"),
    Rule(f"{_MODULE}conv.weight", f"{_HF_MODULE}conv.weight", DepthwiseConvolution()),
    Rule(f"{_MODULE}conv.bias", f"{_HF_MODULE}conv.bias", optional=True),
    *(
        rule
        for kind in ("weight", "bias")
        for rule in (
            *fused(
                tuple(f"{_MODULE}{m}_proj.{kind}" for m in "bcx"), f"{_HF_MODULE}in_proj.{kind}",
                lambda model: consecutive_rows(*[model.dim] * 3), optional=kind == "bias",
            ),
            Rule(f"{_MODULE}out_proj.{kind}", f"{_HF_MODULE}out_proj.{kind}",
                 optional=kind == "bias"),
        )
    ),
    *(Rule(f"{NAME}mlp.{m}_proj.weight", f"{_MLP}{w}.weight") for m, w in _MATRICES.items()),
)  # fmt: skip
_DEFAULTS: dict[str, Any] = {
    **COMMON, "vocab_size": 65536, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 128_000, "rms_norm_eps": 1e-5,
    "rope_theta": 1e6, "tie_word_embeddings": True, "conv_L_cache": 3, "conv_bias": False,
    "layer_types": None,
}  # fmt: skip
_NAMES = {"norm_eps": "rms_norm_eps"}
_MOST_TIMES = 100  # by which a stranger's file may widen feed-forwards


def _read_layers(c: Config, where: str) -> Table:
    """Read everything but the feed-forwards."""
    n_layers = c["num_hidden_layers"]
    attending = c.get("full_attn_idxs")
    indices = range(n_layers) if attending is None else attending
    kinds = c["layer_types"] or [FULL if i in indices else _CONVOLUTION for i in range(n_layers)]
    common.check_layer_types(kinds, n_layers, (FULL, _CONVOLUTION), where)
    table = common.llama(c, where) | {"qk_norm": True, "qk_norm_eps": c["rms_norm_eps"]}
    table |= state_space.pattern([ATTENTION if k == FULL else SHORT_CONVOLUTION for k in kinds])
    if _CONVOLUTION in kinds:
        sizes = {"conv_size": c["conv_L_cache"], "bias": c["conv_bias"]}
        table[SHORT_CONVOLUTION] = sizes
    return table


def _layer_keys(model: ModelConfig) -> Table:
    """Return the keys that `_read_layers` reads."""
    mixers = {ATTENTION: FULL, SHORT_CONVOLUTION: _CONVOLUTION}
    return {
        **common.llama_keys(model),
        "layer_types": [mixers.get(parts.mixer, parts.mixer) for parts in model.layer_parts],
        "conv_L_cache": model.short_convolution.conv_size,
        "conv_bias": model.short_convolution.bias,
    }


# Dense models.


def _read_lfm2(c: Config, where: str) -> Table:
    width = c["block_ff_dim"] or c["intermediate_size"]
    if c["block_auto_adjust_ff_dim"]:
        width = int(2 * width / 3)
        if c["block_ffn_dim_multiplier"] is not None:
            unit = c["block_multiple_of"]
            width = unit * math.ceil(int(c["block_ffn_dim_multiplier"] * width) / unit)
    return _read_layers({**c, "intermediate_size": max(1, width)}, where)


LFM2_FAMILY = Family(
    "lfm2",
    name_map("hf-lfm2", "Lfm2ForCausalLM", *_RULES),
    {**_DEFAULTS, "hidden_size": 2560, "intermediate_size": 12288, "block_ff_dim": None,
     "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256,
     "full_attn_idxs": None},
    summary="LFM2: gated short convolutions, and attention with q/k norms",
    read=_read_lfm2,
    # `_read_lfm2` would round an adjusted width.
    write=lambda model: {**_layer_keys(model), "block_auto_adjust_ff_dim": False},
    only={"hidden_act": "silu"},
    names=_NAMES,
    aliases={"tie_embedding": "tie_word_embeddings"},
    ranges={"full_attn_idxs": nullable(list_of(LAYER)), "block_ff_dim": nullable(integer()),
            "block_ffn_dim_multiplier":
                lambda value: value is None or (is_size(value) and value < _MOST_TIMES)},
    unused=("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale",
            "block_use_swiglu", "block_use_xavier_init", "conv_dim", "conv_dim_out",
            "conv_use_xavier_init", "num_heads", "theta", "use_pos_enc"),
)  # fmt: skip


# Models with experts.

_EXPERT_RULES = (
    Rule(f"{NAME}mlp.router.gate.weight", f"{_MLP}gate.weight"),
    Rule(f"{NAME}mlp.router.expert_bias", f"{_MLP}expert_bias"),
    *(
        Rule(f"{NAME}mlp.experts.{{j}}.{m}_proj.weight", f"{_MLP}experts.{{j}}.{w}.weight")
        for m, w in _MATRICES.items()
    ),
)
_EXPERTS = {
    "num_experts": "num_experts", "moe_top_k": "num_experts_per_tok",
    "moe_expert_dim": "moe_intermediate_size", "moe_first_dense_layers": "num_dense_layers",
    "moe_norm_topk": "norm_topk_prob", "moe_routed_scaling": "routed_scaling_factor",
}  # fmt: skip
"""Key of `[model]` -> key of `config.json`."""


def _read_lfm2_moe(c: Config, where: str) -> Table:
    return _read_layers(c, where) | {
        **{key: c[hf_key] for key, hf_key in _EXPERTS.items()},
        "moe_router": "sigmoid_topk",
        "moe_bias_update": "sign" if c["use_expert_bias"] else "none",
    }


def _write_lfm2_moe(model: ModelConfig) -> Table:
    """Return the keys that `_read_lfm2_moe` reads."""
    return {
        **_layer_keys(model),
        **{hf_key: getattr(model, key) for key, hf_key in _EXPERTS.items()},
        "moe_intermediate_size": model.expert_dim,
        "use_expert_bias": model.bias_update == "sign",
    }


LFM2_MOE_FAMILY = Family(
    "lfm2_moe",
    name_map("hf-lfm2-moe", "Lfm2MoeForCausalLM", *_RULES, *_EXPERT_RULES),
    {**_DEFAULTS, "hidden_size": 2048, "intermediate_size": 7168, "num_experts": 32,
     "num_experts_per_tok": 4, "moe_intermediate_size": 1792, "num_dense_layers": 2,
     "norm_topk_prob": True, "routed_scaling_factor": 1.0, "use_expert_bias": True},
    summary="LFM2 with experts: as `hf-lfm2`, with DeepSeek-V3's router",
    read=_read_lfm2_moe,
    write=_write_lfm2_moe,
    only={"hidden_act": "silu"},
    names=_NAMES,
    aliases={"tie_embedding": "tie_word_embeddings"},
    ranges={"num_dense_layers": LAYER},
    unused=("output_router_logits", "use_pos_enc", "theta"),
)  # fmt: skip
