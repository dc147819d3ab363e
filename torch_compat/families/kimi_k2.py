"""Kimi K2 (arXiv:2507.20534): DeepSeek-V3's architecture under another `model_type`."""

from torch_compat.families import deepseek_v3
from torch_compat.families.family import Family, name_map

FAMILY = Family(
    "kimi_k2",
    name_map("hf-kimi-k2", "DeepseekV3ForCausalLM", *deepseek_v3.RULES),
    deepseek_v3.DEFAULTS,
    read=deepseek_v3.read,
    write=deepseek_v3.write,
    only=deepseek_v3.ONLY,
    aliases=deepseek_v3.FAMILY.aliases,
    unused=deepseek_v3.FAMILY.unused,
    further_layers_key=deepseek_v3.FAMILY.further_layers_key,
)
