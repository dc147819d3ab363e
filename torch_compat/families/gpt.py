"""GPT-2, GPT-NeoX and gpt-oss."""

import numpy as np

from jaxforge.config.model import ModelConfig
from torch_compat.families import common, experts
from torch_compat.families.common import COMMON, FULL, SLIDING
from torch_compat.families.family import (
    ATTENTION,
    ATTENTION_BIASES,
    HF_NAME,
    NAME,
    OUTSIDE,
    PRE_NORMS,
    Config,
    Family,
    Table,
    fused,
    name_map,
    queries_keys_values,
)
from torch_compat.families.values import integer, nullable
from torch_compat.names.table import EMBEDDING, HEAD, POSITIONS, Rule, Transposed

# GPT-2 (Radford et al., 2019).

_GPT2_LAYER = "transformer.h.{i}."
_MATRICES = {"attention.o_proj": "attn.c_proj", "mlp.up_proj": "mlp.c_fc",
             "mlp.down_proj": "mlp.c_proj"}  # fmt: skip
_GPT2_RULES = (
    Rule(EMBEDDING, "transformer.wte.weight"),
    Rule(POSITIONS, "transformer.wpe.weight"),
    Rule(HEAD, "lm_head.weight"),
    *(
        rule
        for what in ("weight", "bias")
        for rule in (
            Rule(f"norm.{what}", f"transformer.ln_f.{what}"),
            Rule(f"{NAME}attention_norm.{what}", f"{_GPT2_LAYER}ln_1.{what}"),
            Rule(f"{NAME}mlp_norm.{what}", f"{_GPT2_LAYER}ln_2.{what}"),
            *fused(
                tuple(f"{NAME}attention.{m}_proj.{what}" for m in "qkv"),
                f"{_GPT2_LAYER}attn.c_attn.{what}",
                queries_keys_values,
                transposed=True,
            ),
        )
    ),
    *(
        Rule(f"{NAME}{name}.weight", f"{_GPT2_LAYER}{hf_name}.weight", Transposed())
        for name, hf_name in _MATRICES.items()
    ),
    *(
        Rule(f"{NAME}{name}.bias", f"{_GPT2_LAYER}{hf_name}.bias")
        for name, hf_name in _MATRICES.items()
    ),
)  # fmt: skip


def _read_gpt2(c: Config, where: str) -> Table:
    # A null n_inner means four times the width.
    inner = c["intermediate_size"] or 4 * c["hidden_size"]
    table = common.shape({**c, "intermediate_size": inner})
    table |= common.feed_forward(c, where, gated=False)
    if not c["scale_attn_weights"]:
        table["attention_scale"] = 1.0
    return {**table, "norm_type": "layernorm", "position_embedding": "learned", "qkv_bias": True,
            "o_bias": True, "mlp_bias": True}  # fmt: skip


def _write_gpt2(model: ModelConfig) -> Table:
    return {
        **{hf_key: getattr(model, key) for key, hf_key in common.PLAIN.items()},
        "intermediate_size": model.ffn_dim,
        "hidden_act": common.activation_key(model),
        "rms_norm_eps": model.norm_eps,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tie_embeddings,
        "scale_attn_weights": model.attention_scale != 1.0,
        **dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
    }


GPT2_FAMILY = Family(
    "gpt2",
    name_map(
        "hf-gpt2", "GPT2LMHeadModel", *_GPT2_RULES,
        ignored=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
        # The first files lack the prefix `transformer.`.
        renamed=((r"^(wte|wpe|h|ln_f)\.", r"transformer.\1."),),
    ),
    {
        **{key: COMMON[key] for key in (
            "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
            "max_position_embeddings", "initializer_range",
        )},
        "intermediate_size": 0, "hidden_act": "gelu_new", "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True, "scale_attn_weights": True,
    },
    summary="GPT-2: learned positions, matrices stored as [in, out]",
    read=_read_gpt2,
    write=_write_gpt2,
    ranges={"intermediate_size": nullable(integer())},
    only={"add_cross_attention": False, "scale_attn_by_inverse_layer_idx": False},
    names={"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
           "n_positions": "max_position_embeddings", "n_inner": "intermediate_size",
           "activation_function": "hidden_act", "layer_norm_epsilon": "rms_norm_eps"},
    aliases={key: key for key in ("hidden_size", "num_hidden_layers", "num_attention_heads",
                                  "max_position_embeddings")},
    unused=("n_ctx", "reorder_and_upcast_attn", "summary_activation", "summary_first_dropout",
            "summary_proj_to_labels", "summary_type", "summary_use_proj"),
)  # fmt: skip


# GPT-NeoX (arXiv:2204.06745) and Pythia.

_GPT_NEOX_LAYER = "gpt_neox.layers.{i}."
_UP, _DOWN = f"{_GPT_NEOX_LAYER}mlp.dense_h_to_4h", f"{_GPT_NEOX_LAYER}mlp.dense_4h_to_h"


def _rows_by_head(model: ModelConfig) -> list[np.ndarray]:
    """Return the rows of `query_key_value`: q, k and v of one head, then of the next."""
    rows = np.arange(3 * model.n_heads * model.head_size)
    # [heads, 3, channels] -> [3, heads * channels]
    return list(rows.reshape(model.n_heads, 3, -1).swapaxes(0, 1).reshape(3, -1))


def _qkv(what: str, *, optional: bool = False) -> tuple[Rule, ...]:
    names = tuple(f"{NAME}attention.{m}_proj.{what}" for m in "qkv")
    theirs = f"{_GPT_NEOX_LAYER}attention.query_key_value.{what}"
    return fused(names, theirs, _rows_by_head, optional=optional)


