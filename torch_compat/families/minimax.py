"""MiniMax M2."""

import reprlib
from collections.abc import Mapping
from typing import Any

from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from torch_compat.families import common, experts
from torch_compat.families.common import COMMON
from torch_compat.families.family import (
    ATTENTION,
    HF_NAME,
    NAME,
    OUTSIDE,
    PRE_NORMS,
    QK_NORMS,
    Config,
    Family,
    Table,
    name_map,
)
from torch_compat.families.values import integer, list_of, nullable
from torch_compat.names.table import Rule

_SIZES = ("num_local_experts", "intermediate_size")
_BIAS = Rule(f"{NAME}mlp.router.expert_bias", f"{HF_NAME}block_sparse_moe.e_score_correction_bias")
_FULL_ATTENTION = 1
"""Value in `attn_type_list`, which transformers ignores."""
_ONLY: Mapping[str, Any] = {
    "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True,
    "qk_norm_type": "per_layer", "shared_intermediate_size": 0,
}  # fmt: skip
"""Keys that the code of the published files reads, and transformers does not."""


def _read_minimax_m2(c: Config, where: str) -> Table:
    if set(c["attn_type_list"] or ()) - {_FULL_ATTENTION}:
        raise UserError(
            f"{where}: attn_type_list = {reprlib.repr(c['attn_type_list'])}: all layers must have "
            f"full attention ({_FULL_ATTENTION}) in this family"
        )
    share = 1.0 if c["rotary_dim"] is None else c["rotary_dim"] / common.head_size(c)
    table = common.shape(c) | common.rotary(c, where, partial=share)
    # MiniMax divides by the sum of the chosen weights and has no key for it.
    table |= experts.softmax({**c, "norm_topk_prob": True}, *_SIZES) | common.feed_forward(c, where)
    return table | {
        "moe_router": "sigmoid_topk",
        "moe_bias_update": "sign",
        "qk_norm": True,
        "qk_norm_scope": "projection",
        "qk_norm_eps": c["rms_norm_eps"],
    }


def _write_minimax_m2(model: ModelConfig) -> Table:
    keys = {
        **common.llama_keys(model),
        **common.rotary_keys(model, partial=True),
        **experts.softmax_keys(model, *_SIZES),
        **_ONLY,
        "rotary_dim": model.rotary_size,
        "attn_type_list": [_FULL_ATTENTION] * model.n_layers,
    }
    return {key: value for key, value in keys.items() if key != "norm_topk_prob"}


MINIMAX_M2_FAMILY = Family(
    "minimax_m2",
    name_map(
        "hf-minimax-m2", "MiniMaxM2ForCausalLM", *OUTSIDE, *PRE_NORMS, *ATTENTION, *QK_NORMS,
        *experts.BLOCK_SPARSE, _BIAS,
    ),
    {**COMMON, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5000000.0,
     "num_local_experts": 256, "num_experts_per_tok": 8, "rotary_dim": None,
     "partial_rotary_factor": None, "attn_type_list": None},
    summary="MiniMax M2: Mixtral's experts behind a sigmoid router with a bias for selection only; "
            "q/k norms over all heads, rotary positions in half of a head; weights in 8 bits",
    read=_read_minimax_m2,
    write=_write_minimax_m2,
    ranges={"rotary_dim": nullable(integer()), "attn_type_list": list_of(integer(0))},
    only={**_ONLY, "routed_scaling_factor": 1.0, "layernorm_full_attention_beta": 1.0,
          "layernorm_linear_attention_beta": 1.0, "layernorm_mlp_beta": 1.0},
    aliases={"num_experts": "num_local_experts"},
    unused=("max_model_len", "mlp_intermediate_size", "mtp_transformer_layers", "num_mtp_modules",
            "router_jitter_noise", "shared_moe_mode", "swa_rope_theta", "use_grouped_topk",
            "use_mtp", *experts.LOSSES),
)  # fmt: skip
