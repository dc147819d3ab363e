"""Families of Hugging Face's transformers, one file each: `config.json` and parameter names."""

from torch_compat.families import (
    arcee,
    dots1,
    gemma,
    gemma2,
    gemma3,
    glm4_moe,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    llama,
    mistral,
    mixtral,
    olmo2,
    olmo3,
    olmoe,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    smollm3,
    stablelm,
    starcoder2,
)
from torch_compat.families.family import Family
from torch_compat.families.not_built import NOT_BUILT

__all__ = ["FAMILIES", "NOT_BUILT", "Family"]

FAMILIES: dict[str, Family] = {
    module.FAMILY.model_type: module.FAMILY
    for module in (
        llama, mistral, qwen2, qwen3, smollm3, olmo2, olmo3, gemma, gemma2, gemma3, granite, phi3,
        stablelm, gpt_neox, gpt2, starcoder2, arcee, mixtral, qwen2_moe, qwen3_moe, olmoe, dots1,
        glm4_moe, gpt_oss,
    )
}  # fmt: skip
"""`model_type` of config.json -> family. Of several that a model can be, an export takes the first.
"""
