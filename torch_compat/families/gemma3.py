"""Gemma 3's text models (arXiv:2503.19786): Gemma 2 with q/k norms and two rotary bases."""

from jaxforge.config.model import ModelConfig
from torch_compat.families import common, gemma, gemma2
from torch_compat.families.family import QK_NORMS, Config, Family, Table, name_map

_LOCAL_THETA = 10000.0


def _read(c: Config, where: str) -> Table:
    kinds = common.sliding_kinds(c)
    positions = common.rotary_by_layer_kind(c, where, c["rope_local_base_freq"])
    differ = "local_rope_theta" in positions
    table = gemma2.read(c, where) | common.windows(c, kinds, where, differ=differ)
    if "sliding_window" not in table:
        positions.pop("local_rope_theta", None)
    return table | positions | {"qk_norm": True, "qk_norm_eps": c["rms_norm_eps"]}


def _write(model: ModelConfig) -> Table:
    local = model.rope_theta if model.local_rope_theta is None else model.local_rope_theta
    old = {"rope_theta": model.rope_theta, "rope_local_base_freq": local}  # transformers 4
    return {**gemma2.write(model), **old, **common.rotary_by_layer_kind_keys(model)}


FAMILY = Family(
    "gemma3_text",
    name_map("hf-gemma3", "Gemma3ForCausalLM", *gemma2.RULES, *QK_NORMS),
    {**gemma.DEFAULTS, "num_key_value_heads": 4, "query_pre_attn_scalar": 256,
     "sliding_window": 4096, "layer_types": None, "attn_logit_softcapping": None,
     "final_logit_softcapping": None, "rope_theta": 1e6, "rope_local_base_freq": _LOCAL_THETA,
     "sliding_window_pattern": 6},
    read=_read,
    write=_write,
    only={**gemma.ONLY, "attn_logit_softcapping": None},  # transformers has it and ignores it
    aliases={"_sliding_window_pattern": "sliding_window_pattern"},
    unused=gemma2.UNUSED,
    requires_head_divisor=True,
)  # fmt: skip
