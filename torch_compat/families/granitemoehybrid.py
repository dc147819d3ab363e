"""Granite 4: layers of Mamba-2 and of attention, with experts and a shared expert or without.

In models without experts, the feed-forward is what is elsewhere the shared expert.
"""

import reprlib

from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from torch_compat.families import common, experts, granitemoe, state_space
from torch_compat.families.family import OURS, THEIRS, Config, Family, Table, fused, name_map
from torch_compat.families.granite import multiplier_keys, multipliers
from torch_compat.families.granitemoeshared import SHARED, WIDTH
from torch_compat.families.phi3 import consecutive_rows
from torch_compat.names.table import Rule

_ROPE = "position_embedding_type"
_DENSE = (
    *fused(
        (f"{OURS}mlp.gate_proj.weight", f"{OURS}mlp.up_proj.weight"),
        f"{THEIRS}shared_mlp.input_linear.weight",
        lambda m: consecutive_rows(m.ffn_dim, m.ffn_dim),
    ),
    Rule(f"{OURS}mlp.down_proj.weight", f"{THEIRS}shared_mlp.output_linear.weight"),
)


def _read(c: Config, where: str) -> Table:
    n_layers = c["num_hidden_layers"]
    kinds = c["layer_types"] or [state_space.LINEAR] * n_layers
    table = common.llama(c, where) | multipliers(c)
    table |= state_space.mixers(kinds, n_layers, where) | state_space.mamba2(c, where)
    if c[_ROPE] not in (None, "nope", "rope"):
        raise UserError(
            f'{where}: position_embedding_type = {reprlib.repr(c[_ROPE])} is not one of "rope", '
            '"nope" and null'
        )
    if c[_ROPE] != "rope":
        table["rope_pattern"] = [False]
    if not c["num_local_experts"]:
        return table | {"ffn_hidden_dim": c[WIDTH]}
    routed = experts.softmax({**c, "norm_topk_prob": True}, *granitemoe.SIZES)
    return table | routed | {"moe_shared_experts": 1, "moe_shared_expert_dim": c[WIDTH]}


def _write(model: ModelConfig) -> Table:
    has_rope = any(rope is not None for rope in model.ropes)
    keys = {
        **common.llama_keys(model),
        **multiplier_keys(model),
        **state_space.mamba2_keys(model),
        "attention_bias": model.qkv_bias and model.o_bias,
        "layer_types": state_space.layer_kinds(model),
        _ROPE: "rope" if has_rope else "nope",
        "num_local_experts": model.num_experts,
        WIDTH: model.shared_expert_dim if model.is_moe else model.ffn_dim,
    }
    if model.is_moe:
        keys |= experts.softmax_keys(model, *granitemoe.SIZES)
    return {key: value for key, value in keys.items() if key != "norm_topk_prob"}


FAMILY = Family(
    "granitemoehybrid",
    name_map(
        "hf-granitemoehybrid", "GraniteMoeHybridForCausalLM", *granitemoe.RULES, *SHARED, *_DENSE,
        *state_space.mamba2_rules(f"{THEIRS}mamba."), renamed=granitemoe.RENAMED,
    ),
    {**granitemoe.DEFAULTS, **state_space.DEFAULTS, WIDTH: 1024, "layer_types": None, _ROPE: None},
    read=_read,
    write=_write,
    only={"hidden_act": "silu"},  # also the activation of convolutions
    aliases={"layers_block_type": "layer_types"},
    unused=(*experts.LOSSES, "use_mamba_kernels"),
    experts_are_optional=True,
)  # fmt: skip
