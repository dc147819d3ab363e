"""ERNIE 4.5 dense models: Llama with rotary positions of neighbouring channels."""

from jaxforge.config.model import ModelConfig
from torch_compat.families import common
from torch_compat.families.common import COMMON
from torch_compat.families.family import (
    GATED,
    GATED_BIASES,
    OUTSIDE,
    PAIRED_ATTENTION,
    PRE_NORMS,
    Config,
    Family,
    Table,
    name_map,
)

RULES = (*OUTSIDE, *PRE_NORMS, *PAIRED_ATTENTION, *GATED)
DEFAULTS = {**COMMON, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True,
            "use_bias": False}  # fmt: skip


def _read(c: Config, where: str) -> Table:
    table = common.shape(c) | common.rotary(c, where) | common.feed_forward(c, where)
    return table | common.biases({"attention_bias": c["use_bias"], "mlp_bias": c["use_bias"]})


def _write(model: ModelConfig) -> Table:
    biases = (model.qkv_bias, model.o_bias, model.mlp_bias)
    return {**common.llama_keys(model), "use_bias": all(biases)}


FAMILY = Family(
    "ernie4_5",
    name_map("hf-ernie4-5", "Ernie4_5ForCausalLM", *RULES, *GATED_BIASES),
    {**DEFAULTS, "num_key_value_heads": 2, "head_dim": 128},
    read=_read,
    write=_write,
)
