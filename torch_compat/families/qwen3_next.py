"""Qwen3-Next and the text models of Qwen 3.5: Gated DeltaNet and output-gated attention."""

from typing import Any

import numpy as np

from jaxforge.config.mixers import GATED_DELTA_NET
from jaxforge.config.model import ATTENTION, ModelConfig
from torch_compat.families import common, experts
from torch_compat.families.common import COMMON, FULL
from torch_compat.families.family import (
    ATTENTION_BIASES,
    GATED,
    HF_NAME,
    NAME,
    OUTSIDE,
    PRE_NORMS,
    QK_NORMS,
    Config,
    Family,
    Table,
    consecutive_rows,
    fused,
    grouped_rows,
    name_map,
    queries_with_gates,
)
from torch_compat.names.table import DepthwiseConvolution, Rule

# Qwen3-Next, with Gated DeltaNet (arXiv:2412.06464).
#
# The functions for the layers are shared with Qwen 3.5.

_LINEAR = "linear_attention"
_SIZES = ("num_experts", "moe_intermediate_size")
_WIDTH = "shared_expert_intermediate_size"
_DELTA = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_head_dim": "linear_key_head_dim",
    "value_head_dim": "linear_value_head_dim",
    "conv_size": "linear_conv_kernel_dim",
}
"""Key of `[model.gated_delta_net]` -> key of `config.json`."""
_LAYER_DEFAULTS: dict[str, Any] = {
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "layer_types": None,
    "full_attention_interval": 4, "head_dim": 256, "attention_bias": False,
    "partial_rotary_factor": None,
}  # fmt: skip
"""Keys of the layers and their defaults in transformers."""
_EXPERT_DEFAULTS: dict[str, Any] = {**experts.SOFTMAX, "norm_topk_prob": True, _WIDTH: 512,
                                   "moe_intermediate_size": 512}  # fmt: skip
_QWEN3_NEXT_ONLY = {"hidden_act": "silu"}  # also the activation of Gated DeltaNet's convolutions
_LEFT_OUT = {r"mtp\..*": "they predict further tokens and are not part of the model here"}
"""Tensors that transformers ignores, too."""


def _read_layers(c: Config, where: str) -> Table:
    """Read the layers without their feed-forwards, the embedding and the head."""
    table = common.shape(c) | common.feed_forward(c, where) | common.biases(c)
    table |= common.rotary(c, where, partial=0.25)
    return table | _mixers(c, where) | {
        "norm_unit_offset": True,
        "qk_norm": True,
        "qk_norm_eps": c["rms_norm_eps"],
        "attention_output_gate": True,
    }  # fmt: skip


def _mixers(c: Config, where: str) -> Table:
    """Read the mixer of each layer.

    Raises:
        UserError: a kind of layer is unknown, or their number is not the number of layers.
    """
    n_layers, interval = c["num_hidden_layers"], c["full_attention_interval"]
    kinds = c["layer_types"] or [_LINEAR if (i + 1) % interval else FULL for i in range(n_layers)]
    common.check_layer_types(kinds, n_layers, (FULL, _LINEAR), where)
    if _LINEAR not in kinds:
        return {}
    mixers = [ATTENTION if kind == FULL else GATED_DELTA_NET for kind in kinds]
    return {
        "mixer_pattern": common.shortest_period(mixers),
        GATED_DELTA_NET: {key: c[hf_key] for key, hf_key in _DELTA.items()},
    }


def _layer_keys(model: ModelConfig) -> Table:
    """Return the keys that `_read_layers` reads."""
    settings = model.gated_delta_net
    return {
        **common.llama_keys(model),
        **common.rotary_keys(model, partial=True),
        **{hf_key: getattr(settings, key) for key, hf_key in _DELTA.items()},
        "layer_types": [FULL if p.mixer == ATTENTION else _LINEAR for p in model.layer_parts],
        "attention_bias": model.qkv_bias and model.o_bias,
    }


def _read_experts(c: Config) -> Table:
    """Read the experts and the gated shared expert."""
    return experts.softmax(c, *_SIZES) | {
        "moe_shared_experts": 1,
        "moe_shared_expert_dim": c[_WIDTH],
        "moe_shared_expert_gate": True,
    }


