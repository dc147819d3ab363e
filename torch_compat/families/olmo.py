"""OLMo 2, OLMo 3 and OLMoE."""

from jaxforge.config.model import ModelConfig
from torch_compat.families import common, experts
from torch_compat.families.common import COMMON, FULL, SLIDING
from torch_compat.families.family import (
    ATTENTION,
    ATTENTION_BIASES,
    GATED,
    OUTSIDE,
    POST_NORMS,
    PRE_NORMS,
    QK_NORMS,
    Config,
    Family,
    Table,
    name_map,
)
from torch_compat.families.values import is_size

# OLMo 2 (arXiv:2501.00656).

_RULES = (*OUTSIDE, *ATTENTION, *QK_NORMS, *POST_NORMS, *GATED, *ATTENTION_BIASES)
_DEFAULTS = {**COMMON, "rms_norm_eps": 1e-5, "attention_bias": False}


def _norms(c: Config) -> Table:
    """Return the settings of norms."""
    return {"norm_placement": "post", "qk_norm": True, "qk_norm_scope": "projection",
            "qk_norm_eps": c["rms_norm_eps"]}  # fmt: skip


def _olmo_keys(model: ModelConfig) -> Table:
    """Return the keys that do not depend on layers."""
    bias = model.qkv_bias and model.o_bias
    return {**common.llama_keys(model), "attention_bias": bias}


OLMO2_FAMILY = Family(
    "olmo2",
    name_map("hf-olmo2", "Olmo2ForCausalLM", *_RULES),
    _DEFAULTS,
    summary="OLMo 2: norms after the sublayers, q/k norms over all heads",
    read=lambda c, where: common.llama(c, where) | _norms(c),
    write=_olmo_keys,
    is_usual=True,
)


# OLMo 3.


def _read_olmo3(c: Config, where: str) -> Table:
    n_layers = c["num_hidden_layers"]
    every_fourth = [SLIDING if (i + 1) % 4 else FULL for i in range(n_layers)]
    table = common.shape(c) | common.feed_forward(c, where) | common.biases(c) | _norms(c)
    positions = common.rotary_by_layer_kind(c, where, None)
    differ = "local_rope_theta" in positions
    table |= common.windows(c, c["layer_types"] or every_fourth, where, differ=differ)
    # Local positions apply to layers with windows, and the model has no such layer.
    if "sliding_window" not in table:
        positions.pop("local_rope_theta", None)
    return table | positions


def _write_olmo3(model: ModelConfig) -> Table:
    window = {"sliding_window": model.sliding_window, "layer_types": common.layer_kinds(model)}
    return {
        **_olmo_keys(model),
        "rope_scaling": None,
        **common.rotary_by_layer_kind_keys(model),
        **window,
    }


OLMO3_FAMILY = Family(
    "olmo3",
    name_map("hf-olmo3", "Olmo3ForCausalLM", *_RULES),
    {**_DEFAULTS, "rope_theta": 500000.0, "sliding_window": 4096, "layer_types": None},
    summary="OLMo 3: OLMo 2 with windows; scaling of rotary positions in full layers only",
    read=_read_olmo3,
    write=_write_olmo3,
)


# OLMoE (arXiv:2409.02060).

_SIZES = ("num_experts", "intermediate_size")


def _read_olmoe(c: Config, where: str) -> Table:
    common.check_usual_heads(c, where)
    norms = {"qk_norm": True, "qk_norm_scope": "projection", "qk_norm_eps": c["rms_norm_eps"]}
    clip = {} if c["clip_qkv"] is None else {"clip_qkv": c["clip_qkv"]}
    return common.llama(c, where) | norms | clip | experts.softmax(c, *_SIZES)


def _write_olmoe(model: ModelConfig) -> Table:
    keys = {**common.llama_keys(model), **experts.softmax_keys(model, *_SIZES)}
    return {**keys, "attention_bias": model.qkv_bias and model.o_bias, "clip_qkv": model.clip_qkv}


OLMOE_FAMILY = Family(
    "olmoe",
    name_map(
        "hf-olmoe", "OlmoeForCausalLM", *OUTSIDE, *PRE_NORMS, *ATTENTION, *QK_NORMS,
        *experts.EXPERTS, *ATTENTION_BIASES,
    ),
    {**COMMON, **experts.SOFTMAX, "rms_norm_eps": 1e-5, "attention_bias": False, "num_experts": 64,
     "clip_qkv": None},
    summary="OLMoE: experts in every layer, q/k norms over all heads, `clip_qkv`",
    read=_read_olmoe,
    write=_write_olmoe,
    ranges={"clip_qkv": is_size},
    unused=experts.LOSSES,
)  # fmt: skip
