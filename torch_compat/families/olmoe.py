"""OLMoE (arXiv:2409.02060): experts in every layer, norms of all queries and keys at once."""

from jaxforge.config.model import ModelConfig
from torch_compat.families import common, experts
from torch_compat.families.common import COMMON
from torch_compat.families.family import (
    ATTENTION,
    ATTENTION_BIASES,
    OUTSIDE,
    PRE_NORMS,
    QK_NORMS,
    Config,
    Family,
    Table,
    name_map,
)

_SIZES = ("num_experts", "intermediate_size")


def _read(c: Config, where: str) -> Table:
    common.check_usual_heads(c, where)
    norms = {"qk_norm": True, "qk_norm_scope": "projection", "qk_norm_eps": c["rms_norm_eps"]}
    clip = {} if c["clip_qkv"] is None else {"clip_qkv": c["clip_qkv"]}
    return common.llama(c, where) | norms | clip | experts.softmax(c, *_SIZES)


def _write(model: ModelConfig) -> Table:
    keys = {**common.llama_keys(model), **experts.softmax_keys(model, *_SIZES)}
    return {**keys, "attention_bias": model.qkv_bias and model.o_bias, "clip_qkv": model.clip_qkv}


FAMILY = Family(
    "olmoe",
    name_map(
        "hf-olmoe", "OlmoeForCausalLM", *OUTSIDE, *PRE_NORMS, *ATTENTION, *QK_NORMS,
        *experts.EXPERTS, *ATTENTION_BIASES,
    ),
    {**COMMON, **experts.SOFTMAX, "rms_norm_eps": 1e-5, "attention_bias": False, "num_experts": 64,
     "clip_qkv": None},
    read=_read,
    write=_write,
    unused=experts.LOSSES,
)  # fmt: skip
