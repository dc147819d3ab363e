"""Families of Hugging Face's transformers: `config.json` and parameter names.

Every module-level `Family` of a module of this package is a family: adding a file adds it.
"""

import importlib
import pkgutil

from torch_compat.families.family import Family

__all__ = ["FAMILIES", "RETIRED_FAMILIES", "UNSUPPORTED_FAMILIES", "Family"]


def discover() -> dict[str, Family]:
    """Return the families of all modules of this package by `model_type`.

    An export uses the first family that fits the model: usual families come first, then the order
    is that of modules by name and of definitions in a module.
    """
    modules = sorted(module.name for module in pkgutil.iter_modules(__path__))
    families = [
        value
        for name in modules
        for value in vars(importlib.import_module(f"{__name__}.{name}")).values()
        if isinstance(value, Family)
    ]
    return {each.model_type: each for each in sorted(families, key=lambda each: not each.is_usual)}


FAMILIES = discover()
"""`model_type` of config.json -> family."""

_SPARSE = "attention to keys that an indexer chooses"
_STATE_SPACE = "state-space or recurrent layers"
_ENCODER = "an encoder, with bidirectional attention"
_PAIR = "an encoder and a decoder"
_MEDIA = "an encoder of images or sound"
_ALIBI = "ALiBi"
_FORMER = "the names and layouts of an outdated format"

UNSUPPORTED_FAMILIES: dict[str, str] = {
    model_type: what
    for what, types in {
        _SPARSE: "deepseek_v32 glm_moe_dsa",
        "two attentions and experts without weights in a layer": "longcat_flash",
        "latent attention with scaled embeddings and depth": "minicpm3",
        _STATE_SPACE: "mamba mamba2 falcon_mamba falcon_h1 jamba zamba zamba2 "
        "recurrent_gemma rwkv xlstm lfm2 plamo2",
        _ENCODER: "bert roberta xlm-roberta distilbert albert electra deberta deberta-v2 "
        "modernbert nomic_bert xlnet camembert longformer",
        _PAIR: "t5 mt5 umt5 bart mbart pegasus marian blenderbot led m2m_100 nllb-moe t5gemma",
        "a router by SparseMixer": "phimoe",
        "linear attention": "minimax",
        "clipped queries, keys and values, and experts in one tensor": "dbrx",
        "norms of queries and keys after their rotation": "hunyuan_v1_moe",
        "experts in attention": "jetmoe",
        _MEDIA: "gemma3 gemma3n llama4 llava llava_next qwen2_vl qwen2_5_vl qwen3_vl qwen3_5 "
        "qwen3_5_moe mllama "
        "paligemma idefics3 smolvlm mistral3 pixtral phi4_multimodal whisper internvl",
        _ALIBI: "baichuan",
        _FORMER: "codegen chatglm",
        "learned positions with an offset of 2": "opt",
    }.items()
    for model_type in types.split()
}
"""`model_type` -> feature that jaxforge lacks."""

RETIRED_FAMILIES = frozenset({"bloom", "falcon", "gptj", "mpt", "phi"})
"""`model_type` of families that earlier versions of jaxforge supported."""
