"""Granite 3 with experts: Granite's multipliers, and the experts of a layer in one tensor.

`input_linear` holds gate and up of all experts, [experts, 2 x width, model width].
"""

from jaxforge.config.model import ModelConfig
from torch_compat.families import common, experts
from torch_compat.families.common import COMMON
from torch_compat.families.family import (
    ATTENTION,
    ATTENTION_BIASES,
    OURS,
    OUTSIDE,
    PRE_NORMS,
    THEIRS,
    Config,
    Family,
    Table,
    fused,
    name_map,
)
from torch_compat.families.granite import MULTIPLIERS, multiplier_keys, multipliers
from torch_compat.families.phi3 import consecutive_rows
from torch_compat.names.table import Rule

_MOE = f"{THEIRS}block_sparse_moe."
_GATE_UP = tuple(f"{OURS}mlp.experts.{{j}}.{m}_proj.weight" for m in ("gate", "up"))
EXPERTS = (
    Rule(f"{OURS}mlp.router.gate.weight", f"{_MOE}router.layer.weight"),
    *fused(
        _GATE_UP,
        f"{_MOE}input_linear.weight",
        lambda m: consecutive_rows(m.expert_dim, m.expert_dim),
    ),
    Rule(f"{OURS}mlp.experts.{{j}}.down_proj.weight", f"{_MOE}output_linear.weight"),
)
RULES = (*OUTSIDE, *PRE_NORMS, *ATTENTION, *ATTENTION_BIASES, *EXPERTS)
RENAMED = tuple(
    (rf"block_sparse_moe\.{new}$", f"block_sparse_moe.{old}.weight")
    for new, old in (
        (r"experts\.gate_up_proj", "input_linear"),
        (r"experts\.down_proj", "output_linear"),
        (r"router\.weight", "router.layer"),
    )
)
"""Names in the memory of transformers 5 -> names in its files."""
DEFAULTS = {
    **COMMON, **MULTIPLIERS, "attention_bias": False, "num_local_experts": 8,
    "num_experts_per_tok": 2,
}  # fmt: skip
SIZES = ("num_local_experts", "intermediate_size")


def read(c: Config, where: str) -> Table:
    """Read a model with experts in every layer."""
    routed = experts.softmax({**c, "norm_topk_prob": True}, *SIZES)
    return common.llama(c, where) | multipliers(c) | routed


def write(model: ModelConfig) -> Table:
    """Return the keys that `read` reads."""
    keys = {
        **common.llama_keys(model),
        **experts.softmax_keys(model, *SIZES),
        **multiplier_keys(model),
        "attention_bias": model.qkv_bias and model.o_bias,
    }
    return {key: value for key, value in keys.items() if key != "norm_topk_prob"}


FAMILY = Family(
    "granitemoe",
    name_map("hf-granitemoe", "GraniteMoeForCausalLM", *RULES, renamed=RENAMED),
    DEFAULTS,
    read=read,
    write=write,
    unused=experts.LOSSES,
)
