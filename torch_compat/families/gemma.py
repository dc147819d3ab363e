"""Gemma, Gemma 2 and the text models of Gemma 3."""

import reprlib
from typing import Any

from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from torch_compat.families import common
from torch_compat.families.common import COMMON, FULL, SLIDING
from torch_compat.families.family import (
    ATTENTION,
    ATTENTION_BIASES,
    GATED,
    LLAMA,
    OUTSIDE,
    QK_NORMS,
    SANDWICH_NORMS,
    Config,
    Family,
    Table,
    name_map,
)
from torch_compat.families.values import is_size

# Gemma (arXiv:2403.08295).

_TANH = "gelu_pytorch_tanh"
_DEFAULTS: dict[str, Any] = {
    **{key: value for key, value in COMMON.items() if key != "hidden_act"},
    "hidden_activation": _TANH, "head_dim": 256, "tie_word_embeddings": True,
    "attention_bias": False,
}  # fmt: skip
_ONLY = {"use_bidirectional_attention": False}
"""Encoders share these model types."""


def _read_any_gemma(c: Config, where: str) -> Table:
    """Read the keys that all Gemma models share, except rotary positions.

    A null activation means the default.
    """
    config = {**c, "hidden_activation": c["hidden_activation"] or _DEFAULTS["hidden_activation"]}
    table = common.shape(c) | common.feed_forward(config, where, "hidden_activation")
    return table | common.biases(c) | {
        "norm_unit_offset": True, "embedding_multiplier": c["hidden_size"] ** 0.5
    }  # fmt: skip


def _write_any_gemma(model: ModelConfig) -> Table:
    """Return the keys that `_read_any_gemma` reads."""
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


def _read_gemma(c: Config, where: str) -> Table:
    config = {**c, "hidden_activation": _activation(c, where)}
    return _read_any_gemma(config, where) | common.rotary(c, where)


GEMMA_FAMILY = Family(
    "gemma",
    name_map("hf-gemma", "GemmaForCausalLM", *LLAMA, *ATTENTION_BIASES),
    {**_DEFAULTS, "num_key_value_heads": 16, "hidden_activation": None, "hidden_act": _TANH},
    summary="Gemma: norms with 1 + w, scaled embeddings, GeGLU",
    read=_read_gemma,
    write=lambda model: {**_write_any_gemma(model), **common.rotary_keys(model)},
    only=_ONLY,
    requires_head_divisor=True,
)


# Gemma 2 (arXiv:2408.00118).

_RULES = (*OUTSIDE, *ATTENTION, *SANDWICH_NORMS, *GATED, *ATTENTION_BIASES)
_UNUSED = ("cache_implementation", "hidden_act", "sliding_window_size")


def _read_with_caps(c: Config, where: str) -> Table:
    """Read the keys that Gemma 2 and 3 share."""
    table = _read_any_gemma(c, where) | common.scale(c["query_pre_attn_scalar"] ** -0.5, c)
    caps = {"attn_logit_softcap": "attn_logit_softcapping",
            "final_logit_softcap": "final_logit_softcapping"}  # fmt: skip
    table |= {key: c[hf_key] for key, hf_key in caps.items() if c[hf_key] is not None}
    return {**table, "norm_placement": "sandwich"}


def _write_with_caps(model: ModelConfig) -> Table:
    """Return the keys that `_read_with_caps` reads."""
    scale = model.attention_scale or model.head_size**-0.5
    return {
        **_write_any_gemma(model),
        # Scores are scaled by scalar^(-1/2). Rounding removes the error of the root.
        "query_pre_attn_scalar": round(scale**-2),
        "attn_logit_softcapping": model.attn_logit_softcap,
        "final_logit_softcapping": model.final_logit_softcap,
        "sliding_window": model.sliding_window or model.max_seq_len,
        "layer_types": common.layer_kinds(model),
    }


def _read_gemma2(c: Config, where: str) -> Table:
    every_second = [FULL if i % 2 else SLIDING for i in range(c["num_hidden_layers"])]
    kinds = common.windows(c, c["layer_types"] or every_second, where)
    return _read_with_caps(c, where) | common.rotary(c, where) | kinds


GEMMA2_FAMILY = Family(
    "gemma2",
    name_map("hf-gemma2", "Gemma2ForCausalLM", *_RULES),
    {**_DEFAULTS, "num_key_value_heads": 4, "query_pre_attn_scalar": 256,
     "sliding_window": 4096, "layer_types": None, "attn_logit_softcapping": 50.0,
     "final_logit_softcapping": 30.0},
    summary="Gemma 2: sandwich norms, soft caps, a window in every second layer",
    read=_read_gemma2,
    write=lambda model: {**_write_with_caps(model), **common.rotary_keys(model)},
    ranges={"query_pre_attn_scalar": is_size},
    only=_ONLY,
    unused=_UNUSED,
    requires_head_divisor=True,
)  # fmt: skip


# Gemma 3's text models (arXiv:2503.19786).

_LOCAL_THETA = 10000.0


def _read_gemma3(c: Config, where: str) -> Table:
    kinds = common.sliding_kinds(c)
    positions = common.rotary_by_layer_kind(c, where, c["rope_local_base_freq"])
    differ = "local_rope_theta" in positions
    table = _read_with_caps(c, where) | common.windows(c, kinds, where, differ=differ)
    # Local positions apply to layers with windows, and the model has no such layer.
    if "sliding_window" not in table:
        positions.pop("local_rope_theta", None)
    return table | positions | {"qk_norm": True, "qk_norm_eps": c["rms_norm_eps"]}


def _write_gemma3(model: ModelConfig) -> Table:
    local = model.rope_theta if model.local_rope_theta is None else model.local_rope_theta
    old = {"rope_theta": model.rope_theta, "rope_local_base_freq": local}  # transformers 4
    return {**_write_with_caps(model), **old, **common.rotary_by_layer_kind_keys(model)}


GEMMA3_FAMILY = Family(
    "gemma3_text",
    name_map("hf-gemma3", "Gemma3ForCausalLM", *_RULES, *QK_NORMS),
    {**_DEFAULTS, "num_key_value_heads": 4, "query_pre_attn_scalar": 256,
     "sliding_window": 4096, "layer_types": None, "attn_logit_softcapping": None,
     "final_logit_softcapping": None, "rope_theta": 1e6, "rope_local_base_freq": _LOCAL_THETA,
     "sliding_window_pattern": 6},
    summary="the text models of Gemma 3: Gemma 2 with q/k norms and two rotary bases",
    read=_read_gemma3,
    write=_write_gemma3,
    ranges={"query_pre_attn_scalar": is_size},
    only={**_ONLY, "attn_logit_softcapping": None},  # transformers has it and ignores it
    aliases={"_sliding_window_pattern": "sliding_window_pattern"},
    unused=_UNUSED,
    requires_head_divisor=True,
)  # fmt: skip
