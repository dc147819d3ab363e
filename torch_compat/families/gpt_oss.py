"""gpt-oss (arXiv:2508.10925): attention sinks, a clamped SwiGLU, windows in every other layer."""

import numpy as np

from jaxforge.config.model import ModelConfig
from torch_compat.families import common, experts
from torch_compat.families.common import COMMON, FULL, SLIDING
from torch_compat.families.family import (
    ATTENTION,
    ATTENTION_BIASES,
    OURS,
    OUTSIDE,
    PRE_NORMS,
    THEIRS,
    Config,
    Family,
    Table,
    fused,
    name_map,
)
from torch_compat.names.table import Rule, Transposed

_EXPERTS = f"{THEIRS}mlp.experts."
_ALPHA = 1.702  # of swiglu_oai
_SIZES = ("num_local_experts", "intermediate_size")
_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
         "truncate": False, "original_max_position_embeddings": 4096}  # fmt: skip
"""Rotary positions of a file without `rope_parameters`."""


def _alternating_rows(model: ModelConfig) -> list[np.ndarray]:
    """Return the rows of `gate_up_proj`: channels of gate and up alternate."""
    rows = np.arange(2 * model.expert_dim)
    return [rows[::2], rows[1::2]]


def _gate_up(what: str, theirs: str) -> tuple[Rule, ...]:
    ours = tuple(f"{OURS}mlp.experts.{{j}}.{m}_proj.{what}" for m in ("gate", "up"))
    return fused(ours, f"{_EXPERTS}{theirs}", _alternating_rows, transposed=True)


_RULES = (
    *OUTSIDE,
    *PRE_NORMS,
    *ATTENTION,
    *ATTENTION_BIASES,
    Rule(f"{OURS}attention.sinks", f"{THEIRS}self_attn.sinks"),
    *(
        Rule(f"{OURS}mlp.router.gate.{what}", f"{THEIRS}mlp.router.{what}")
        for what in ("weight", "bias")
    ),
    *_gate_up("weight", "gate_up_proj"),
    *_gate_up("bias", "gate_up_proj_bias"),
    Rule(f"{OURS}mlp.experts.{{j}}.down_proj.weight", f"{_EXPERTS}down_proj", Transposed()),
    Rule(f"{OURS}mlp.experts.{{j}}.down_proj.bias", f"{_EXPERTS}down_proj_bias"),
)


def _read(c: Config, where: str) -> Table:
    kinds = c["layer_types"] or [(SLIDING, FULL)[i % 2] for i in range(c["num_hidden_layers"])]
    positions = {**c, "rope_parameters": c["rope_parameters"] or _YARN}
    return {
        **common.shape(c),
        **common.rotary(positions, where),
        **common.biases(c),
        **common.windows(c, kinds, where),
        **experts.softmax({**c, "norm_topk_prob": True}, *_SIZES),
        "attention_sinks": True,
        "activation": "swiglu_oai",
        "swiglu_limit": c["swiglu_limit"],
        "mlp_bias": True,
        "moe_router_bias": True,
    }


def _write(model: ModelConfig) -> Table:
    keys = {
        **common.llama_keys(model),
        **experts.softmax_keys(model, *_SIZES),
        "sliding_window": model.sliding_window or model.max_seq_len,  # never null in gpt-oss
        "layer_types": common.layer_kinds(model),
        "attention_bias": model.qkv_bias and model.o_bias,
    }
    if model.swiglu_limit is not None:
        keys["swiglu_limit"] = model.swiglu_limit
    return {key: value for key, value in keys.items() if key != "norm_topk_prob"}


FAMILY = Family(
    "gpt_oss",
    name_map("hf-gpt-oss", "GptOssForCausalLM", *_RULES),
    {**COMMON, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5,
     "rope_theta": 150000.0, "attention_bias": True, "sliding_window": 128, "layer_types": None,
     "num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_limit": 7.0},
    read=_read,
    write=_write,
    only={"swiglu_alpha": _ALPHA},
    unused=("experts_per_token", "initial_context_length", *experts.LOSSES),
    float32={"float16": r"(.*_)?norm\.weight"},
)  # fmt: skip
