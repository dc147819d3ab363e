"""Families of Hugging Face's transformers: `config.json` and parameter names, one file each."""

import importlib

from torch_compat.families.family import Family
from torch_compat.families.unsupported import RETIRED_FAMILIES, UNSUPPORTED_FAMILIES

__all__ = ["FAMILIES", "RETIRED_FAMILIES", "UNSUPPORTED_FAMILIES", "Family"]

_MODULES = (
    "llama", "mistral", "qwen2", "qwen3", "smollm3", "olmo2", "olmo3", "gemma", "gemma2", "gemma3",
    "granite", "phi3", "stablelm", "gpt_neox", "gpt2", "starcoder2", "arcee", "mixtral",
    "glm", "glm4", "cohere", "cohere2", "ernie4_5", "nemotron",
    "qwen2_moe", "qwen3_moe", "olmoe", "dots1", "glm4_moe", "gpt_oss", "llama4_text",
    "qwen3_next", "qwen3_5", "qwen3_5_moe", "ernie4_5_moe",
    "granitemoe", "granitemoeshared", "bamba", "granitemoehybrid", "nemotron_h",
    "deepseek_v3", "deepseek_v2", "kimi_k2",
)  # fmt: skip
"""Modules of this package in order of preference: an export uses the first matching family."""

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (importlib.import_module(f"{__name__}.{name}").FAMILY for name in _MODULES)
}
"""`model_type` of config.json -> family."""