_GPT_NEOX_RULES = (
    Rule(EMBEDDING, "gpt_neox.embed_in.weight"),
    Rule(HEAD, "embed_out.weight"),
    *_qkv("weight"),
    *_qkv("bias", optional=True),
    Rule(f"{NAME}attention.o_proj.weight", f"{_GPT_NEOX_LAYER}attention.dense.weight"),
    Rule(f"{NAME}attention.o_proj.bias", f"{_GPT_NEOX_LAYER}attention.dense.bias", optional=True),
    *(
        rule
        for what in ("weight", "bias")
        for rule in (
            Rule(f"norm.{what}", f"gpt_neox.final_layer_norm.{what}"),
            Rule(f"{NAME}attention_norm.{what}", f"{_GPT_NEOX_LAYER}input_layernorm.{what}"),
            Rule(f"{NAME}mlp_norm.{what}", f"{_GPT_NEOX_LAYER}post_attention_layernorm.{what}"),
            Rule(f"{NAME}mlp.up_proj.{what}", f"{_UP}.{what}"),
            Rule(f"{NAME}mlp.down_proj.{what}", f"{_DOWN}.{what}"),
        )
    ),
)


def _read_gpt_neox(c: Config, where: str) -> Table:
    common.check_usual_heads(c, where)
    table = common.shape({**c, "num_key_value_heads": None}) | common.biases(c)
    table |= common.feed_forward(c, where, gated=False)
    table |= common.rotary(c, where, partial=0.25)
    parallel = {"parallel_residual": True} if c["use_parallel_residual"] else {}
    return {**table, "norm_type": "layernorm", "mlp_bias": True, **parallel}


def _write_gpt_neox(model: ModelConfig) -> Table:
    keys = {**common.llama_keys(model), **common.rotary_keys(model, partial=True)}
    for key in ("head_dim", "num_key_value_heads"):  # not keys of GPT-NeoX
        del keys[key]
    return {**keys, "attention_bias": model.qkv_bias and model.o_bias,
            "use_parallel_residual": model.parallel_residual, "hidden_dropout": 0.0}  # fmt: skip


GPT_NEOX_FAMILY = Family(
    "gpt_neox",
    name_map(
        "hf-gpt-neox", "GPTNeoXForCausalLM", *_GPT_NEOX_RULES,
        ignored=(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
        renamed=((r"^lm_head\.weight$", "embed_out.weight"),),
    ),
    {**COMMON, "rms_norm_eps": 1e-5, "hidden_act": "gelu", "attention_bias": True,
     "use_parallel_residual": True, "partial_rotary_factor": None},
    summary="GPT-NeoX, Pythia: parallel residuals, fused projections, biases everywhere",
    read=_read_gpt_neox,
    write=_write_gpt_neox,
    names={"layer_norm_eps": "rms_norm_eps", "rotary_pct": "partial_rotary_factor",
           "rotary_emb_base": "rope_theta"},
    unused=("classifier_dropout",),
    requires_head_divisor=True,
)  # fmt: skip


# gpt-oss (arXiv:2508.10925): attention sinks, a clamped SwiGLU, windows in every other layer.

_EXPERTS = f"{HF_NAME}mlp.experts."
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
    names = tuple(f"{NAME}mlp.experts.{{j}}.{m}_proj.{what}" for m in ("gate", "up"))
    return fused(names, f"{_EXPERTS}{theirs}", _alternating_rows, transposed=True)


_GPT_OSS_RULES = (
    *OUTSIDE,
    *PRE_NORMS,
    *ATTENTION,
    *ATTENTION_BIASES,
    Rule(f"{NAME}attention.sinks", f"{HF_NAME}self_attn.sinks"),
    *(
        Rule(f"{NAME}mlp.router.gate.{what}", f"{HF_NAME}mlp.router.{what}")
        for what in ("weight", "bias")
    ),
    *_gate_up("weight", "gate_up_proj"),
    *_gate_up("bias", "gate_up_proj_bias"),
    Rule(f"{NAME}mlp.experts.{{j}}.down_proj.weight", f"{_EXPERTS}down_proj", Transposed()),
    Rule(f"{NAME}mlp.experts.{{j}}.down_proj.bias", f"{_EXPERTS}down_proj_bias"),
)


def _read_gpt_oss(c: Config, where: str) -> Table:
    kinds = c["layer_types"] or [(SLIDING, FULL)[i % 2] for i in range(c["num_hidden_layers"])]
    positions = {**c, "rope_parameters": c["rope_parameters"] or _YARN}
    return {
        **common.shape(c),
        **common.rotary(positions, where),
        **common.biases(c),
        **common.windows(c, kinds, where),
        # A softmax over the chosen experts alone equals normalized weights of a softmax over all.
        **experts.softmax({**c, "norm_topk_prob": True}, *_SIZES),
        "attention_sinks": True,
        "activation": "swiglu_oai",
        "swiglu_limit": c["swiglu_limit"],
        "mlp_bias": True,
        "moe_router_bias": True,
    }


def _write_gpt_oss(model: ModelConfig) -> Table:
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


GPT_OSS_FAMILY = Family(
    "gpt_oss",
    name_map("hf-gpt-oss", "GptOssForCausalLM", *_GPT_OSS_RULES),
    {**COMMON, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5,
     "rope_theta": 150000.0, "attention_bias": True, "sliding_window": 128, "layer_types": None,
     "num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_limit": 7.0},
    summary="gpt-oss, in bfloat16: attention sinks, a clamped SwiGLU, biases everywhere; all "
            "experts of a layer in one tensor, gate and up interleaved",
    read=_read_gpt_oss,
    write=_write_gpt_oss,
    only={"swiglu_alpha": _ALPHA},
    unused=("experts_per_token", "initial_context_length", *experts.LOSSES),
    float32={"float16": r"(.*_)?norm\.weight"},
)  # fmt: skip
