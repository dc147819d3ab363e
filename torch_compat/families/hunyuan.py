"""Tencent's Hunyuan models: Hunyuan 1, dense and with experts, and Hunyuan 3 (Hy3)."""

import reprlib
from collections.abc import Mapping
from typing import Any

from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from torch_compat.families import common, experts
from torch_compat.families.common import COMMON
from torch_compat.families.family import (
    ATTENTION_BIASES,
    HF_NAME,
    LLAMA,
    NAME,
    PREDICTION,
    QK_NORMS,
    Config,
    Family,
    Table,
    name_map,
)
from torch_compat.families.values import LAYER, integer, is_size, list_of
from torch_compat.names.table import Rule


def _check_published(c: Config, implied: Mapping[str, int], where: str) -> None:
    """Check keys that the code of the published files reads and transformers does not.

    Args:
        c: the config.
        implied: key -> its value by the keys that transformers reads. The file may have a value for
            each layer, or false.
        where: the file, for messages.

    Raises:
        UserError: a key has another value.
    """
    for key, value in implied.items():
        values = c[key] if isinstance(c[key], list) else [c[key]]
        if any(each not in (None, value) and each is not False for each in values):
            raise UserError(
                f"{where}: {key} = {reprlib.repr(c[key])} contradicts the keys that transformers "
                f"reads, which mean {value}. Change one of them"
            )


# Hunyuan 1, dense.

_DENSE_RULES = (
    *LLAMA,
    *ATTENTION_BIASES,
    *(
        Rule(f"{NAME}attention.{m}_norm.weight", f"{HF_NAME}self_attn.{name}_layernorm.weight")
        for m, name in (("q", "query"), ("k", "key"))
    ),
)
_DEFAULTS = {**COMMON, "rms_norm_eps": 1e-5, "attention_bias": False, "attention_head_dim": None}
_V1_ONLY: Mapping[str, Any] = {"norm_type": "rms", "use_qk_norm": True, "use_rotary_pos_emb": True}
"""Keys that the code of the published files reads, and transformers does not."""
_V1_UNUSED = (
    "anyres_pooling_size", "anyres_vit_max_image_size", "cla_share_factor", "dense_list",
    "eod_token_id", "im_end_id", "im_newline_id", "im_start_id", "image_token_id", "mask_init_id",
    "num_media_embeds", "org_vocab_size", "pad_id", "pool_type", "pretraining_tp", "text_end_id",
    "text_start_id", "video_end_id", "video_start_id", "vit_input_resolution", "vit_mapping_type",
    "vit_norm_type", "vit_patch", "vit_token", "vit_type",
)  # fmt: skip
"""Keys of tokens, of classifiers and of encoders of images, which text models have, too."""


def _read_hunyuan(c: Config, where: str) -> Table:
    """Read a model without its experts."""
    _check_published(c, {"attention_head_dim": common.head_size(c)}, where)
    table = common.shape(c) | common.feed_forward(c, where) | common.biases(c) | _rotary(c, where)
    norms = {"qk_norm": True, "qk_norm_eps": c["rms_norm_eps"], "qk_norm_after_rotary": True}
    return table | norms


def _rotary(c: Config, where: str) -> Table:
    """Read rotary positions, which may be of a dynamic type with a constant `alpha`.

    Raises:
        UserError: the rotary positions are of an unsupported type or incomplete.
    """
    key = "rope_scaling" if c["rope_scaling"] else "rope_parameters"
    params = c[key] or {}
    alpha, head = params.get("alpha"), common.head_size(c)
    if params.get("rope_type", params.get("type")) != "dynamic" or not alpha:
        return common.rotary(c, where)
    if not is_size(alpha) or head <= 2:
        raise UserError(f"{where}: {key} has alpha = {reprlib.repr(alpha)} for heads of {head}")
    constant = {name: x for name, x in params.items() if name not in ("alpha", "type", "rope_type")}
    table = common.rotary({**c, key: constant}, where)
    # NTK-aware scaling by a constant, which is independent of the sequence length.
    return {**table, "rope_theta": table["rope_theta"] * alpha ** (head / (head - 2))}