def _expert_keys(model: ModelConfig) -> Table:
    """Return the keys that `_read_experts` reads."""
    return {**experts.softmax_keys(model, *_SIZES), _WIDTH: model.shared_expert_dim}


def _queries_keys_values_gates(model: ModelConfig) -> list[np.ndarray]:
    """Return the rows of a key head: its query and key, and the values and gates that it serves."""
    c = model.gated_delta_net.sizes
    values = c.value_size // c.key_heads
    return grouped_rows(c.key_heads, (c.key_head_dim, c.key_head_dim, values, values))


def _betas_and_decays(model: ModelConfig) -> list[np.ndarray]:
    c = model.gated_delta_net.sizes
    heads = c.value_heads // c.key_heads
    return grouped_rows(c.key_heads, (heads, heads))


def _queries_keys_values(model: ModelConfig) -> list[np.ndarray]:
    """Return the rows of queries, keys and values that follow each other."""
    c = model.gated_delta_net.sizes
    return consecutive_rows(c.key_size, c.key_size, c.value_size)


_LINEAR_NAME = f"{HF_NAME}linear_attn."
"""Prefix of the names of Gated DeltaNet in transformers."""
_NET = f"{NAME}{GATED_DELTA_NET}."


def _projections(*names: str) -> tuple[str, ...]:
    """Return jaxforge's names of projections of Gated DeltaNet."""
    return tuple(f"{_NET}{name}_proj.weight" for name in names)


def _with_gates(kind: str, *, optional: bool) -> tuple[Rule, ...]:
    names = (f"{NAME}attention.q_proj.{kind}", f"{NAME}attention.gate_proj.{kind}")
    key = f"{HF_NAME}self_attn.q_proj.{kind}"
    return fused(names, key, queries_with_gates, optional=optional)


_QWEN3_NEXT_GATED = f"{HF_NAME}self_attn.q_proj."
_LAYER_RULES = (
    *OUTSIDE,
    *PRE_NORMS,
    *QK_NORMS,
    *_with_gates("weight", optional=False),
    *_with_gates("bias", optional=True),
    *(Rule(f"{NAME}attention.{m}_proj.weight", f"{HF_NAME}self_attn.{m}_proj.weight")
      for m in "kvo"),
    *(rule for rule in ATTENTION_BIASES if not rule.key.startswith(_QWEN3_NEXT_GATED)),
    *fused(
        tuple(f"{_NET}{m}_conv" for m in "qkv"), f"{_LINEAR_NAME}conv1d.weight",
        _queries_keys_values, change=DepthwiseConvolution(),
    ),
    Rule(f"{_NET}decay_log", f"{_LINEAR_NAME}A_log"),
    Rule(f"{_NET}decay_bias", f"{_LINEAR_NAME}dt_bias"),
    Rule(f"{_NET}norm.weight", f"{_LINEAR_NAME}norm.weight"),
    Rule(f"{_NET}o_proj.weight", f"{_LINEAR_NAME}out_proj.weight"),
)  # fmt: skip
"""Rules of everything but feed-forwards and the projections of Gated DeltaNet."""
_EXPERT_RULES = (
    *experts.EXPERTS,
    *experts.shared("shared_expert"),
    Rule(f"{NAME}mlp.shared_expert_gate.weight", f"{HF_NAME}mlp.shared_expert_gate.weight"),
)
_QWEN3_NEXT_RULES = (
    *_LAYER_RULES,
    *fused(
        _projections("q", "k", "v", "gate"), f"{_LINEAR_NAME}in_proj_qkvz.weight",
        _queries_keys_values_gates,
    ),
    *fused(_projections("beta", "decay"), f"{_LINEAR_NAME}in_proj_ba.weight", _betas_and_decays),
    *_EXPERT_RULES,
    *GATED,
)  # fmt: skip


def _read_qwen3_next(c: Config, where: str) -> Table:
    return _read_layers(c, where) | _read_experts(c) | experts.sparse(c, where)


def _write_qwen3_next(model: ModelConfig) -> Table:
    return _layer_keys(model) | _expert_keys(model) | experts.sparse_keys(model)


