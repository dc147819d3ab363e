"""BLOOM (arXiv:2211.05100): ALiBi, and a LayerNorm of the token embeddings."""

from jaxforge.config.model import ModelConfig
from torch_compat.families import common
from torch_compat.families.common import COMMON
from torch_compat.families.family import OURS, Config, Family, Table, fused, name_map
from torch_compat.names.megatron import rows_by_group
from torch_compat.names.table import EMBEDDING, HEAD, Rule

_LAYER = "transformer.h.{i}."
_NAMES = {
    "token_embedding_norm": "transformer.word_embeddings_layernorm",
    "norm": "transformer.ln_f",
    f"{OURS}attention_norm": f"{_LAYER}input_layernorm",
    f"{OURS}mlp_norm": f"{_LAYER}post_attention_layernorm",
    f"{OURS}attention.o_proj": f"{_LAYER}self_attention.dense",
    f"{OURS}mlp.up_proj": f"{_LAYER}mlp.dense_h_to_4h",
    f"{OURS}mlp.down_proj": f"{_LAYER}mlp.dense_4h_to_h",
}
_RULES = (
    Rule(EMBEDDING, "transformer.word_embeddings.weight"),
    Rule(HEAD, "lm_head.weight"),
    *(
        rule
        for what in ("weight", "bias")
        for rule in (
            *fused(
                tuple(f"{OURS}attention.{m}_proj.{what}" for m in "qkv"),
                f"{_LAYER}self_attention.query_key_value.{what}",
                rows_by_group,
            ),
            *(Rule(f"{name}.{what}", f"{key}.{what}") for name, key in _NAMES.items()),
        )
    ),
)
_OF_TRAINING = ("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion",
                "offset_alibi", "pretraining_tp", "skip_bias_add", "skip_bias_add_qkv",
                "slow_but_exact", "unk_token_id")  # fmt: skip


def _read(c: Config, where: str) -> Table:
    table = common.shape({**c, "intermediate_size": 4 * c["hidden_size"]})
    structure = {"norm_type": "layernorm", "embedding_norm": True, "position_embedding": "alibi",
                 "activation": "gelu_tanh"}  # fmt: skip
    return {**table, **structure, "qkv_bias": True, "o_bias": True, "mlp_bias": True}


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
        "apply_residual_connection_post_layernorm": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


FAMILY = Family(
    "bloom",
    name_map(
        "hf-bloom", "BloomForCausalLM", *_RULES,
        # The first files lack the prefix `transformer.`.
        renamed=((r"^(word_embeddings|word_embeddings_layernorm|h|ln_f)\.", r"transformer.\1."),),
    ),
    {
        **{key: COMMON[key] for key in (
            "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
            "initializer_range",
        )},
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    },
    read=_read,
    write=_write,
    only={"apply_residual_connection_post_layernorm": False},
    names={"n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
           "layer_norm_epsilon": "rms_norm_eps", "seq_length": "max_position_embeddings"},
    aliases={"num_hidden_layers": "num_hidden_layers", "n_embed": "hidden_size",
             "num_attention_heads": "num_attention_heads"},
    unused=_OF_TRAINING,
    requires_head_divisor=True,
)  # fmt: skip
