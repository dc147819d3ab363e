"""Llama 2 and 3 (arXiv:2307.09288, 2407.21783), with every scaling of rotary positions."""

from torch_compat.families.common import BIASES, COMMON, bias_keys, llama, llama_keys
from torch_compat.families.family import (
    ATTENTION_BIASES,
    GATED_BIASES,
    LLAMA,
    Family,
    name_map,
)

FAMILY = Family(
    "llama",
    name_map("hf-llama", "LlamaForCausalLM", *LLAMA, *ATTENTION_BIASES, *GATED_BIASES),
    {**COMMON, **BIASES},
    read=llama,
    write=lambda model: {**llama_keys(model), **bias_keys(model)},
    unused=("is_llama_config", "max_sequence_length", "max_window_layers", "pretraining_tp"),
    requires_head_divisor=True,
)
