"""IBM's models: Granite 3 and 4, and Bamba."""

import itertools
import reprlib

from jaxforge.config.model import ATTENTION as ATTENTION_MIXER
from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from torch_compat.families import common, experts, state_space
from torch_compat.families.common import BIASES, COMMON, FULL
from torch_compat.families.family import (
    ATTENTION,
    ATTENTION_BIASES,
    GATED_BIASES,
    HF_NAME,
    LLAMA,
    NAME,
    OUTSIDE,
    PRE_NORMS,
    Config,
    Family,
    Table,
    consecutive_rows,
    fused,
    name_map,
)
from torch_compat.families.values import LAYER, integer, list_of
from torch_compat.names.table import Rule

# Granite 3.

_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")


def _multipliers(c: Config) -> Table:
    """Read the multipliers of embeddings, residuals, scores and logits."""
    values = {key: float(c[key]) for key in _MULTIPLIERS if c[key] != 1}
    return values | common.scale(c["attention_multiplier"], c)


def _multiplier_keys(model: ModelConfig) -> Table:
    """Return the keys that `_multipliers` reads."""
    return {
        **{key: getattr(model, key) for key in _MULTIPLIERS},
        "attention_multiplier": model.attention_scale or model.head_size**-0.5,
    }


_MULTIPLIER_DEFAULTS = {**dict.fromkeys(_MULTIPLIERS, 1.0), "attention_multiplier": 1.0}
"""Keys of multipliers and their defaults in transformers."""


def _read_granite(c: Config, where: str) -> Table:
    return common.llama(c, where) | _multipliers(c)


def _write_granite(model: ModelConfig) -> Table:
    return {**common.llama_keys(model), **common.bias_keys(model), **_multiplier_keys(model)}


GRANITE_FAMILY = Family(
    "granite",
    name_map("hf-granite", "GraniteForCausalLM", *LLAMA, *ATTENTION_BIASES, *GATED_BIASES),
    {**COMMON, **BIASES, **_MULTIPLIER_DEFAULTS},
    summary="Granite 3 (dense): multipliers of embeddings, residuals, scores and logits",
    read=_read_granite,
    write=_write_granite,
)


# Granite 3 with experts.
#
# `input_linear` holds gate and up of all experts, [experts, 2 x width, model width].

_MOE = f"{HF_NAME}block_sparse_moe."
_GATE_UP = tuple(f"{NAME}mlp.experts.{{j}}.{m}_proj.weight" for m in ("gate", "up"))
_EXPERTS = (
    Rule(f"{NAME}mlp.router.gate.weight", f"{_MOE}router.layer.weight"),
    *fused(
        _GATE_UP,
        f"{_MOE}input_linear.weight",
        lambda m: consecutive_rows(m.expert_dim, m.expert_dim),
    ),
    Rule(f"{NAME}mlp.experts.{{j}}.down_proj.weight", f"{_MOE}output_linear.weight"),
)
_GRANITEMOE_RULES = (*OUTSIDE, *PRE_NORMS, *ATTENTION, *ATTENTION_BIASES, *_EXPERTS)
_RENAMED = tuple(
    (rf"block_sparse_moe\.{new}$", f"block_sparse_moe.{old}.weight")
    for new, old in (
        (r"experts\.gate_up_proj", "input_linear"),
        (r"experts\.down_proj", "output_linear"),
        (r"router\.weight", "router.layer"),
    )
)
"""Names in the memory of transformers 5 -> names in its files."""
_DEFAULTS = {
    **COMMON, **_MULTIPLIER_DEFAULTS, "attention_bias": False, "num_local_experts": 8,
    "num_experts_per_tok": 2,
}  # fmt: skip
_SIZES = ("num_local_experts", "intermediate_size")


def _read_granitemoe(c: Config, where: str) -> Table:
    """Read a model with experts in every layer."""
    # A softmax over the chosen experts alone equals the normalized weights of a softmax over all.
    routed = experts.softmax({**c, "norm_topk_prob": True}, *_SIZES)
    return common.llama(c, where) | _multipliers(c) | routed


def _write_granitemoe(model: ModelConfig) -> Table:
    """Return the keys that `_read_granitemoe` reads."""
    keys = {
        **common.llama_keys(model),
        **experts.softmax_keys(model, *_SIZES),
        **_multiplier_keys(model),
        "attention_bias": model.qkv_bias and model.o_bias,
    }
    return {key: value for key, value in keys.items() if key != "norm_topk_prob"}


