"""Cohere's models: Command R, R+, R7B and A."""

from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from torch_compat.families import common
from torch_compat.families.common import COMMON, FULL, SLIDING
from torch_compat.families.family import (
    GATED,
    HF_NAME,
    NAME,
    OUTSIDE,
    PAIRED_ATTENTION,
    Config,
    Family,
    Table,
    name_map,
)
from torch_compat.names.table import InterleavedRotaryOfHeads, Rule

# Command R and R+.

_NORM = Rule(f"{NAME}shared_norm.weight", f"{HF_NAME}input_layernorm.weight")
_QK_NORMS = tuple(
    Rule(f"{NAME}attention.{m}_norm.weight", f"{HF_NAME}self_attn.{m}_norm.weight",
         InterleavedRotaryOfHeads(), optional=True)
    for m in "qk"
)  # fmt: skip
_RULES = (*OUTSIDE, _NORM, *PAIRED_ATTENTION, *GATED)
_COHERE_DEFAULTS = {
    **COMMON, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True,
    "attention_bias": False, "logit_scale": 0.0625, "use_qk_norm": False,
}  # fmt: skip
_NAMES = {"layer_norm_eps": "rms_norm_eps"}


def _read_cohere(c: Config, where: str) -> Table:
    """Read a model without windows."""
    norms = {"qk_norm": True, "qk_norm_type": "layernorm", "qk_norm_scope": "each_head",
             "qk_norm_eps": c["rms_norm_eps"]}  # fmt: skip
    # jaxforge divides logits by logits_scaling; transformers multiplies by logit_scale.
    structure = {"norm_type": "layernorm", "norm_bias": False, "parallel_residual": True,
                 "shared_norm": True, "logits_scaling": 1 / c["logit_scale"]}  # fmt: skip
    return {**common.llama(c, where), **structure, **(norms if c["use_qk_norm"] else {})}


def _write_cohere(model: ModelConfig) -> Table:
    """Return the keys that `_read_cohere` reads."""
    keys = {**common.llama_keys(model), "attention_bias": model.qkv_bias and model.o_bias,
            "logit_scale": 1 / model.logits_scaling}  # fmt: skip
    return common.without_usual_head_dim(keys)


COHERE_FAMILY = Family(
    "cohere",
    name_map("hf-cohere", "CohereForCausalLM", *_RULES, *_QK_NORMS),
    _COHERE_DEFAULTS,
    summary="Command R, R+: a shared LayerNorm without bias in parallel blocks, scaled logits",
    read=_read_cohere,
    write=lambda model: {**_write_cohere(model), "use_qk_norm": model.qk_norm},
    names=_NAMES,
    unused=("model_max_length", "pretraining_tp"),
)


# Command R7B and Command A.

_COHERE2_DEFAULTS = {key: value for key, value in _COHERE_DEFAULTS.items() if key != "use_qk_norm"}


def _read_cohere2(c: Config, where: str) -> Table:
    if c["sliding_window"] is None:
        raise UserError(
            f"{where}: sliding_window = None: layers without a window have no positions"
        )
    kinds = common.sliding_kinds(c)
    table = _read_cohere({**c, "use_qk_norm": False}, where) | common.windows(c, kinds, where)
    pattern = [kind == SLIDING for kind in kinds]
    return table if all(pattern) else {**table, "rope_pattern": pattern}


def _write_cohere2(model: ModelConfig) -> Table:
    return {
        **_write_cohere(model),
        # Never null: a window as long as the longest sequence has no effect.
        "sliding_window": model.sliding_window or model.max_seq_len,
        "layer_types": [FULL if rope is None else SLIDING for rope in model.ropes],
    }


COHERE2_FAMILY = Family(
    "cohere2",
    name_map("hf-cohere2", "Cohere2ForCausalLM", *_RULES),
    {**_COHERE2_DEFAULTS, "rope_theta": 10000.0, "sliding_window": 4096, "layer_types": None,
     "sliding_window_pattern": 4},
    summary="Command R7B, Command A: Command R with windows, and positions only in layers with one",
    read=_read_cohere2,
    write=_write_cohere2,
    only={"use_qk_norm": False, "use_gated_activation": True, "use_parallel_block": True,
          "position_embedding_type": "rope_gptj", "rotary_pct": 1.0},
    names=_NAMES,
    aliases={"_sliding_window_pattern": "sliding_window_pattern"},
    unused=("cache_implementation", "order_of_interleaved_layers", "use_embedding_sharing",
            "use_parallel_embedding"),
)  # fmt: skip
