"""Text models of Qwen 3.5: Qwen3-Next's layers, with a projection each and dense feed-forwards."""

from torch_compat.families import qwen3_next
from torch_compat.families.common import COMMON
from torch_compat.families.family import GATED, Config, Family, Table, fused, name_map
from torch_compat.families.qwen3_next import (
    LAYER_DEFAULTS,
    LAYER_RULES,
    LEFT_OUT,
    LINEAR_NAME,
    layer_keys,
    projections,
    queries_keys_values,
    read_layers,
)
from torch_compat.names.table import Rule

_OF_IMAGES = ("mrope_section", "mrope_interleaved")


def read(c: Config, where: str) -> Table:
    """Read the layers; text has the same position in all three dimensions of rotary positions."""
    given = c["rope_parameters"]
    if isinstance(given, dict):
        given = {key: value for key, value in given.items() if key not in _OF_IMAGES}
    return read_layers({**c, "rope_parameters": given}, where)


_SINGLE = {"gate": "z", "beta": "b", "decay": "a"}
RULES = (
    *LAYER_RULES,
    *fused(projections("q", "k", "v"), f"{LINEAR_NAME}in_proj_qkv.weight", queries_keys_values),
    *(
        Rule(projections(ours)[0], f"{LINEAR_NAME}in_proj_{theirs}.weight")
        for ours, theirs in _SINGLE.items()
    ),
)
"""Rules of everything but feed-forwards."""
UNUSED = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype")
"""Keys of further layers, and of the state's dtype, which is always float32 here."""
ONLY = {**qwen3_next.ONLY, "attn_output_gate": True}

FAMILY = Family(
    "qwen3_5_text",
    name_map("hf-qwen3-5", "Qwen3_5ForCausalLM", *RULES, *GATED, optional_groups=LEFT_OUT),
    {**COMMON, **LAYER_DEFAULTS, "num_key_value_heads": 4},
    read=read,
    write=layer_keys,
    only=ONLY,
    unused=UNUSED,
)
