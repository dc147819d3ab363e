"""Text models of Qwen 3.5 with experts in every layer."""

from jaxforge.config.model import ModelConfig
from torch_compat.families import experts, qwen3_5
from torch_compat.families.common import COMMON
from torch_compat.families.family import Config, Family, Table, name_map
from torch_compat.families.qwen3_next import (
    EXPERT_DEFAULTS,
    EXPERT_RULES,
    LAYER_DEFAULTS,
    LEFT_OUT,
    expert_keys,
    layer_keys,
    read_experts,
)


def _read(c: Config, where: str) -> Table:
    selected = {**c, "norm_topk_prob": True}  # the weights of a token's experts always add up to 1
    return qwen3_5.read(c, where) | read_experts(selected)


def _write(model: ModelConfig) -> Table:
    keys = {**layer_keys(model), **expert_keys(model)}
    del keys["norm_topk_prob"]
    return keys


FAMILY = Family(
    "qwen3_5_moe_text",
    name_map(
        "hf-qwen3-5-moe", "Qwen3_5MoeForCausalLM", *qwen3_5.RULES, *EXPERT_RULES,
        optional_groups=LEFT_OUT,
    ),
    {**COMMON, **LAYER_DEFAULTS, **EXPERT_DEFAULTS, "num_key_value_heads": 2, "num_experts": 256,
     "num_experts_per_tok": 8, "intermediate_size": 512},
    read=_read,
    write=_write,
    only=qwen3_5.ONLY,
    aliases={"num_local_experts": "num_experts"},
    unused=(*qwen3_5.UNUSED, *experts.LOSSES),
)  # fmt: skip
