"""Phi-1, 1.5 and 2 (arXiv:2306.11644): a norm shared in parallel, biases, also of the head."""

from jaxforge.config.model import ModelConfig
from torch_compat.families import common
from torch_compat.families.common import COMMON
from torch_compat.families.family import OURS, THEIRS, Config, Family, Table, name_map
from torch_compat.names.table import EMBEDDING, HEAD, HEAD_BIAS, Rule

_RULES = (
    Rule(EMBEDDING, "model.embed_tokens.weight"),
    Rule(HEAD, "lm_head.weight"),
    Rule(HEAD_BIAS, "lm_head.bias"),
    *(
        rule
        for what in ("weight", "bias")
        for rule in (
            Rule(f"norm.{what}", f"model.final_layernorm.{what}"),
            Rule(f"{OURS}shared_norm.{what}", f"{THEIRS}input_layernorm.{what}"),
            *(
                Rule(f"{OURS}attention.{m}_proj.{what}", f"{THEIRS}self_attn.{m}_proj.{what}")
                for m in "qkv"
            ),
            Rule(f"{OURS}attention.o_proj.{what}", f"{THEIRS}self_attn.dense.{what}"),
            Rule(f"{OURS}mlp.up_proj.{what}", f"{THEIRS}mlp.fc1.{what}"),
            Rule(f"{OURS}mlp.down_proj.{what}", f"{THEIRS}mlp.fc2.{what}"),
        )
    ),
)


def _read(c: Config, where: str) -> Table:
    table = common.shape(c) | common.feed_forward(c, where, gated=False)
    table |= common.rotary(c, where, partial=0.5)
    table |= dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias", "head_bias"), True)
    return {**table, "norm_type": "layernorm", "parallel_residual": True, "shared_norm": True}


def _write(model: ModelConfig) -> Table:
    keys = {**common.llama_keys(model), **common.rotary_keys(model, partial=True)}
    keys = common.without_usual_head_dim(keys)
    return {**keys, "qk_layernorm": False, "tie_word_embeddings": False, "resid_pdrop": 0.0,
            "embd_pdrop": 0.0}  # fmt: skip


FAMILY = Family(
    "phi",
    name_map("hf-phi", "PhiForCausalLM", *_RULES),
    {**COMMON, "rms_norm_eps": 1e-5, "hidden_act": "gelu_new", "partial_rotary_factor": None},
    read=_read,
    write=_write,
    only={"qk_layernorm": False, "tie_word_embeddings": False},
    names={"layer_norm_eps": "rms_norm_eps"},
    requires_head_divisor=True,
)