GRANITEMOE_FAMILY = Family(
    "granitemoe",
    name_map("hf-granitemoe", "GraniteMoeForCausalLM", *_GRANITEMOE_RULES, renamed=_RENAMED),
    _DEFAULTS,
    summary="Granite 3 with experts: Granite's multipliers; gate and up of all experts in one "
    "tensor",
    read=_read_granitemoe,
    write=_write_granitemoe,
    unused=experts.LOSSES,
)


# Granite 3 with experts and a shared expert, whose gate and up are one tensor.

_WIDTH = "shared_intermediate_size"
_SHARED_MLP = f"{HF_NAME}shared_mlp."
_SHARED_EXPERT = f"{NAME}mlp.shared_expert."
_SHARED_RULES = (
    *fused(
        (f"{_SHARED_EXPERT}gate_proj.weight", f"{_SHARED_EXPERT}up_proj.weight"),
        f"{_SHARED_MLP}input_linear.weight",
        lambda m: consecutive_rows(m.shared_expert_dim, m.shared_expert_dim),
        optional=True,
    ),
    Rule(f"{_SHARED_EXPERT}down_proj.weight", f"{_SHARED_MLP}output_linear.weight", optional=True),
)


def _read_granitemoeshared(c: Config, where: str) -> Table:
    """Read a model with experts in every layer, and a shared expert unless its width is 0."""
    shared = {"moe_shared_experts": 1, "moe_shared_expert_dim": c[_WIDTH]} if c[_WIDTH] else {}
    return _read_granitemoe(c, where) | shared


def _write_granitemoeshared(model: ModelConfig) -> Table:
    """Return the keys that `_read_granitemoeshared` reads."""
    return {**_write_granitemoe(model), _WIDTH: model.shared_expert_dim}


GRANITEMOESHARED_FAMILY = Family(
    "granitemoeshared",
    name_map(
        "hf-granitemoeshared", "GraniteMoeSharedForCausalLM", *_GRANITEMOE_RULES, *_SHARED_RULES,
        renamed=_RENAMED,
    ),
    {**_DEFAULTS, _WIDTH: 0},
    summary="Granite 3 with experts and a shared expert: as `hf-granitemoe`",
    read=_read_granitemoeshared,
    write=_write_granitemoeshared,
    ranges={_WIDTH: integer(0)},
    unused=experts.LOSSES,
)  # fmt: skip


# Granite 4.
#
# In models without experts, the feed-forward is what is elsewhere the shared expert.

_ROPE = "position_embedding_type"
_DENSE = (
    *fused(
        (f"{NAME}mlp.gate_proj.weight", f"{NAME}mlp.up_proj.weight"),
        f"{HF_NAME}shared_mlp.input_linear.weight",
        lambda m: consecutive_rows(m.ffn_dim, m.ffn_dim),
    ),
    Rule(f"{NAME}mlp.down_proj.weight", f"{HF_NAME}shared_mlp.output_linear.weight"),
)


def _read_granitemoehybrid(c: Config, where: str) -> Table:
    n_layers = c["num_hidden_layers"]
    kinds = c["layer_types"] or [state_space.LINEAR] * n_layers
    table = common.llama(c, where) | _multipliers(c)
    table |= state_space.mixers(kinds, n_layers, where) | state_space.mamba2(c, where)
    if c[_ROPE] not in (None, "nope", "rope"):
        raise UserError(
            f'{where}: position_embedding_type = {reprlib.repr(c[_ROPE])} is not one of "rope", '
            '"nope" and null'
        )
    # Without the key, attention has no positions.
    if c[_ROPE] != "rope":
        table["rope_pattern"] = [False]
    if not c["num_local_experts"]:
        return table | {"ffn_hidden_dim": c[_WIDTH]}
    routed = experts.softmax({**c, "norm_topk_prob": True}, *_SIZES)
    return table | routed | {"moe_shared_experts": 1, "moe_shared_expert_dim": c[_WIDTH]}


