"""Nemotron 3 and 4 and Minitron (arXiv:2402.16819): squared ReLU, LayerNorm with 1 + weight."""

from jaxforge.config.model import ModelConfig
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
from torch_compat.families.stablelm import NORM_BIASES

_RULES = (*OUTSIDE, *PRE_NORMS, *NORM_BIASES, *ATTENTION, *ATTENTION_BIASES, *GATED[1:],
          *GATED_BIASES[1:])  # fmt: skip


def _read(c: Config, where: str) -> Table:
    table = common.shape(c) | common.rotary(c, where, partial=0.5) | common.biases(c)
    table |= common.feed_forward(c, where, gated=False)
    return {**table, "norm_type": "layernorm", "norm_unit_offset": True}


def _write(model: ModelConfig) -> Table:
    keys = {**common.llama_keys(model), **common.rotary_keys(model, partial=True)}
    return {**keys, **common.bias_keys(model)}


FAMILY = Family(
    "nemotron",
    name_map("hf-nemotron", "NemotronForCausalLM", *_RULES),
    {**COMMON, **BIASES, "rms_norm_eps": 1e-5, "hidden_act": "relu2", "initializer_range": 0.0134,
     "partial_rotary_factor": None},
    read=_read,
    write=_write,
    names={"norm_eps": "rms_norm_eps"},
)  # fmt: skip
