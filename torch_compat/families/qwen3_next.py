"""Qwen3-Next: layers of Gated DeltaNet (arXiv:2412.06464) and of output-gated attention.

The functions for the layers are shared with Qwen 3.5.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxforge.config.model import ATTENTION, GATED_DELTA_NET, ModelConfig
from torch_compat.families import common, experts
from torch_compat.families.common import COMMON, FULL
from torch_compat.families.family import (
    ATTENTION_BIASES,
    GATED,
    OURS,
    OUTSIDE,
    PRE_NORMS,
    QK_NORMS,
    THEIRS,
    Config,
    Family,
    Table,
    fused,
    grouped_rows,
    name_map,
    queries_with_gates,
)
from torch_compat.families.phi3 import consecutive_rows
from torch_compat.names.table import DepthwiseConvolution, Rule

LINEAR = "linear_attention"
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
LAYER_DEFAULTS: dict[str, Any] = {
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "layer_types": None,
    "full_attention_interval": 4, "head_dim": 256, "attention_bias": False,
    "partial_rotary_factor": None,
}  # fmt: skip
"""Keys of the layers and their defaults in transformers."""
EXPERT_DEFAULTS: dict[str, Any] = {**experts.SOFTMAX, "norm_topk_prob": True, _WIDTH: 512,
                                   "moe_intermediate_size": 512}  # fmt: skip
ONLY = {"hidden_act": "silu"}  # also the activation of Gated DeltaNet's convolutions
LEFT_OUT = {r"mtp\..*": "they predict further tokens and are not part of the model here"}
"""Tensors that transformers ignores, too."""


def read_layers(c: Config, where: str) -> Table:
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
    kinds = c["layer_types"] or [LINEAR if (i + 1) % interval else FULL for i in range(n_layers)]
    common.check_layer_types(kinds, n_layers, (FULL, LINEAR), where)
    if LINEAR not in kinds:
        return {}
    pattern = _shortest_pattern([ATTENTION if kind == FULL else GATED_DELTA_NET for kind in kinds])
    return {
        "mixer_pattern": pattern,
        GATED_DELTA_NET: {ours: c[theirs] for ours, theirs in _DELTA.items()},
    }


def _shortest_pattern(names: Sequence[str]) -> list[str]:
    """Return the shortest beginning that yields all names when it is repeated."""
    return next(
        list(names[:length])
        for length in range(1, len(names) + 1)
        if all(name == names[i % length] for i, name in enumerate(names))
    )


def layer_keys(model: ModelConfig) -> Table:
    """Return the keys that `read_layers` reads."""
    settings = model.gated_delta_net
    return {
        **common.llama_keys(model),
        **common.rotary_keys(model, partial=True),
        **{theirs: getattr(settings, ours) for ours, theirs in _DELTA.items()},
        "layer_types": [FULL if p.mixer == ATTENTION else LINEAR for p in model.layer_parts],
        "attention_bias": model.qkv_bias and model.o_bias,
    }


def read_experts(c: Config) -> Table:
    """Read the experts and the gated shared expert."""
    return experts.softmax(c, *_SIZES) | {
        "moe_shared_experts": 1,
        "moe_shared_expert_dim": c[_WIDTH],
        "moe_shared_expert_gate": True,
    }


def expert_keys(model: ModelConfig) -> Table:
    """Return the keys that `read_experts` reads."""
    return {**experts.softmax_keys(model, *_SIZES), _WIDTH: model.shared_expert_dim}


def _queries_keys_values_gates(model: ModelConfig) -> list[np.ndarray]:
    """Return the rows of a key head: its query and key, and the values and gates that it serves."""
    c = model.gated_delta_net
    values = c.value_size // c.key_heads
    return grouped_rows(c.key_heads, (c.key_head_dim, c.key_head_dim, values, values))


def _betas_and_decays(model: ModelConfig) -> list[np.ndarray]:
    c = model.gated_delta_net
    heads = c.value_heads // c.key_heads
    return grouped_rows(c.key_heads, (heads, heads))


def queries_keys_values(model: ModelConfig) -> list[np.ndarray]:
    """Return the rows of queries, keys and values that follow each other."""
    c = model.gated_delta_net
    return consecutive_rows(c.key_size, c.key_size, c.value_size)


LINEAR_NAME = f"{THEIRS}linear_attn."
"""Prefix of the names of Gated DeltaNet in transformers."""
_NET = f"{OURS}{GATED_DELTA_NET}."


def projections(*names: str) -> tuple[str, ...]:
    """Return jaxforge's names of projections of Gated DeltaNet."""
    return tuple(f"{_NET}{name}_proj.weight" for name in names)


def _with_gates(kind: str, *, optional: bool) -> tuple[Rule, ...]:
    names = (f"{OURS}attention.q_proj.{kind}", f"{OURS}attention.gate_proj.{kind}")
    key = f"{THEIRS}self_attn.q_proj.{kind}"
    return fused(names, key, queries_with_gates, optional=optional)


_GATED = f"{THEIRS}self_attn.q_proj."
LAYER_RULES = (
    *OUTSIDE,
    *PRE_NORMS,
    *QK_NORMS,
    *_with_gates("weight", optional=False),
    *_with_gates("bias", optional=True),
    *(Rule(f"{OURS}attention.{m}_proj.weight", f"{THEIRS}self_attn.{m}_proj.weight")
      for m in "kvo"),
    *(rule for rule in ATTENTION_BIASES if not rule.key.startswith(_GATED)),
    *fused(
        tuple(f"{_NET}{m}_conv" for m in "qkv"), f"{LINEAR_NAME}conv1d.weight",
        queries_keys_values, change=DepthwiseConvolution(),
    ),
    Rule(f"{_NET}decay_log", f"{LINEAR_NAME}A_log"),
    Rule(f"{_NET}decay_bias", f"{LINEAR_NAME}dt_bias"),
    Rule(f"{_NET}norm.weight", f"{LINEAR_NAME}norm.weight"),
    Rule(f"{_NET}o_proj.weight", f"{LINEAR_NAME}out_proj.weight"),
)  # fmt: skip
"""Rules of everything but feed-forwards and the projections of Gated DeltaNet."""
EXPERT_RULES = (
    *experts.EXPERTS,
    *experts.shared("shared_expert"),
    Rule(f"{OURS}mlp.shared_expert_gate.weight", f"{THEIRS}mlp.shared_expert_gate.weight"),
)
_RULES = (
    *LAYER_RULES,
    *fused(
        projections("q", "k", "v", "gate"), f"{LINEAR_NAME}in_proj_qkvz.weight",
        _queries_keys_values_gates,
    ),
    *fused(projections("beta", "decay"), f"{LINEAR_NAME}in_proj_ba.weight", _betas_and_decays),
    *EXPERT_RULES,
    *GATED,
)  # fmt: skip


def _read(c: Config, where: str) -> Table:
    return read_layers(c, where) | read_experts(c) | experts.sparse(c, where)


def _write(model: ModelConfig) -> Table:
    return layer_keys(model) | expert_keys(model) | experts.sparse_keys(model)


FAMILY = Family(
    "qwen3_next",
    name_map("hf-qwen3-next", "Qwen3NextForCausalLM", *_RULES, optional_groups=LEFT_OUT),
    {**COMMON, **LAYER_DEFAULTS, **EXPERT_DEFAULTS, **experts.SPARSE, "num_key_value_heads": 2,
     "num_experts": 512, "num_experts_per_tok": 10},
    read=_read,
    write=_write,
    only=ONLY,
    aliases={"num_local_experts": "num_experts"},
    unused=experts.LOSSES,
)  # fmt: skip
