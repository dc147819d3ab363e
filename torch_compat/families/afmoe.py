"""Arcee's Trinity: Gemma's norms, DeepSeek-V3's experts, gated attention."""

from jaxforge.config.model import ModelConfig
from torch_compat.families import common, experts
from torch_compat.families.common import COMMON, FULL, SLIDING
from torch_compat.families.family import (
    ATTENTION,
    GATED,
    HF_NAME,
    NAME,
    OUTSIDE,
    QK_NORMS,
    Config,
    Family,
    Table,
    name_map,
)
from torch_compat.names.table import Rule

_RENAMED = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_mlp_layernorm",
    "mlp_post_norm": "post_mlp_layernorm",
    "attention.gate_proj": "self_attn.gate_proj",
    "mlp.router.gate": "mlp.router.gate",
}
_RULES = (
    *OUTSIDE,
    *ATTENTION,
    *QK_NORMS,
    *GATED,
    *(Rule(f"{NAME}{name}.weight", f"{HF_NAME}{key}.weight") for name, key in _RENAMED.items()),
    *(rule for rule in experts.EXPERTS if rule != experts.ROUTER),
    Rule(f"{NAME}mlp.router.expert_bias", f"{HF_NAME}mlp.expert_bias"),
    *experts.shared("shared_experts"),
)
_NAMES = {
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "num_dense_layers": "first_k_dense_replace",
    "route_scale": "routed_scaling_factor",
    "global_attn_every_n_layers": "sliding_window_pattern",
}
_ROUTER = {"norm_topk_prob": True, "n_group": 1, "topk_group": 1}
"""DeepSeek-V3's keys of which the family has one value."""


def _read(c: Config, where: str) -> Table:
    kinds = common.sliding_kinds(c)
    table = common.llama(c, where) | experts.sigmoid({**c, **_ROUTER}, where)
    table |= common.windows(c, kinds, where) | {
        "norm_placement": "sandwich",
        "qk_norm": True,
        "qk_norm_eps": c["rms_norm_eps"],
        "attention_output_gate": True,
    }
    if c["mup_enabled"]:
        table["embedding_multiplier"] = c["hidden_size"] ** 0.5
    pattern = [kind == SLIDING for kind in kinds]
    return table if all(pattern) else {**table, "rope_pattern": pattern}


def _write(model: ModelConfig) -> Table:
    keys = {
        **common.llama_keys(model),
        **experts.sigmoid_keys(model),
        # A window as long as the longest sequence has no effect.
        "sliding_window": model.sliding_window or model.max_seq_len,
        "layer_types": [FULL if rope is None else SLIDING for rope in model.ropes],
        "mup_enabled": model.embedding_multiplier != 1,
    }
    return {key: value for key, value in keys.items() if key not in _ROUTER}


AFMOE_FAMILY = Family(
    "afmoe",
    name_map("hf-afmoe", "AfmoeForCausalLM", *_RULES),
    {**COMMON, "rms_norm_eps": 1e-5, "head_dim": 128, "moe_intermediate_size": 1408,
     "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2,
     "first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "sliding_window": 1024,
     "sliding_window_pattern": 4, "layer_types": None, "mup_enabled": False},
    summary="Arcee's Trinity: sandwich norms, q/k norms, gated attention, positions only in layers "
            "with a window; DeepSeek-V3's router and experts",
    read=_read,
    write=_write,
    # With biases of q, k and v, gates would have one, too.
    only={**_ROUTER, "route_norm": True, "score_func": "sigmoid", "num_expert_groups": 1,
          "num_limited_groups": 1, "attention_bias": False},
    names=_NAMES,
    unused=("load_balance_coeff", "use_grouped_mm", "output_router_logits"),
    float32={"float16": r"(.*_)?norm\.weight"},
)  # fmt: skip
