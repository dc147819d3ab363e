"""Falcon (arXiv:2311.16867): multi-query or grouped attention in parallel to the feed-forward.

Falcon 7B and 11B share a norm; 40B and 180B have one for attention and one for the feed-forward.
"""

from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from torch_compat.families import common
from torch_compat.families.common import COMMON
from torch_compat.families.family import OURS, Config, Family, Table, fused, name_map
from torch_compat.names.megatron import rows_by_group
from torch_compat.names.table import EMBEDDING, HEAD, Rule

_LAYER = "transformer.h.{i}."
_LINEARS = {"attention.o_proj": "self_attention.dense", "mlp.up_proj": "mlp.dense_h_to_4h",
            "mlp.down_proj": "mlp.dense_4h_to_h"}  # fmt: skip
_NORMS = {"shared_norm": "input_layernorm", "attention_norm": "ln_attn", "mlp_norm": "ln_mlp"}


def _linears(what: str) -> tuple[Rule, ...]:
    ours = tuple(f"{OURS}attention.{m}_proj.{what}" for m in "qkv")
    optional = what == "bias"
    return (
        *fused(ours, f"{_LAYER}self_attention.query_key_value.{what}", rows_by_group,
               optional=optional),
        *(Rule(f"{OURS}{name}.{what}", f"{_LAYER}{key}.{what}", optional=optional)
          for name, key in _LINEARS.items()),
    )  # fmt: skip


_RULES = (
    Rule(EMBEDDING, "transformer.word_embeddings.weight"),
    Rule(HEAD, "lm_head.weight"),
    *_linears("weight"),
    *_linears("bias"),
    *(
        rule
        for what in ("weight", "bias")
        for rule in (
            Rule(f"norm.{what}", f"transformer.ln_f.{what}"),
            *(Rule(f"{OURS}{name}.{what}", f"{_LAYER}{key}.{what}")
              for name, key in _NORMS.items()),
        )
    ),
)  # fmt: skip


def _kv_heads(c: Config) -> int:
    if c["new_decoder_architecture"]:
        return c["num_key_value_heads"] or c["num_attention_heads"]
    return 1 if c["multi_query"] else c["num_attention_heads"]


def _read(c: Config, where: str) -> Table:
    is_new, norms = c["new_decoder_architecture"], c["num_ln_in_parallel_attn"]
    norms = (2 if is_new else 1) if norms is None else norms
    if norms not in (1, 2) or (norms == 2 and not is_new):
        raise UserError(
            f"{where}: num_ln_in_parallel_attn = {norms} must be 1, or 2 with "
            "new_decoder_architecture = true"
        )
    inner = c["intermediate_size"] or 4 * c["hidden_size"]
    table = common.shape({**c, "num_key_value_heads": _kv_heads(c), "intermediate_size": inner})
    table |= common.rotary(c, where) | common.feed_forward(c, where, gated=False)
    table |= common.biases({"attention_bias": c["bias"], "mlp_bias": c["bias"]})
    shared = {"shared_norm": True} if norms == 1 else {}
    return {**table, "norm_type": "layernorm", "parallel_residual": True, **shared}


def _write(model: ModelConfig) -> Table:
    keys, heads = common.llama_keys(model), model.n_heads
    del keys["head_dim"]  # not a key of Falcon
    is_new = not model.shared_norm or 1 < model.kv_heads < heads
    return {
        **keys,
        "bias": model.qkv_bias and model.o_bias and model.mlp_bias,
        "new_decoder_architecture": is_new,
        "multi_query": model.kv_heads == 1,
        "num_key_value_heads": model.kv_heads if is_new else heads,
        "num_ln_in_parallel_attn": (1 if model.shared_norm else 2) if is_new else None,
        "parallel_attn": True,
        "alibi": False,
        "hidden_dropout": 0.0,
    }


FAMILY = Family(
    "falcon",
    name_map("hf-falcon", "FalconForCausalLM", *_RULES),
    {**{key: value for key, value in COMMON.items() if key != "head_dim"}, "intermediate_size": 0,
     "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
     "hidden_act": "gelu", "bias": False, "new_decoder_architecture": False, "multi_query": True,
     "num_ln_in_parallel_attn": None},
    read=_read,
    write=_write,
    only={"alibi": False, "parallel_attn": True, "apply_residual_connection_post_layernorm": False},
    names={"layer_norm_epsilon": "rms_norm_eps", "ffn_hidden_size": "intermediate_size",
           "activation": "hidden_act", "num_kv_heads": "num_key_value_heads"},
    requires_head_divisor=True,
)  # fmt: skip
