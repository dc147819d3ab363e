"""OLMo 2 (arXiv:2501.00656): post-norms, and norms over all queries and keys at once."""

from jaxforge.config.model import ModelConfig
from torch_compat.families import common
from torch_compat.families.common import COMMON
from torch_compat.families.family import (
    ATTENTION,
    ATTENTION_BIASES,
    GATED,
    OUTSIDE,
    POST_NORMS,
    QK_NORMS,
    Config,
    Family,
    Table,
    name_map,
)

RULES = (*OUTSIDE, *ATTENTION, *QK_NORMS, *POST_NORMS, *GATED, *ATTENTION_BIASES)
DEFAULTS = {**COMMON, "rms_norm_eps": 1e-5, "attention_bias": False}


def norms(c: Config) -> Table:
    """Return the settings of norms."""
    return {"norm_placement": "post", "qk_norm": True, "qk_norm_scope": "projection",
            "qk_norm_eps": c["rms_norm_eps"]}  # fmt: skip


def keys(model: ModelConfig) -> Table:
    """Return the keys that do not depend on layers."""
    bias = model.qkv_bias and model.o_bias
    return {**common.llama_keys(model), "attention_bias": bias}


FAMILY = Family(
    "olmo2",
    name_map("hf-olmo2", "Olmo2ForCausalLM", *RULES),
    DEFAULTS,
    read=lambda c, where: common.llama(c, where) | norms(c),
    write=keys,
)
