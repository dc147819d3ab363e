"""Bamba: layers of Mamba-2 and of attention, each with a feed-forward."""

import itertools

from jaxforge.config.model import ATTENTION, ModelConfig
from torch_compat.families import common, state_space
from torch_compat.families.common import BIASES, COMMON, FULL
from torch_compat.families.family import (
    ATTENTION as ATTENTION_RULES,
)
from torch_compat.families.family import (
    ATTENTION_BIASES,
    OURS,
    OUTSIDE,
    THEIRS,
    Config,
    Family,
    Table,
    name_map,
)
from torch_compat.names.table import Rule

_PARTIAL = 0.5  # fraction of a head with rotary positions, which files do not give
_RULES = (
    *(rule for rule in OUTSIDE if rule.name != "norm.weight"),
    Rule("norm.weight", "model.final_layernorm.weight"),
    Rule(f"{OURS}attention_norm.weight", f"{THEIRS}input_layernorm.weight"),
    Rule(f"{OURS}mlp_norm.weight", f"{THEIRS}pre_ff_layernorm.weight"),
    *ATTENTION_RULES,
    *ATTENTION_BIASES,
    *(
        Rule(f"{OURS}mlp.{m}_proj.{kind}", f"{THEIRS}feed_forward.{m}_proj.{kind}",
             optional=kind == "bias")
        for m, kind in itertools.product(("gate", "up", "down"), ("weight", "bias"))
    ),
    *state_space.mamba2_rules(f"{THEIRS}mamba."),
)  # fmt: skip


def _read(c: Config, where: str) -> Table:
    attending, n_layers = c["attn_layer_indices"] or (), c["num_hidden_layers"]
    kinds = [FULL if i in attending else state_space.LINEAR for i in range(n_layers)]
    table = common.shape(c) | common.feed_forward(c, where) | common.biases(c)
    table |= common.rotary(c, where, partial=_PARTIAL)
    return table | state_space.mixers(kinds, n_layers, where) | state_space.mamba2(c, where)


def _write(model: ModelConfig) -> Table:
    parts = enumerate(model.layer_parts)
    return {
        **common.llama_keys(model),
        **common.rotary_keys(model, partial=True),
        **common.bias_keys(model),
        **state_space.mamba2_keys(model),
        "attn_layer_indices": [i for i, (mixer, _) in parts if mixer == ATTENTION],
    }


FAMILY = Family(
    "bamba",
    name_map("hf-bamba", "BambaForCausalLM", *_RULES),
    {**COMMON, **BIASES, **state_space.DEFAULTS, "rms_norm_eps": 1e-5, "num_key_value_heads": 8,
     "attn_layer_indices": None, "partial_rotary_factor": None},
    read=_read,
    write=_write,
    only={"hidden_act": "silu"},  # also the activation of convolutions
    unused=("num_logits_to_keep", "z_loss_coefficient", "use_mamba_kernels"),
)  # fmt: skip
