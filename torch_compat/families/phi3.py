"""Phi-3 and Phi-4 (arXiv:2404.14219): fused projections, LongRoPE, partial rotary positions."""

from jaxforge.config.model import ModelConfig
from torch_compat.families import common
from torch_compat.families.common import COMMON
from torch_compat.families.family import (
    HF_NAME,
    NAME,
    OUTSIDE,
    PRE_NORMS,
    Config,
    Family,
    Table,
    consecutive_rows,
    fused,
    name_map,
    queries_keys_values,
)
from torch_compat.names.table import Rule

_QKV = tuple(f"{NAME}attention.{m}_proj.weight" for m in "qkv")
_GATE_UP = tuple(f"{NAME}mlp.{m}_proj.weight" for m in ("gate", "up"))
_RULES = (
    *OUTSIDE,
    *PRE_NORMS,
    *fused(_QKV, f"{HF_NAME}self_attn.qkv_proj.weight", queries_keys_values),
    Rule(f"{NAME}attention.o_proj.weight", f"{HF_NAME}self_attn.o_proj.weight"),
    *fused(
        _GATE_UP,
        f"{HF_NAME}mlp.gate_up_proj.weight",
        lambda m: consecutive_rows(m.ffn_dim, m.ffn_dim),
    ),
    Rule(f"{NAME}mlp.down_proj.weight", f"{HF_NAME}mlp.down_proj.weight"),
)


def _read(c: Config, where: str) -> Table:
    key = "rope_scaling" if c["rope_scaling"] else "rope_parameters"
    scaling = dict(c[key] or {})
    kind = scaling.pop("type", "default") if "rope_type" not in scaling else scaling["rope_type"]
    # The first files of Phi-3 say "su" or "yarn" for LongRoPE.
    scaling["rope_type"] = "longrope" if kind in ("su", "yarn") else kind
    table = common.shape(c) | common.feed_forward(c, where) | common.uniform_window(c, where)
    return table | common.rotary({**c, key: scaling}, where, partial=1.0)


def _write(model: ModelConfig) -> Table:
    keys = {**common.llama_keys(model), **common.rotary_keys(model, partial=True)}
    keys |= common.window_keys(model)
    if scaling := model.rope_scaling:  # transformers 4 allows only these three keys
        factors = {key: list(getattr(scaling, key)) for key in ("short_factor", "long_factor")}
        keys["rope_scaling"] = {"type": scaling.rope_type, **factors}
        keys["original_max_position_embeddings"] = scaling.original_max_seq_len
    return {**keys, "resid_pdrop": 0.0, "embd_pdrop": 0.0}


PHI3_FAMILY = Family(
    "phi3",
    name_map("hf-phi3", "Phi3ForCausalLM", *_RULES),
    {**COMMON, "rms_norm_eps": 1e-5, "sliding_window": None, "partial_rotary_factor": None,
     "original_max_position_embeddings": 4096},
    summary="Phi-3, 3.5 (mini, medium), Phi-4, 4-mini: fused projections, LongRoPE, partial rotary "
            "positions",
    read=_read,
    write=_write,
    unused=("full_attn_mod", "interpolate_factor"),
    is_usual=True,
)  # fmt: skip
