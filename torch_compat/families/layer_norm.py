"""StableLM 2 and StarCoder 2: Llama with LayerNorm."""

from jaxforge.config.model import ModelConfig
from torch_compat.families import common
from torch_compat.families.common import COMMON
from torch_compat.families.family import (
    ATTENTION,
    ATTENTION_BIASES,
    HF_NAME,
    LLAMA,
    NAME,
    NORM_BIASES,
    OUTSIDE,
    PRE_NORMS,
    Config,
    Family,
    Table,
    name_map,
)
from torch_compat.names.table import Rule

# StableLM 2 (arXiv:2402.17834).

_BIASES = tuple(
    Rule(f"{NAME}attention.{m}_proj.bias", f"{HF_NAME}self_attn.{m}_proj.bias", optional=True)
    for m in "qkv"
)


def _read_stablelm(c: Config, where: str) -> Table:
    common.check_usual_heads(c, where)
    table = common.shape(c) | common.feed_forward(c, where) | {"norm_type": "layernorm"}
    table |= common.rotary(c, where, partial=0.25)
    return {**table, "qkv_bias": True} if c["use_qkv_bias"] else table


def _write_stablelm(model: ModelConfig) -> Table:
    keys = {**common.llama_keys(model), **common.rotary_keys(model, partial=True)}
    del keys["head_dim"]  # not a key of StableLM
    return {**keys, "use_qkv_bias": model.qkv_bias, "qk_layernorm": False,
            "use_parallel_residual": False, "hidden_dropout": 0.0}  # fmt: skip


STABLELM_FAMILY = Family(
    "stablelm",
    name_map("hf-stablelm", "StableLmForCausalLM", *LLAMA, *NORM_BIASES, *_BIASES),
    {**COMMON, "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "use_qkv_bias": False,
     "partial_rotary_factor": None},
    summary="StableLM 3B, 2 1.6B: LayerNorm, partial rotary positions; KempnerForge's LayerNorm "
            "with SwiGLU",
    read=_read_stablelm,
    write=_write_stablelm,
    only={"qk_layernorm": False, "use_parallel_residual": False},
    names={"layer_norm_eps": "rms_norm_eps"},
)  # fmt: skip


# StarCoder 2 (arXiv:2402.19173).

_MLP = (
    Rule(f"{NAME}mlp.up_proj.weight", f"{HF_NAME}mlp.c_fc.weight"),
    Rule(f"{NAME}mlp.down_proj.weight", f"{HF_NAME}mlp.c_proj.weight"),
    Rule(f"{NAME}mlp.up_proj.bias", f"{HF_NAME}mlp.c_fc.bias", optional=True),
    Rule(f"{NAME}mlp.down_proj.bias", f"{HF_NAME}mlp.c_proj.bias", optional=True),
)
_RULES = (*OUTSIDE, *PRE_NORMS, *NORM_BIASES, *ATTENTION, *ATTENTION_BIASES, *_MLP)


def _read_starcoder2(c: Config, where: str) -> Table:
    table = common.shape(c) | common.rotary(c, where) | common.uniform_window(c, where)
    table |= common.feed_forward(c, where, gated=False) | {"norm_type": "layernorm"}
    return table | common.biases({"attention_bias": c["use_bias"], "mlp_bias": c["use_bias"]})


def _write_starcoder2(model: ModelConfig) -> Table:
    bias = model.qkv_bias and model.o_bias and model.mlp_bias
    return {**common.llama_keys(model), **common.window_keys(model), "use_bias": bias,
            "norm_type": "layer_norm", "residual_dropout": 0.0,
            "embedding_dropout": 0.0}  # fmt: skip


STARCODER2_FAMILY = Family(
    "starcoder2",
    name_map("hf-starcoder2", "Starcoder2ForCausalLM", *_RULES),
    {**COMMON, "rms_norm_eps": 1e-5, "num_key_value_heads": 2, "tie_word_embeddings": True,
     "hidden_act": "gelu_pytorch_tanh", "use_bias": True, "sliding_window": None,
     "initializer_range": 0.018042},
    summary="StarCoder 2: two matrices; KempnerForge's LayerNorm with GELU or ReLU",
    read=_read_starcoder2,
    write=_write_starcoder2,
    only={"norm_type": "layer_norm", "mlp_type": "default"},
    names={"norm_epsilon": "rms_norm_eps"},
)  # fmt: skip
