"""Mistral (arXiv:2310.06825): a sliding window in every layer, or in none."""

from torch_compat.families.common import COMMON, llama, llama_keys, uniform_window, window_keys
from torch_compat.families.family import LLAMA, Family, name_map

FAMILY = Family(
    "mistral",
    name_map("hf-mistral", "MistralForCausalLM", *LLAMA),
    {**COMMON, "num_key_value_heads": 8, "sliding_window": 4096},
    read=lambda c, where: llama(c, where) | uniform_window(c, where),
    write=lambda model: {**llama_keys(model), **window_keys(model)},
    unused=("max_window_layers", "use_sliding_window"),
)
