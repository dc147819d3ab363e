"""Arcee's AFM: Llama with an ungated feed-forward, as KempnerForge has with GELU or ReLU."""

from torch_compat.families import common
from torch_compat.families.common import BIASES, COMMON
from torch_compat.families.family import (
    ATTENTION,
    ATTENTION_BIASES,
    GATED,
    GATED_BIASES,
    OUTSIDE,
    PRE_NORMS,
    Config,
    Family,
    Table,
    name_map,
)

_MLP, _MLP_BIASES = GATED[1:], GATED_BIASES[1:]
_RULES = (*OUTSIDE, *PRE_NORMS, *ATTENTION, *ATTENTION_BIASES, *_MLP, *_MLP_BIASES)


def _read(c: Config, where: str) -> Table:
    table = common.shape(c) | common.rotary(c, where) | common.biases(c)
    return table | common.feed_forward(c, where, gated=False)


FAMILY = Family(
    "arcee",
    name_map("hf-arcee", "ArceeForCausalLM", *_RULES),
    {**COMMON, **BIASES, "rms_norm_eps": 1e-5, "hidden_act": "relu2"},
    read=_read,
    write=lambda model: {**common.llama_keys(model), **common.bias_keys(model)},
    requires_head_divisor=True,
)
