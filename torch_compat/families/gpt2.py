"""GPT-2 (Radford et al., 2019): learned positions, matrices stored as [in, out]."""

from jaxforge.config.model import ModelConfig
from torch_compat.families import common
from torch_compat.families.common import COMMON
from torch_compat.families.family import OURS, Config, Family, Table, fused, name_map
from torch_compat.families.phi3 import queries_keys_values
from torch_compat.names.table import EMBEDDING, HEAD, POSITIONS, Rule, Transposed

_LAYER = "transformer.h.{i}."
_MATRICES = {"attention.o_proj": "attn.c_proj", "mlp.up_proj": "mlp.c_fc",
             "mlp.down_proj": "mlp.c_proj"}  # fmt: skip
_RULES = (
    Rule(EMBEDDING, "transformer.wte.weight"),
    Rule(POSITIONS, "transformer.wpe.weight"),
    Rule(HEAD, "lm_head.weight"),
    *(
        rule
        for what in ("weight", "bias")
        for rule in (
            Rule(f"norm.{what}", f"transformer.ln_f.{what}"),
            Rule(f"{OURS}attention_norm.{what}", f"{_LAYER}ln_1.{what}"),
            Rule(f"{OURS}mlp_norm.{what}", f"{_LAYER}ln_2.{what}"),
            *fused(
                tuple(f"{OURS}attention.{m}_proj.{what}" for m in "qkv"),
                f"{_LAYER}attn.c_attn.{what}",
                queries_keys_values,
                transposed=True,
            ),
        )
    ),
    *(
        Rule(f"{OURS}{ours}.weight", f"{_LAYER}{theirs}.weight", Transposed())
        for ours, theirs in _MATRICES.items()
    ),
    *(
        Rule(f"{OURS}{ours}.bias", f"{_LAYER}{theirs}.bias")
        for ours, theirs in _MATRICES.items()
    ),
)  # fmt: skip


def _read(c: Config, where: str) -> Table:
    inner = c["intermediate_size"] or 4 * c["hidden_size"]
    table = common.shape({**c, "intermediate_size": inner})
    table |= common.feed_forward(c, where, gated=False)
    if not c["scale_attn_weights"]:
        table["attention_scale"] = 1.0
    return {**table, "norm_type": "layernorm", "position_embedding": "learned", "qkv_bias": True,
            "o_bias": True, "mlp_bias": True}  # fmt: skip


def _write(model: ModelConfig) -> Table:
    return {
        **{theirs: getattr(model, ours) for ours, theirs in common.PLAIN.items()},
        "intermediate_size": model.ffn_dim,
        "hidden_act": common.activation_key(model),
        "rms_norm_eps": model.norm_eps,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tie_embeddings,
        "scale_attn_weights": model.attention_scale != 1.0,
        **dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
    }


FAMILY = Family(
    "gpt2",
    name_map(
        "hf-gpt2", "GPT2LMHeadModel", *_RULES,
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
    read=_read,
    write=_write,
    only={"add_cross_attention": False, "scale_attn_by_inverse_layer_idx": False},
    names={"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
           "n_positions": "max_position_embeddings", "n_inner": "intermediate_size",
           "activation_function": "hidden_act", "layer_norm_epsilon": "rms_norm_eps"},
    aliases={key: key for key in ("hidden_size", "num_hidden_layers", "num_attention_heads",
                                  "max_position_embeddings")},
    unused=("n_ctx", "reorder_and_upcast_attn", "summary_activation", "summary_first_dropout",
            "summary_proj_to_labels", "summary_type", "summary_use_proj"),
)  # fmt: skip
