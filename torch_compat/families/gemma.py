"""Gemma (arXiv:2403.08295): norms with 1 + w, scaled embeddings, GeGLU."""

from typing import Any

from jaxforge.config.model import ModelConfig
from torch_compat.families import common
from torch_compat.families.common import COMMON
from torch_compat.families.family import ATTENTION_BIASES, LLAMA, Config, Family, Table, name_map

DEFAULTS: dict[str, Any] = {
    **{key: value for key, value in COMMON.items() if key != "hidden_act"},
    "hidden_activation": "gelu_pytorch_tanh", "head_dim": 256, "tie_word_embeddings": True,
    "attention_bias": False,
}  # fmt: skip
ONLY = {"use_bidirectional_attention": False}
"""Encoders have the same types of model."""


def read(c: Config, where: str) -> Table:
    """What all Gemmas have, without positions.

    Files may have null as the activation, which means the default.
    """
    given = {**c, "hidden_activation": c["hidden_activation"] or DEFAULTS["hidden_activation"]}
    table = common.shape(c) | common.feed_forward(given, where, "hidden_activation")
    return table | common.biases(c) | {
        "norm_unit_offset": True, "embedding_multiplier": c["hidden_size"] ** 0.5
    }  # fmt: skip


def write(model: ModelConfig) -> Table:
    """The keys of `read`."""
    return {
        **common.shape_keys(model),
        "hidden_activation": common.activation_key(model),
        "hidden_act": common.activation_key(model),
        "attention_bias": model.qkv_bias and model.o_bias,
    }


FAMILY = Family(
    "gemma",
    name_map("hf-gemma", "GemmaForCausalLM", *LLAMA, *ATTENTION_BIASES),
    {**DEFAULTS, "num_key_value_heads": 16},
    read=lambda c, where: read(c, where) | common.rotary(c, where),
    write=lambda model: {**write(model), **common.rotary_keys(model)},
    only=ONLY,
    unused=("hidden_act",),
    divides=True,
)
