"""Qwen 3 (arXiv:2505.09388): norms of queries and keys per head."""

from torch_compat.families import common
from torch_compat.families.common import COMMON
from torch_compat.families.family import (
    ATTENTION_BIASES,
    LLAMA,
    QK_NORMS,
    Config,
    Family,
    Table,
    name_map,
)
from torch_compat.families.qwen2 import WINDOW_DEFAULTS, window_keys, windows


def _read(c: Config, where: str) -> Table:
    norms = {"qk_norm": True, "qk_norm_eps": c["rms_norm_eps"]}
    return common.llama(c, where) | norms | windows(c, where)


FAMILY = Family(
    "qwen3",
    name_map("hf-qwen3", "Qwen3ForCausalLM", *LLAMA, *QK_NORMS, *ATTENTION_BIASES),
    {**COMMON, **WINDOW_DEFAULTS, "num_key_value_heads": 32, "head_dim": 128,
     "attention_bias": False},
    read=_read,
    write=lambda model: {
        **common.llama_keys(model), **window_keys(model),
        "attention_bias": model.qkv_bias and model.o_bias,
    },
)  # fmt: skip