QWEN3_NEXT_FAMILY = Family(
    "qwen3_next",
    name_map(
        "hf-qwen3-next", "Qwen3NextForCausalLM", *_QWEN3_NEXT_RULES, optional_groups=_LEFT_OUT
    ),
    {**COMMON, **_LAYER_DEFAULTS, **_EXPERT_DEFAULTS, **experts.SPARSE, "num_key_value_heads": 2,
     "num_experts": 512, "num_experts_per_tok": 10},
    summary="Qwen3-Next: Gated DeltaNet, output-gated attention, zero-centred norms, a gated "
            "shared expert",
    read=_read_qwen3_next,
    write=_write_qwen3_next,
    only=_QWEN3_NEXT_ONLY,
    aliases={"num_local_experts": "num_experts"},
    unused=experts.LOSSES,
)  # fmt: skip


# Text models of Qwen 3.5.

_OF_IMAGES = ("mrope_section", "mrope_interleaved")


def _read_qwen3_5(c: Config, where: str) -> Table:
    """Read the layers; text has the same position in all three dimensions of rotary positions."""
    rotary = c["rope_parameters"]
    if isinstance(rotary, dict):
        rotary = {key: value for key, value in rotary.items() if key not in _OF_IMAGES}
    return _read_layers({**c, "rope_parameters": rotary}, where)


_SINGLE = {"gate": "z", "beta": "b", "decay": "a"}
_QWEN3_5_RULES = (
    *_LAYER_RULES,
    *fused(_projections("q", "k", "v"), f"{_LINEAR_NAME}in_proj_qkv.weight", _queries_keys_values),
    *(
        Rule(_projections(name)[0], f"{_LINEAR_NAME}in_proj_{hf_name}.weight")
        for name, hf_name in _SINGLE.items()
    ),
)
"""Rules of everything but feed-forwards."""
_UNUSED = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype")
"""Keys of further layers, and of the state's dtype, which is always float32 here."""
_QWEN3_5_ONLY = {**_QWEN3_NEXT_ONLY, "attn_output_gate": True}

QWEN3_5_FAMILY = Family(
    "qwen3_5_text",
    name_map(
        "hf-qwen3-5", "Qwen3_5ForCausalLM", *_QWEN3_5_RULES, *GATED, optional_groups=_LEFT_OUT
    ),
    {**COMMON, **_LAYER_DEFAULTS, "num_key_value_heads": 4},
    summary="the text models of Qwen 3.5: Qwen3-Next with a matrix for each projection, dense",
    read=_read_qwen3_5,
    write=_layer_keys,
    only=_QWEN3_5_ONLY,
    unused=_UNUSED,
)


# Text models of Qwen 3.5 with experts in every layer.


def _read_qwen3_5_moe(c: Config, where: str) -> Table:
    selected = {**c, "norm_topk_prob": True}  # the weights of a token's experts always add up to 1
    return _read_qwen3_5(c, where) | _read_experts(selected)


def _write_qwen3_5_moe(model: ModelConfig) -> Table:
    keys = {**_layer_keys(model), **_expert_keys(model)}
    del keys["norm_topk_prob"]
    return keys


QWEN3_5_MOE_FAMILY = Family(
    "qwen3_5_moe_text",
    name_map(
        "hf-qwen3-5-moe", "Qwen3_5MoeForCausalLM", *_QWEN3_5_RULES, *_EXPERT_RULES,
        optional_groups=_LEFT_OUT,
    ),
    {**COMMON, **_LAYER_DEFAULTS, **_EXPERT_DEFAULTS, "num_key_value_heads": 2, "num_experts": 256,
     "num_experts_per_tok": 8, "intermediate_size": 512},
    summary="the text models of Qwen 3.5 with experts: as `hf-qwen3-5`, with Qwen3-Next's experts",
    read=_read_qwen3_5_moe,
    write=_write_qwen3_5_moe,
    only=_QWEN3_5_ONLY,
    aliases={"num_local_experts": "num_experts"},
    unused=(*_UNUSED, *experts.LOSSES),
)  # fmt: skip
