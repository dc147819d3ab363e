"""Parameter names and config keys of multi-head latent attention, shared by DeepSeek's families."""

import reprlib
from collections.abc import Mapping
from typing import Any

from jaxforge.config.model import LATENT_ATTENTION, ModelConfig
from jaxforge.errors import UserError
from torch_compat.families import common
from torch_compat.families.common import COMMON
from torch_compat.families.family import OURS, THEIRS, Config, Table
from torch_compat.names.table import InterleavedTail, Rule

DEFAULTS: Mapping[str, Any] = {
    **COMMON, "qk_head_dim": None, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "attention_bias": False,
}  # fmt: skip
"""Keys of a model with latent attention and their defaults in transformers."""
UNUSED = ("ep_size", "pretraining_tp", "aux_loss_alpha", "seq_aux", "output_router_logits")
"""Keys that concern training and its machines only."""

_QUERIES = InterleavedTail(lambda model: model.latent_attention.query_head_dim)
_SHARED = InterleavedTail(lambda model: model.latent_attention.cached_values)


def _rule(
    ours: str, theirs: str, change: InterleavedTail | None = None, *, optional: bool = False
) -> Rule:
    return Rule(f"{OURS}{LATENT_ATTENTION}.{ours}", f"{THEIRS}self_attn.{theirs}", change, optional)


RULES = (
    _rule("q_proj.weight", "q_proj.weight", _QUERIES, optional=True),
    _rule("q_a_proj.weight", "q_a_proj.weight", optional=True),
    _rule("q_a_proj.bias", "q_a_proj.bias", optional=True),
    _rule("q_a_norm.weight", "q_a_layernorm.weight", optional=True),
    _rule("q_b_proj.weight", "q_b_proj.weight", _QUERIES, optional=True),
    _rule("kv_a_proj.weight", "kv_a_proj_with_mqa.weight", _SHARED),
    _rule("kv_a_proj.bias", "kv_a_proj_with_mqa.bias", _SHARED, optional=True),
    _rule("kv_a_norm.weight", "kv_a_layernorm.weight"),
    _rule("kv_b_proj.weight", "kv_b_proj.weight"),
    _rule("o_proj.weight", "o_proj.weight"),
    _rule("o_proj.bias", "o_proj.bias", optional=True),
)

_SIZES = {
    "q_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
    "nope_head_dim": "qk_nope_head_dim",
    "rope_head_dim": "qk_rope_head_dim",
    "value_head_dim": "v_head_dim",
}
"""Key of `[model.latent_attention]` -> key of `config.json`."""


def read(c: Config, where: str) -> Table:
    """Read a model with latent attention, apart from its experts.

    Raises:
        UserError: a key that follows from others has another value.
    """
    rotated = c["qk_rope_head_dim"]
    implied = {
        "num_key_value_heads": ("num_attention_heads", c["num_attention_heads"]),
        "head_dim": ("qk_rope_head_dim", rotated),  # transformers writes them
        "qk_head_dim": ("qk_nope_head_dim + qk_rope_head_dim", c["qk_nope_head_dim"] + rotated),
    }
    for key, (name, value) in implied.items():
        if c[key] not in (None, value):
            raise UserError(
                f"{where}: {key} = {reprlib.repr(c[key])} must equal {name} = {value} in this "
                "family"
            )
    table = common.shape({**c, "head_dim": None}) | common.rotary(c, where)
    table |= common.feed_forward(c, where) | common.biases(c)
    del table["n_kv_heads"]
    return table | {
        "mixer_pattern": [LATENT_ATTENTION],
        "latent_attention": {
            ours: c[theirs] for ours, theirs in _SIZES.items() if c[theirs] is not None
        },
    }


def keys(model: ModelConfig) -> Table:
    """Return the keys that `read` reads."""
    written = common.llama_keys(model)
    del written["head_dim"]
    return {
        **written,
        **{theirs: getattr(model.latent_attention, ours) for ours, theirs in _SIZES.items()},
        "attention_bias": model.qkv_bias and model.o_bias,
    }
