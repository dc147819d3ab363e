"""Gemma (arXiv:2403.08295): norms with 1 + w, scaled embeddings, GeGLU."""

import reprlib
from typing import Any

from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from torch_compat.families import common
from torch_compat.families.common import COMMON
from torch_compat.families.family import ATTENTION_BIASES, LLAMA, Config, Family, Table, name_map

_TANH = "gelu_pytorch_tanh"
DEFAULTS: dict[str, Any] = {
    **{key: value for key, value in COMMON.items() if key != "hidden_act"},
    "hidden_activation": _TANH, "head_dim": 256, "tie_word_embeddings": True,
    "attention_bias": False,
}  # fmt: skip
ONLY = {"use_bidirectional_attention": False}
"""Encoders share these model types."""


def read(c: Config, where: str) -> Table:
    """Read the keys that all Gemma models share, except rotary positions.

    A null activation means the default.
    """
    config = {**c, "hidden_activation": c["hidden_activation"] or DEFAULTS["hidden_activation"]}
    table = common.shape(c) | common.feed_forward(config, where, "hidden_activation")
    return table | common.biases(c) | {
        "norm_unit_offset": True, "embedding_multiplier": c["hidden_size"] ** 0.5
    }  # fmt: skip


def write(model: ModelConfig) -> Table:
    """Return the keys that `read` reads."""
    return {
        **common.shape_keys(model),
        "hidden_activation": common.activation_key(model),
        "hidden_act": common.activation_key(model),
        "attention_bias": model.qkv_bias and model.o_bias,
    }


def _activation(c: Config, where: str) -> str:
    """Return the activation of Gemma 1.

    transformers 5 reads `hidden_act`, and takes the tanh approximation for "gelu"; some releases
    of transformers 4 read `hidden_activation`.

    Raises:
        UserError: releases of transformers read different activations from the file.
    """
    act, other = c["hidden_act"] or _TANH, c["hidden_activation"]
    act = _TANH if act == "gelu" else act
    if other not in (None, act):
        raise UserError(
            f"{where}: hidden_act = {reprlib.repr(c['hidden_act'])} and hidden_activation = "
            f"{reprlib.repr(other)} contradict each other: releases of transformers differ in "
            "which they read. Give both the activation that the model was trained with"
        )
    return act


def _read(c: Config, where: str) -> Table:
    config = {**c, "hidden_activation": _activation(c, where)}
    return read(config, where) | common.rotary(c, where)


FAMILY = Family(
    "gemma",
    name_map("hf-gemma", "GemmaForCausalLM", *LLAMA, *ATTENTION_BIASES),
    {**DEFAULTS, "num_key_value_heads": 16, "hidden_activation": None, "hidden_act": _TANH},
    read=_read,
    write=lambda model: {**write(model), **common.rotary_keys(model)},
    only=ONLY,
    requires_head_divisor=True,
)
