"""MPT (MosaicML, 2023): ALiBi, and LayerNorms without bias."""

import reprlib
from collections.abc import Mapping
from typing import Any

from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from torch_compat.families import common
from torch_compat.families.common import COMMON
from torch_compat.families.family import OURS, Config, Family, Table, fused, name_map
from torch_compat.families.phi3 import queries_keys_values
from torch_compat.names.table import EMBEDDING, HEAD, Rule

_LAYER = "transformer.blocks.{i}."
_NAMES = {
    "norm": "transformer.norm_f",
    f"{OURS}attention_norm": f"{_LAYER}norm_1",
    f"{OURS}mlp_norm": f"{_LAYER}norm_2",
    f"{OURS}attention.o_proj": f"{_LAYER}attn.out_proj",
    f"{OURS}mlp.up_proj": f"{_LAYER}ffn.up_proj",
    f"{OURS}mlp.down_proj": f"{_LAYER}ffn.down_proj",
}
_RULES = (
    Rule(EMBEDDING, "transformer.wte.weight"),
    Rule(HEAD, "lm_head.weight"),
    *fused(
        tuple(f"{OURS}attention.{m}_proj.weight" for m in "qkv"),
        f"{_LAYER}attn.Wqkv.weight",
        queries_keys_values,
    ),
    *(Rule(f"{name}.weight", f"{key}.weight") for name, key in _NAMES.items()),
)
_ATTENTION: Mapping[str, Any] = {"clip_qkv": None, "softmax_scale": None}
"""Keys of `attn_config` and their defaults in transformers."""
_ONLY: Mapping[str, Any] = {"attn_type": "multihead_attention", "alibi": True, "alibi_bias_max": 8,
                            "prefix_lm": False, "qk_ln": False}  # fmt: skip
"""Keys of `attn_config` with a single supported value, which transformers ignores."""


def _read(c: Config, where: str) -> Table:
    attention = _attention(c["attn_config"] or {}, f"{where}: attn_config")
    table = common.shape({**c, "intermediate_size": 4 * c["hidden_size"]})
    if attention["softmax_scale"] is not None:
        table |= common.scale(attention["softmax_scale"], c)
    if attention["clip_qkv"] is not None:
        table["clip_qkv"] = attention["clip_qkv"]
    structure = {"norm_type": "layernorm", "norm_bias": False, "position_embedding": "alibi",
                 "activation": "gelu"}  # fmt: skip
    return {**table, **structure}


def _attention(given: Config, what: str) -> Table:
    """Return the settings of attention; transformers reads no other keys of this table.

    Raises:
        UserError: a setting is impossible or not supported.
    """
    settings = {**_ATTENTION, **_ONLY, **given}
    for key in (*_ATTENTION, *_ONLY):
        value = settings[key]
        is_valid = value == _ONLY[key] if key in _ONLY else value is None or common.is_size(value)
        if not is_valid:
            raise UserError(f"{what} has {key} = {reprlib.repr(value)}, which is not supported")
    return settings


def _write(model: ModelConfig) -> Table:
    return {
        "hidden_size": model.dim,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.n_heads,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_seq_len,
        "rms_norm_eps": model.norm_eps,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tie_embeddings,
        "expansion_ratio": 4,
        "no_bias": True,
        "attn_config": {
            "alibi": True,
            "alibi_bias_max": 8,
            "clip_qkv": model.clip_qkv,
            "softmax_scale": model.attention_scale,
        },
    }


FAMILY = Family(
    "mpt",
    name_map("hf-mpt", "MptForCausalLM", *_RULES),
    {
        **{key: COMMON[key] for key in (
            "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
            "max_position_embeddings", "initializer_range",
        )},
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "attn_config": None,
    },
    read=_read,
    write=_write,
    only={"expansion_ratio": 4, "no_bias": True, "logit_scale": None, "embedding_fraction": 1.0},
    names={"d_model": "hidden_size", "n_layers": "num_hidden_layers",
           "n_heads": "num_attention_heads", "max_seq_len": "max_position_embeddings",
           "layer_norm_epsilon": "rms_norm_eps"},
    aliases={key: key for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")},
    unused=("emb_pdrop", "init_config", "init_device", "learned_pos_emb", "norm_type",
            "resid_pdrop", "tokenizer_name", "verbose"),
    requires_head_divisor=True,
)  # fmt: skip
