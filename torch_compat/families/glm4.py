"""GLM-4-0414 (9B and 32B): GLM-4 with norms before and after attention and feed-forward."""

from torch_compat.families import glm
from torch_compat.families.family import OURS, OUTSIDE, THEIRS, Config, Family, Table, name_map
from torch_compat.names.table import Rule

_NORMS = (
    Rule(f"{OURS}attention_norm.weight", f"{THEIRS}input_layernorm.weight"),
    Rule(f"{OURS}attention_post_norm.weight", f"{THEIRS}post_self_attn_layernorm.weight"),
    Rule(f"{OURS}mlp_norm.weight", f"{THEIRS}post_attention_layernorm.weight"),
    Rule(f"{OURS}mlp_post_norm.weight", f"{THEIRS}post_mlp_layernorm.weight"),
)


def _read(c: Config, where: str) -> Table:
    return {**glm.read(c, where), "norm_placement": "sandwich"}


FAMILY = Family(
    "glm4",
    name_map("hf-glm4", "Glm4ForCausalLM", *OUTSIDE, *_NORMS, *glm.PROJECTIONS),
    glm.DEFAULTS,
    read=_read,
    write=glm.write,
)
