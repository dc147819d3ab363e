"""StableLM 2 (arXiv:2402.17834): LayerNorm, partial rotary positions, SwiGLU."""

from jaxforge.config.model import ModelConfig
from torch_compat.families import common
from torch_compat.families.common import COMMON
from torch_compat.families.family import LLAMA, OURS, THEIRS, Config, Family, Table, name_map
from torch_compat.names.table import Rule

NORM_BIASES = (
    Rule("norm.bias", "model.norm.bias"),
    Rule(f"{OURS}attention_norm.bias", f"{THEIRS}input_layernorm.bias"),
    Rule(f"{OURS}mlp_norm.bias", f"{THEIRS}post_attention_layernorm.bias"),
)
_BIASES = tuple(
    Rule(f"{OURS}attention.{m}_proj.bias", f"{THEIRS}self_attn.{m}_proj.bias", optional=True)
    for m in "qkv"
)


def _read(c: Config, where: str) -> Table:
    common.check_usual_heads(c, where)
    table = common.shape(c) | common.feed_forward(c, where) | {"norm_type": "layernorm"}
    table |= common.rotary(c, where, partial=0.25)
    return {**table, "qkv_bias": True} if c["use_qkv_bias"] else table


def _write(model: ModelConfig) -> Table:
    keys = {**common.llama_keys(model), **common.rotary_keys(model, partial=True)}
    del keys["head_dim"]  # not a key of StableLM
    return {**keys, "use_qkv_bias": model.qkv_bias, "qk_layernorm": False,
            "use_parallel_residual": False, "hidden_dropout": 0.0}  # fmt: skip


FAMILY = Family(
    "stablelm",
    name_map("hf-stablelm", "StableLmForCausalLM", *LLAMA, *NORM_BIASES, *_BIASES),
    {**COMMON, "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "use_qkv_bias": False,
     "partial_rotary_factor": None},
    read=_read,
    write=_write,
    only={"qk_layernorm": False, "use_parallel_residual": False},
    names={"layer_norm_eps": "rms_norm_eps"},
)  # fmt: skip
