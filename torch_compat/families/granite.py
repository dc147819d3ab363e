"""Granite 3: Llama with multipliers of embeddings, residuals, scores and logits."""

from jaxforge.config.model import ModelConfig
from torch_compat.families import common
from torch_compat.families.common import BIASES, COMMON
from torch_compat.families.family import (
    ATTENTION_BIASES,
    GATED_BIASES,
    LLAMA,
    Config,
    Family,
    Table,
    name_map,
)

_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")


def multipliers(c: Config) -> Table:
    """Read the multipliers of embeddings, residuals, scores and logits."""
    given = {key: float(c[key]) for key in _MULTIPLIERS if c[key] != 1}
    return given | common.scale(c["attention_multiplier"], c)


def multiplier_keys(model: ModelConfig) -> Table:
    """Return the keys that `multipliers` reads."""
    return {
        **{key: getattr(model, key) for key in _MULTIPLIERS},
        "attention_multiplier": model.attention_scale or model.head_size**-0.5,
    }


MULTIPLIERS = {**dict.fromkeys(_MULTIPLIERS, 1.0), "attention_multiplier": 1.0}
"""Keys of multipliers and their defaults in transformers."""


def _read(c: Config, where: str) -> Table:
    return common.llama(c, where) | multipliers(c)


def _write(model: ModelConfig) -> Table:
    return {**common.llama_keys(model), **common.bias_keys(model), **multiplier_keys(model)}


FAMILY = Family(
    "granite",
    name_map("hf-granite", "GraniteForCausalLM", *LLAMA, *ATTENTION_BIASES, *GATED_BIASES),
    {**COMMON, **BIASES, **MULTIPLIERS},
    read=_read,
    write=_write,
)
