"""Gemma 2 (arXiv:2408.00118): sandwich norms, soft caps, a window in every second layer."""

from jaxforge.config.model import ModelConfig
from torch_compat.families import common, gemma
from torch_compat.families.common import FULL, SLIDING
from torch_compat.families.family import (
    ATTENTION,
    ATTENTION_BIASES,
    GATED,
    OUTSIDE,
    SANDWICH_NORMS,
    Config,
    Family,
    Table,
    name_map,
)

RULES = (*OUTSIDE, *ATTENTION, *SANDWICH_NORMS, *GATED, *ATTENTION_BIASES)
UNUSED = ("cache_implementation", "hidden_act", "sliding_window_size")


def read(c: Config, where: str) -> Table:
    """Read the keys that Gemma 2 and 3 share."""
    table = gemma.read(c, where) | common.scale(c["query_pre_attn_scalar"] ** -0.5, c)
    caps = {"attn_logit_softcap": "attn_logit_softcapping",
            "final_logit_softcap": "final_logit_softcapping"}  # fmt: skip
    table |= {ours: c[theirs] for ours, theirs in caps.items() if c[theirs] is not None}
    return {**table, "norm_placement": "sandwich"}


def write(model: ModelConfig) -> Table:
    """Return the keys that `read` reads."""
    scale = model.attention_scale or model.head_size**-0.5
    return {
        **gemma.write(model),
        "query_pre_attn_scalar": round(scale**-2),
        "attn_logit_softcapping": model.attn_logit_softcap,
        "final_logit_softcapping": model.final_logit_softcap,
        "sliding_window": model.sliding_window or model.max_seq_len,
        "layer_types": common.layer_kinds(model),
    }


def _read(c: Config, where: str) -> Table:
    every_second = [FULL if i % 2 else SLIDING for i in range(c["num_hidden_layers"])]
    kinds = common.windows(c, c["layer_types"] or every_second, where)
    return read(c, where) | common.rotary(c, where) | kinds


FAMILY = Family(
    "gemma2",
    name_map("hf-gemma2", "Gemma2ForCausalLM", *RULES),
    {**gemma.DEFAULTS, "num_key_value_heads": 4, "query_pre_attn_scalar": 256,
     "sliding_window": 4096, "layer_types": None, "attn_logit_softcapping": 50.0,
     "final_logit_softcapping": 30.0},
    read=_read,
    write=lambda model: {**write(model), **common.rotary_keys(model)},
    only=gemma.ONLY,
    unused=UNUSED,
    requires_head_divisor=True,
)  # fmt: skip
