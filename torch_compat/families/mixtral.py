"""Mixtral (arXiv:2401.04088): Mistral with experts. The table alone: experts are not built yet."""

from torch_compat.families.common import COMMON, everywhere, llama, llama_keys, window_keys
from torch_compat.families.family import (
    ATTENTION,
    OURS,
    OUTSIDE,
    PRE_NORMS,
    THEIRS,
    Config,
    Family,
    Table,
    name_map,
)
from torch_compat.names.table import Rule

_MOE = f"{THEIRS}block_sparse_moe."
_EXPERTS = (
    Rule(f"{OURS}mlp.router.gate.weight", f"{_MOE}gate.weight"),
    *(
        Rule(f"{OURS}mlp.experts.{{j}}.{ours}_proj.weight", f"{_MOE}experts.{{j}}.{w}.weight")
        for ours, w in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
    ),
)


def _read(c: Config, where: str) -> Table:
    experts = {"num_experts": c["num_local_experts"], "moe_top_k": c["num_experts_per_tok"]}
    return llama(c, where) | experts | everywhere(c, where)


FAMILY = Family(
    "mixtral",
    name_map("hf-mixtral", "MixtralForCausalLM", *OUTSIDE, *PRE_NORMS, *ATTENTION, *_EXPERTS),
    {**COMMON, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
     "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    read=_read,
    write=lambda model: {
        **llama_keys(model), **window_keys(model), "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.moe_top_k,
    },
    unused=("max_window_layers", "use_sliding_window", "output_router_logits",
            "router_aux_loss_coef", "router_jitter_noise"),
)  # fmt: skip