def _write_hunyuan(model: ModelConfig) -> Table:
    """Return the keys that `_read_hunyuan` reads."""
    return {
        **common.llama_keys(model),
        **_V1_ONLY,
        "attention_bias": model.qkv_bias and model.o_bias,
        "attention_head_dim": model.head_size,
    }


HUNYUAN_V1_DENSE_FAMILY = Family(
    "hunyuan_v1_dense",
    name_map("hf-hunyuan-v1-dense", "HunYuanDenseV1ForCausalLM", *_DENSE_RULES),
    _DEFAULTS,
    summary="Hunyuan 0.5B to 7B, Hy-MT2: q/k norms after the rotation; a rotary base with a "
    "constant `alpha`",
    read=_read_hunyuan,
    write=_write_hunyuan,
    only={**_V1_ONLY, "mlp_bias": False},
    unused=_V1_UNUSED,
)


# Hunyuan 1 with experts.

_WIDTHS = ("num_experts", "intermediate_size")
_COUNT = integer()
_MOE_ONLY: Mapping[str, Any] = {**_V1_ONLY, "norm_topk_prob": True, "use_mixed_mlp_moe": True}


def _read_hunyuan_moe(c: Config, where: str) -> Table:
    chosen, width = c["num_experts_per_tok"], c["intermediate_size"]
    if isinstance(chosen, list):
        if len(chosen) < c["num_hidden_layers"] or len(set(chosen)) > 1:
            raise UserError(
                f"{where}: moe_topk = {reprlib.repr(chosen)}: all layers must have the same number"
            )
        chosen = chosen[0]
    implied = {"moe_intermediate_size": width, "num_shared_expert": 1, "routed_scaling_factor": 1}
    _check_published(c, implied, where)
    routed = {**c, "num_experts_per_tok": chosen, "norm_topk_prob": True}
    shared = {"moe_shared_experts": 1, "moe_shared_expert_dim": width}
    return _read_hunyuan(c, where) | experts.softmax(routed, *_WIDTHS) | shared


def _write_hunyuan_moe(model: ModelConfig) -> Table:
    return {
        **_write_hunyuan(model),
        **_MOE_ONLY,
        **experts.softmax_keys(model, *_WIDTHS),
        "moe_intermediate_size": model.expert_dim,
        "num_shared_expert": 1,
    }


HUNYUAN_V1_MOE_FAMILY = Family(
    "hunyuan_v1_moe",
    name_map(
        "hf-hunyuan-v1-moe", "HunYuanMoEV1ForCausalLM", *_DENSE_RULES,
        experts.ROUTER._replace(key=f"{HF_NAME}mlp.gate.wg.weight"), *experts.EXPERTS[1:],
        *experts.shared("shared_mlp"),
    ),
    {**_DEFAULTS, "num_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": None,
     "num_shared_expert": None, "routed_scaling_factor": None},
    summary="Hunyuan-A13B: as `hf-hunyuan-v1-dense`, with experts and a shared one in every layer",
    read=_read_hunyuan_moe,
    write=_write_hunyuan_moe,
    ranges={"num_experts_per_tok": lambda value: _COUNT(value) or list_of(_COUNT)(value)},
    only={**_MOE_ONLY, "mlp_bias": False},
    names={"moe_topk": "num_experts_per_tok"},
    aliases={"num_experts_per_tok": "num_experts_per_tok", "num_local_experts": "num_experts"},
    unused=(*_V1_UNUSED, *experts.LOSSES),
)  # fmt: skip


# Hunyuan 3 (Hy3).

