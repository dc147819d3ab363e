"""Qwen 3 with experts (arXiv:2505.09388), in every layer or in some."""

from jaxforge.config.model import ModelConfig
from torch_compat.families import common, experts
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

_SIZES = ("num_experts", "moe_intermediate_size")


def _read(c: Config, where: str) -> Table:
    table = common.llama(c, where) | {"qk_norm": True, "qk_norm_eps": c["rms_norm_eps"]}
    windows = common.uniform_window(c, where) if c["use_sliding_window"] else {}
    return table | windows | experts.softmax(c, *_SIZES) | experts.sparse(c, where)


def _write(model: ModelConfig) -> Table:
    return {
        **common.llama_keys(model),
        **common.window_keys(model),
        **experts.softmax_keys(model, *_SIZES),
        **experts.sparse_keys(model),
        "use_sliding_window": any(model.windows),
        "attention_bias": model.qkv_bias and model.o_bias,
    }


FAMILY = Family(
    "qwen3_moe",
    name_map(
        "hf-qwen3-moe", "Qwen3MoeForCausalLM", *LLAMA, *experts.EXPERTS, *QK_NORMS,
        *ATTENTION_BIASES,
    ),
    {**COMMON, **experts.SOFTMAX, **experts.SPARSE, "num_key_value_heads": 4,
     "attention_bias": False, "use_sliding_window": False, "sliding_window": 4096,
     "num_experts": 128, "moe_intermediate_size": 768},
    read=_read,
    write=_write,
    aliases={"num_local_experts": "num_experts"},
    unused=("max_window_layers", *experts.LOSSES),
)  # fmt: skip
