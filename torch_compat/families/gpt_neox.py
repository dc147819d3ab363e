"""GPT-NeoX (arXiv:2204.06745) and Pythia: parallel residuals, partial rotary positions."""

import numpy as np

from jaxforge.config.model import ModelConfig
from torch_compat.families import common
from torch_compat.families.common import COMMON
from torch_compat.families.family import OURS, Config, Family, Table, fused, name_map
from torch_compat.names.table import EMBEDDING, HEAD, Rule

_LAYER = "gpt_neox.layers.{i}."
_UP, _DOWN = f"{_LAYER}mlp.dense_h_to_4h", f"{_LAYER}mlp.dense_4h_to_h"


def _rows_by_head(model: ModelConfig) -> list[np.ndarray]:
    """Return the rows of `query_key_value`: q, k and v of one head, then of the next."""
    rows = np.arange(3 * model.n_heads * model.head_size)
    return list(rows.reshape(model.n_heads, 3, -1).swapaxes(0, 1).reshape(3, -1))


def _qkv(what: str, *, optional: bool = False) -> tuple[Rule, ...]:
    ours = tuple(f"{OURS}attention.{m}_proj.{what}" for m in "qkv")
    theirs = f"{_LAYER}attention.query_key_value.{what}"
    return fused(ours, theirs, _rows_by_head, optional=optional)


_RULES = (
    Rule(EMBEDDING, "gpt_neox.embed_in.weight"),
    Rule(HEAD, "embed_out.weight"),
    *_qkv("weight"),
    *_qkv("bias", optional=True),
    Rule(f"{OURS}attention.o_proj.weight", f"{_LAYER}attention.dense.weight"),
    Rule(f"{OURS}attention.o_proj.bias", f"{_LAYER}attention.dense.bias", optional=True),
    *(
        rule
        for what in ("weight", "bias")
        for rule in (
            Rule(f"norm.{what}", f"gpt_neox.final_layer_norm.{what}"),
            Rule(f"{OURS}attention_norm.{what}", f"{_LAYER}input_layernorm.{what}"),
            Rule(f"{OURS}mlp_norm.{what}", f"{_LAYER}post_attention_layernorm.{what}"),
            Rule(f"{OURS}mlp.up_proj.{what}", f"{_UP}.{what}"),
            Rule(f"{OURS}mlp.down_proj.{what}", f"{_DOWN}.{what}"),
        )
    ),
)


def _read(c: Config, where: str) -> Table:
    common.check_usual_heads(c, where)
    table = common.shape({**c, "num_key_value_heads": None}) | common.biases(c)
    table |= common.feed_forward(c, where, gated=False)
    table |= common.rotary(c, where, partial=0.25)
    parallel = {"parallel_residual": True} if c["use_parallel_residual"] else {}
    return {**table, "norm_type": "layernorm", "mlp_bias": True, **parallel}


def _write(model: ModelConfig) -> Table:
    keys = {**common.llama_keys(model), **common.rotary_keys(model, partial=True)}
    for key in ("head_dim", "num_key_value_heads"):  # not keys of GPT-NeoX
        del keys[key]
    return {**keys, "attention_bias": model.qkv_bias and model.o_bias,
            "use_parallel_residual": model.parallel_residual, "hidden_dropout": 0.0}  # fmt: skip


FAMILY = Family(
    "gpt_neox",
    name_map(
        "hf-gpt-neox", "GPTNeoXForCausalLM", *_RULES,
        ignored=(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
        renamed=((r"^lm_head\.weight$", "embed_out.weight"),),
    ),
    {**COMMON, "rms_norm_eps": 1e-5, "hidden_act": "gelu", "attention_bias": True,
     "use_parallel_residual": True, "partial_rotary_factor": None},
    read=_read,
    write=_write,
    names={"layer_norm_eps": "rms_norm_eps", "rotary_pct": "partial_rotary_factor",
           "rotary_emb_base": "rope_theta"},
    unused=("classifier_dropout",),
    requires_head_divisor=True,
)  # fmt: skip