_SIZES = ("num_experts", "moe_intermediate_size")
_ONLY: Mapping[str, Any] = {
    "moe_router_enable_expert_bias": True, "moe_router_use_sigmoid": True, "qk_norm": True,
    "route_norm": True,
}  # fmt: skip
"""Keys that the code of the published files reads, and transformers does not."""
_HY_V3_RULES = (
    *LLAMA,
    *QK_NORMS,
    *ATTENTION_BIASES,
    experts.ROUTER._replace(key=f"{HF_NAME}mlp.router.gate.weight"),
    *experts.EXPERTS[1:],
    Rule(f"{NAME}mlp.router.expert_bias", f"{HF_NAME}mlp.expert_bias"),
    *experts.shared("shared_mlp"),
    *PREDICTION[:-1],
    PREDICTION[-1]._replace(key=f"{HF_NAME}final_layernorm.weight"),
)


def _read_hy_v3(c: Config, where: str) -> Table:
    n_layers = c["num_hidden_layers"]
    kinds = c["mlp_layer_types"] or [experts.DENSE, *[experts.SPARSE_LAYER] * (n_layers - 1)]
    if len(kinds) < n_layers:
        raise UserError(f"{where}: mlp_layer_types has {len(kinds)} of {n_layers} layers")
    sparse = [i for i in range(n_layers) if kinds[i] == experts.SPARSE_LAYER]
    table = common.llama(c, where) | experts.chosen_layers(sparse, c, where)
    implied = {"first_k_dense_replace": sparse[0], "expert_hidden_dim": c["moe_intermediate_size"]}
    _check_published(c, implied, where)
    # Hy3 divides by the sum of the chosen weights and has no key for it.
    table |= experts.softmax({**c, "norm_topk_prob": True}, *_SIZES)
    return table | {
        "qk_norm": True,
        "qk_norm_eps": c["rms_norm_eps"],
        "moe_router": "sigmoid_topk",
        "moe_bias_update": "sign",
        "moe_routed_scaling": c["router_scaling_factor"],
        "moe_shared_experts": c["num_shared_experts"],
        "moe_shared_expert_dim": c["num_shared_experts"] * c["moe_intermediate_size"],
    }


def _write_hy_v3(model: ModelConfig) -> Table:
    keys = {
        **common.llama_keys(model),
        **experts.softmax_keys(model, *_SIZES),
        **_ONLY,
        "attention_bias": model.qkv_bias and model.o_bias,
        "router_scaling_factor": model.moe_routed_scaling,
        "num_shared_experts": model.shared_expert_dim // model.expert_dim,
        **experts.listed_layer_keys(model),
        "first_k_dense_replace": model.has_experts.index(True),
        "expert_hidden_dim": model.expert_dim,
        "num_nextn_predict_layers": model.mtp_depth,
    }
    return {key: value for key, value in keys.items() if key != "norm_topk_prob"}


HY_V3_FAMILY = Family(
    "hy_v3",
    name_map("hf-hy-v3", "HYV3ForCausalLM", *_HY_V3_RULES),
    {**COMMON, "initializer_range": 0.006, "rms_norm_eps": 1e-5, "rope_theta": 11158840.0,
     "num_key_value_heads": 8, "head_dim": 128, "attention_bias": False, "num_experts": 192,
     "num_experts_per_tok": 8, "num_shared_experts": 1, "moe_intermediate_size": 1536,
     "router_scaling_factor": 2.826, "mlp_layer_types": None, "first_k_dense_replace": None,
     "expert_hidden_dim": None, "num_nextn_predict_layers": 0},
    summary="Hunyuan 3 (Hy3-preview): DeepSeek-V3's router without groups, and its experts; Qwen "
            "3's attention",
    read=_read_hy_v3,
    write=_write_hy_v3,
    ranges={
        "mlp_layer_types": list_of(
            lambda value: value in (experts.DENSE, experts.SPARSE_LAYER)
        ),
        "first_k_dense_replace": LAYER,
    },
    only={**_ONLY, "mlp_bias": False},
    aliases={"num_local_experts": "num_experts"},
    # Precisions and kernels, which are settings of a run.
    unused=("enable_attention_fp32_softmax", "enable_lm_head_fp32", "enable_moe_fp32_combine",
            "use_grouped_mm", *experts.LOSSES),
    further_layers_key="num_nextn_predict_layers",
    float32=experts.FLOAT32,
)  # fmt: skip
