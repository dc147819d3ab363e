"""Command R and R+: a LayerNorm that attention and feed-forward share, scaled logits."""

from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from torch_compat.families import common
from torch_compat.families.common import COMMON
from torch_compat.families.family import (
    GATED,
    OURS,
    OUTSIDE,
    PAIRED_ATTENTION,
    THEIRS,
    Config,
    Family,
    Table,
    name_map,
)
from torch_compat.names.table import InterleavedRotaryOfHeads, Rule

_NORM = Rule(f"{OURS}shared_norm.weight", f"{THEIRS}input_layernorm.weight")
_QK_NORMS = tuple(
    Rule(f"{OURS}attention.{m}_norm.weight", f"{THEIRS}self_attn.{m}_norm.weight",
         InterleavedRotaryOfHeads(), optional=True)
    for m in "qk"
)  # fmt: skip
RULES = (*OUTSIDE, _NORM, *PAIRED_ATTENTION, *GATED)
DEFAULTS = {
    **COMMON, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True,
    "attention_bias": False, "logit_scale": 0.0625, "use_qk_norm": False,
}  # fmt: skip
NAMES = {"layer_norm_eps": "rms_norm_eps"}


def read(c: Config, where: str) -> Table:
    """Read a model without windows."""
    if c["logit_scale"] is None:
        raise UserError(f"{where}: logit_scale = None is not possible for a model")
    norms = {"qk_norm": True, "qk_norm_type": "layernorm", "qk_norm_scope": "each_head",
             "qk_norm_eps": c["rms_norm_eps"]}  # fmt: skip
    structure = {"norm_type": "layernorm", "norm_bias": False, "parallel_residual": True,
                 "shared_norm": True, "logits_scaling": 1 / c["logit_scale"]}  # fmt: skip
    return {**common.llama(c, where), **structure, **(norms if c["use_qk_norm"] else {})}


def write(model: ModelConfig) -> Table:
    """Return the keys that `read` reads."""
    keys = {**common.llama_keys(model), "attention_bias": model.qkv_bias and model.o_bias,
            "logit_scale": 1 / model.logits_scaling}  # fmt: skip
    return common.without_usual_head_dim(keys)


FAMILY = Family(
    "cohere",
    name_map("hf-cohere", "CohereForCausalLM", *RULES, *_QK_NORMS),
    DEFAULTS,
    read=read,
    write=lambda model: {**write(model), "use_qk_norm": model.qk_norm},
    names=NAMES,
    unused=("model_max_length", "pretraining_tp"),
)
