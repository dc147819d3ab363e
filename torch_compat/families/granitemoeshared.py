"""Granite 3 with experts and a shared expert, whose gate and up are one tensor."""

from jaxforge.config.model import ModelConfig
from torch_compat.families import experts, granitemoe
from torch_compat.families.family import OURS, THEIRS, Config, Family, Table, fused, name_map
from torch_compat.families.phi3 import consecutive_rows
from torch_compat.names.table import Rule

WIDTH = "shared_intermediate_size"
_SHARED = f"{THEIRS}shared_mlp."
_OURS = f"{OURS}mlp.shared_expert."
SHARED = (
    *fused(
        (f"{_OURS}gate_proj.weight", f"{_OURS}up_proj.weight"),
        f"{_SHARED}input_linear.weight",
        lambda m: consecutive_rows(m.shared_expert_dim, m.shared_expert_dim),
        optional=True,
    ),
    Rule(f"{_OURS}down_proj.weight", f"{_SHARED}output_linear.weight", optional=True),
)


def read(c: Config, where: str) -> Table:
    """Read a model with experts in every layer, and a shared expert unless its width is 0."""
    shared = {"moe_shared_experts": 1, "moe_shared_expert_dim": c[WIDTH]} if c[WIDTH] else {}
    return granitemoe.read(c, where) | shared


def write(model: ModelConfig) -> Table:
    """Return the keys that `read` reads."""
    return {**granitemoe.write(model), WIDTH: model.shared_expert_dim}


FAMILY = Family(
    "granitemoeshared",
    name_map(
        "hf-granitemoeshared", "GraniteMoeSharedForCausalLM", *granitemoe.RULES, *SHARED,
        renamed=granitemoe.RENAMED,
    ),
    {**granitemoe.DEFAULTS, WIDTH: 0},
    read=read,
    write=write,
    unused=experts.LOSSES,
)  # fmt: skip
