"""Qwen 3 with experts. The table alone: experts are not built yet."""

from torch_compat.families import common
from torch_compat.families.common import COMMON
from torch_compat.families.family import (
    LLAMA,
    OURS,
    QK_NORMS,
    THEIRS,
    Config,
    Family,
    Table,
    name_map,
)
from torch_compat.families.qwen2 import WINDOWED, window_keys, windows
from torch_compat.names.table import Rule

_EXPERTS = (
    Rule(f"{OURS}mlp.router.gate.weight", f"{THEIRS}mlp.gate.weight"),
    *(
        Rule(
            f"{OURS}mlp.experts.{{j}}.{m}_proj.weight",
            f"{THEIRS}mlp.experts.{{j}}.{m}_proj.weight",
        )
        for m in ("gate", "up", "down")
    ),
)


def _read(c: Config, where: str) -> Table:
    experts = {"num_experts": c["num_experts"], "moe_top_k": c["num_experts_per_tok"]}
    norms = {"qk_norm": True, "qk_norm_eps": c["rms_norm_eps"]}
    return common.llama(c, where) | norms | experts | windows(c, where)


FAMILY = Family(
    "qwen3_moe",
    name_map("hf-qwen3-moe", "Qwen3MoeForCausalLM", *LLAMA, *_EXPERTS, *QK_NORMS),
    {**COMMON, **WINDOWED, "num_key_value_heads": 4, "max_window_layers": 0, "num_experts": 128,
     "num_experts_per_tok": 8},
    read=_read,
    write=lambda model: {
        **common.llama_keys(model), **window_keys(model), "num_experts": model.num_experts,
        "num_experts_per_tok": model.moe_top_k,
    },
    names={"num_local_experts": "num_experts"},
    unused=("decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size", "norm_topk_prob",
            "output_router_logits", "router_aux_loss_coef"),
)  # fmt: skip
