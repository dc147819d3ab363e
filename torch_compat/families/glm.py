"""GLM-4 9B (arXiv:2406.12793): rotary positions of neighbouring channels, half of a head."""

from jaxforge.config.model import ModelConfig
from torch_compat.families import common
from torch_compat.families.common import COMMON
from torch_compat.families.family import (
    OURS,
    OUTSIDE,
    PAIRED_ATTENTION,
    PRE_NORMS,
    THEIRS,
    Config,
    Family,
    Table,
    fused,
    name_map,
)
from torch_compat.families.phi3 import consecutive_rows
from torch_compat.names.table import Rule

PROJECTIONS = (
    *(rule for rule in PAIRED_ATTENTION if not rule.name.endswith("o_proj.bias")),
    *fused(
        tuple(f"{OURS}mlp.{m}_proj.weight" for m in ("gate", "up")),
        f"{THEIRS}mlp.gate_up_proj.weight",
        lambda model: consecutive_rows(model.ffn_dim, model.ffn_dim),
    ),
    Rule(f"{OURS}mlp.down_proj.weight", f"{THEIRS}mlp.down_proj.weight"),
)
"""Rules of attention and feed-forward."""
DEFAULTS = {
    **COMMON, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-07,
    "attention_bias": True, "partial_rotary_factor": None,
}  # fmt: skip


def read(c: Config, where: str) -> Table:
    """Read a model without the placement of its norms."""
    table = common.shape(c) | common.feed_forward(c, where)
    table |= common.rotary(c, where, partial=0.5)
    return {**table, "qkv_bias": True} if c["attention_bias"] else table


def write(model: ModelConfig) -> Table:
    """Return the keys that `read` reads."""
    keys = {**common.llama_keys(model), **common.rotary_keys(model, partial=True)}
    return {**keys, "attention_bias": model.qkv_bias}


FAMILY = Family(
    "glm",
    name_map("hf-glm", "GlmForCausalLM", *OUTSIDE, *PRE_NORMS, *PROJECTIONS),
    DEFAULTS,
    read=read,
    write=write,
)
