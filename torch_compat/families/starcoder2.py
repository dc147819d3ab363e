"""StarCoder 2 (arXiv:2402.19173): LayerNorm and an ungated feed-forward."""

from jaxforge.config.model import ModelConfig
from torch_compat.families import common
from torch_compat.families.common import COMMON
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
    name_map,
)
from torch_compat.names.table import Rule

_NORM_BIASES = (
    Rule("norm.bias", "model.norm.bias"),
    Rule(f"{OURS}attention_norm.bias", f"{THEIRS}input_layernorm.bias"),
    Rule(f"{OURS}mlp_norm.bias", f"{THEIRS}post_attention_layernorm.bias"),
)
_MLP = (
    Rule(f"{OURS}mlp.up_proj.weight", f"{THEIRS}mlp.c_fc.weight"),
    Rule(f"{OURS}mlp.down_proj.weight", f"{THEIRS}mlp.c_proj.weight"),
    Rule(f"{OURS}mlp.up_proj.bias", f"{THEIRS}mlp.c_fc.bias", optional=True),
    Rule(f"{OURS}mlp.down_proj.bias", f"{THEIRS}mlp.c_proj.bias", optional=True),
)
_RULES = (*OUTSIDE, *PRE_NORMS, *_NORM_BIASES, *ATTENTION, *ATTENTION_BIASES, *_MLP)


def _read(c: Config, where: str) -> Table:
    table = common.shape(c) | common.rotary(c, where) | common.uniform_window(c, where)
    table |= common.feed_forward(c, where, gated=False) | {"norm_type": "layernorm"}
    return table | common.biases({"attention_bias": c["use_bias"], "mlp_bias": c["use_bias"]})


def _write(model: ModelConfig) -> Table:
    bias = model.qkv_bias and model.o_bias and model.mlp_bias
    return {**common.llama_keys(model), **common.window_keys(model), "use_bias": bias,
            "norm_type": "layer_norm", "residual_dropout": 0.0,
            "embedding_dropout": 0.0}  # fmt: skip


FAMILY = Family(
    "starcoder2",
    name_map("hf-starcoder2", "Starcoder2ForCausalLM", *_RULES),
    {**COMMON, "rms_norm_eps": 1e-5, "num_key_value_heads": 2, "tie_word_embeddings": True,
     "hidden_act": "gelu_pytorch_tanh", "use_bias": True, "sliding_window": None,
     "initializer_range": 0.018042},
    read=_read,
    write=_write,
    only={"norm_type": "layer_norm", "mlp_type": "default"},
    names={"norm_epsilon": "rms_norm_eps"},
)  # fmt: skip
