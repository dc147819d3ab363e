"""Tencent's Hunyuan models: Hy3."""

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
from torch_compat.families.values import LAYER, list_of
from torch_compat.names.table import Rule

# Hunyuan 3 (Hy3).

_DENSE, _SPARSE = "dense", "sparse"
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
    kinds = c["mlp_layer_types"] or [_DENSE, *[_SPARSE] * (n_layers - 1)]
    if len(kinds) < n_layers:
        raise UserError(f"{where}: mlp_layer_types has {len(kinds)} of {n_layers} layers")
    sparse = [i for i in range(n_layers) if kinds[i] == _SPARSE]
    table = common.llama(c, where) | experts.chosen_layers(sparse, c, where)
    # The code of the published files reads these keys, and transformers the others.
    published = {"first_k_dense_replace": sparse[0], "expert_hidden_dim": c[_SIZES[1]]}
    for key, value in published.items():
        if c[key] not in (None, value):
            raise UserError(
                f"{where}: {key} = {reprlib.repr(c[key])} contradicts the keys that transformers "
                f"reads, which mean {value}. Change one of them"
            )
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
        "mlp_layer_types": [_SPARSE if has else _DENSE for has in model.has_experts],
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
    summary="Hunyuan 3 (Hy3-preview): DeepSeek-V3's router without groups, and its experts; Qwen 3's "
            "attention",
    read=_read_hy_v3,
    write=_write_hy_v3,
    ranges={"mlp_layer_types": list_of(lambda value: value in (_DENSE, _SPARSE)),
            "first_k_dense_replace": LAYER},
    only={**_ONLY, "mlp_bias": False},
    aliases={"num_local_experts": "num_experts"},
    # Precisions and kernels, which are settings of a run.
    unused=("enable_attention_fp32_softmax", "enable_lm_head_fp32", "enable_moe_fp32_combine",
            "use_grouped_mm", *experts.LOSSES),
    further_layers_key="num_nextn_predict_layers",
    float32=experts.FLOAT32,
)  # fmt: skip