def _write_granitemoehybrid(model: ModelConfig) -> Table:
    has_rope = any(rope is not None for rope in model.ropes)
    keys = {
        **common.llama_keys(model),
        **_multiplier_keys(model),
        **state_space.mamba2_keys(model),
        "attention_bias": model.qkv_bias and model.o_bias,
        "layer_types": state_space.layer_kinds(model),
        _ROPE: "rope" if has_rope else "nope",
        "num_local_experts": model.num_experts,
        _WIDTH: model.shared_expert_dim if model.is_moe else model.ffn_dim,
    }
    if model.is_moe:
        keys |= experts.softmax_keys(model, *_SIZES)
    return {key: value for key, value in keys.items() if key != "norm_topk_prob"}


GRANITEMOEHYBRID_FAMILY = Family(
    "granitemoehybrid",
    name_map(
        "hf-granitemoehybrid", "GraniteMoeHybridForCausalLM", *_GRANITEMOE_RULES, *_SHARED_RULES,
        *_DENSE, *state_space.mamba2_rules(f"{HF_NAME}mamba."), renamed=_RENAMED,
    ),
    {**_DEFAULTS, **state_space.DEFAULTS, _WIDTH: 1024, "layer_types": None, _ROPE: None},
    summary="Granite 4, dense and with experts: layers of Mamba-2 and of attention, with or "
            "without rotary positions; Granite's multipliers and experts",
    read=_read_granitemoehybrid,
    write=_write_granitemoehybrid,
    ranges={**state_space.RANGES, _WIDTH: integer(0), "num_local_experts": integer(0)},
    only={"hidden_act": "silu"},  # also the activation of convolutions
    aliases={"layers_block_type": "layer_types"},
    unused=(*experts.LOSSES, "use_mamba_kernels"),
    experts_are_optional=True,
)  # fmt: skip


# Bamba.

_PARTIAL = 0.5  # fraction of a head with rotary positions, which files do not give
BAMBA_RULES = (
    *(rule for rule in OUTSIDE if rule.name != "norm.weight"),
    Rule("norm.weight", "model.final_layernorm.weight"),
    Rule(f"{NAME}attention_norm.weight", f"{HF_NAME}input_layernorm.weight"),
    Rule(f"{NAME}mlp_norm.weight", f"{HF_NAME}pre_ff_layernorm.weight"),
    *ATTENTION,
    *ATTENTION_BIASES,
    *(
        Rule(f"{NAME}mlp.{m}_proj.{kind}", f"{HF_NAME}feed_forward.{m}_proj.{kind}",
             optional=kind == "bias")
        for m, kind in itertools.product(("gate", "up", "down"), ("weight", "bias"))
    ),
    *state_space.mamba2_rules(f"{HF_NAME}mamba."),
)  # fmt: skip


def _read_bamba(c: Config, where: str) -> Table:
    attending, n_layers = c["attn_layer_indices"] or (), c["num_hidden_layers"]
    kinds = [FULL if i in attending else state_space.LINEAR for i in range(n_layers)]
    table = common.shape(c) | common.feed_forward(c, where) | common.biases(c)
    table |= common.rotary(c, where, partial=_PARTIAL)
    return table | state_space.mixers(kinds, n_layers, where) | state_space.mamba2(c, where)


def _write_bamba(model: ModelConfig) -> Table:
    parts = enumerate(model.layer_parts)
    return {
        **common.llama_keys(model),
        **common.rotary_keys(model, partial=True),
        **common.bias_keys(model),
        **state_space.mamba2_keys(model),
        "attn_layer_indices": [i for i, (mixer, _) in parts if mixer == ATTENTION_MIXER],
    }


BAMBA_FAMILY = Family(
    "bamba",
    name_map("hf-bamba", "BambaForCausalLM", *BAMBA_RULES),
    {**COMMON, **BIASES, **state_space.DEFAULTS, "rms_norm_eps": 1e-5, "num_key_value_heads": 8,
     "attn_layer_indices": None, "partial_rotary_factor": None},
    summary="Bamba: layers of Mamba-2 and of attention; rotary positions in half of a head",
    read=_read_bamba,
    write=_write_bamba,
    ranges={**state_space.RANGES, "attn_layer_indices": list_of(LAYER)},
    only={"hidden_act": "silu"},  # also the activation of convolutions
    unused=("num_logits_to_keep", "z_loss_coefficient", "use_mamba_kernels"),
)  # fmt: skip
