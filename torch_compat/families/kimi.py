"""Kimi Linear: Kimi Delta Attention, latent attention without positions, DeepSeek-V3's experts."""

import reprlib
from typing import Any

from jaxforge.config.mixers import KIMI_DELTA_ATTENTION, LATENT_ATTENTION
from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from torch_compat.families import common, experts
from torch_compat.families.common import FULL
from torch_compat.families.deepseek import DEEPSEEK_V3_FAMILY, LATENT_RULES
from torch_compat.families.family import (
    GATED,
    HF_NAME,
    NAME,
    OUTSIDE,
    PRE_NORMS,
    Config,
    Family,
    Table,
    name_map,
)
from torch_compat.families.values import integer, is_name, list_of, nullable
from torch_compat.formats.lazy import LazyTensor
from torch_compat.names.table import DepthwiseConvolution, Rule

_LINEAR = "linear_attention"
_MIXERS = {FULL: LATENT_ATTENTION, _LINEAR: KIMI_DELTA_ATTENTION}
"""Kind of a layer in transformers -> mixer."""
_SIZES = {
    "heads": ("linear_num_heads", "num_heads"),
    "head_dim": ("linear_head_dim", "head_dim"),
    "conv_size": ("linear_conv_kernel_dim", "short_conv_kernel_size"),
}
"""Key of `[model.kimi_delta_attention]` -> key of `config.json`, and key of its table as published.
"""
_PUBLISHED, _LAYERS = "linear_attn_config", {_LINEAR: "kda_layers", FULL: "full_attn_layers"}
"""Table of published files, and its lists of layers, which count from 1."""
_NAMES = {
    "num_experts": "n_routed_experts", "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts", "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group", "model_max_length": "max_position_embeddings",
}  # fmt: skip
_OF_ROTARY: Table = {"rope_theta": 10000.0, "rope_scaling": None, "rope_parameters": None}


def _kinds(c: Config, where: str) -> list[str]:
    """Return the kind of each layer's mixer.

    Raises:
        UserError: a layer has none, two, or an unknown one.
    """
    n_layers, published = c["num_hidden_layers"], c[_PUBLISHED] or {}
    lists = {kind: published.get(key, []) for kind, key in _LAYERS.items()}
    kinds = c["layer_types"]
    if kinds is None and any(lists.values()):
        if sorted([*lists[FULL], *lists[_LINEAR]]) != list(range(1, n_layers + 1)):
            raise UserError(
                f"{where}: {_PUBLISHED} must list each of the {n_layers} layers once, from 1 on"
            )
        kinds = [FULL if i + 1 in lists[FULL] else _LINEAR for i in range(n_layers)]
    elif kinds is None:
        kinds = [FULL if i and i % 4 == 0 else _LINEAR for i in range(n_layers)]
    common.check_layer_types(kinds, n_layers, (FULL, _LINEAR), where)
    return kinds


def _sizes(c: Config, where: str) -> Table:
    """Read `[model.kimi_delta_attention]`; the table of published files comes first.

    Raises:
        UserError: a size of that table is not possible.
    """
    sizes = {
        key: (c[_PUBLISHED] or {}).get(published, c[name])
        for key, (name, published) in _SIZES.items()
    }
    for key, value in sizes.items():
        if not integer(2 if key == "conv_size" else 1)(value):
            raise UserError(
                f"{where}: {_PUBLISHED} has {_SIZES[key][1]} = {reprlib.repr(value)}, which is not "
                "possible for a model"
            )
    return sizes


def _read(c: Config, where: str) -> Table:
    layers = experts.listed_layers(c, where, c["first_k_dense_replace"])
    # Files give the width of a head in their own way, and transformers ignores it.
    usual = {**c, **_OF_ROTARY, "head_dim": None, "first_k_dense_replace": 0}
    table = DEEPSEEK_V3_FAMILY.read(usual, where) | layers
    del table["rope_theta"]
    pattern = common.shortest_period([_MIXERS[kind] for kind in _kinds(c, where)])
    table |= {"rope_pattern": [False], "mixer_pattern": pattern}
    if KIMI_DELTA_ATTENTION in pattern:
        table[KIMI_DELTA_ATTENTION] = _sizes(c, where)
    if LATENT_ATTENTION not in pattern:
        del table[LATENT_ATTENTION]
    return table


def _write(model: ModelConfig) -> Table:
    keys = DEEPSEEK_V3_FAMILY.write(model)
    settings = model.kimi_delta_attention
    kinds = {mixer: kind for kind, mixer in _MIXERS.items()}
    return {
        **{key: value for key, value in keys.items() if key in _DEFAULTS and key not in _OF_ROTARY},
        **{names[0]: getattr(settings, key) for key, names in _SIZES.items()},
        "layer_types": [kinds.get(parts.mixer, parts.mixer) for parts in model.layer_parts],
        **experts.listed_layer_keys(model),
    }


class _PerHead:
    """Values of heads, stored as [1, 1, heads, 1] like [batch, sequence, heads, channels]."""

    def to_jaxforge(self, tensor: LazyTensor, config: ModelConfig) -> LazyTensor:
        """Return the values as [heads]."""
        if len(tensor.shape) != 4 or {tensor.shape[i] for i in (0, 1, 3)} != {1}:
            return tensor  # of another model: the check of shapes reports it
        return tensor.without_axis(3).without_axis(1).without_axis(0)

    def to_dialect(self, tensor: LazyTensor, config: ModelConfig) -> LazyTensor:
        """Return [heads] as [1, 1, heads, 1]."""
        return tensor.with_axis(0).with_axis(1).with_axis(3)


_PREFIXES = f"{NAME}{KIMI_DELTA_ATTENTION}.", f"{HF_NAME}self_attn."
_PROJECTIONS = {
    "q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "beta_proj": "b_proj",
    "decay_a_proj": "f_a_proj", "decay_b_proj": "f_b_proj", "gate_a_proj": "g_a_proj",
    "gate_b_proj": "g_b_proj", "norm": "o_norm", "o_proj": "o_proj",
}  # fmt: skip
_DELTA_RULES = (
    *(
        Rule(f"{_PREFIXES[0]}{name}.weight", f"{_PREFIXES[1]}{hf_name}.weight")
        for name, hf_name in _PROJECTIONS.items()
    ),
    *(
        Rule(f"{_PREFIXES[0]}{m}_conv", f"{_PREFIXES[1]}{m}_conv1d.weight", DepthwiseConvolution())
        for m in "qkv"
    ),
    Rule(f"{_PREFIXES[0]}decay_log", f"{_PREFIXES[1]}A_log", _PerHead()),
    Rule(f"{_PREFIXES[0]}decay_bias", f"{_PREFIXES[1]}dt_bias"),
)
_BLOCK_SPARSE = f"{HF_NAME}block_sparse_moe."
_RULES = (
    *OUTSIDE,
    *PRE_NORMS,
    *GATED,
    *LATENT_RULES,
    *_DELTA_RULES,
    *experts.BLOCK_SPARSE,
    experts.BIAS._replace(key=f"{_BLOCK_SPARSE}gate.e_score_correction_bias"),
    *(
        rule._replace(key=rule.key.replace(f"{HF_NAME}mlp.", _BLOCK_SPARSE))
        for rule in experts.shared("shared_experts")
    ),
)
_DEFAULTS: dict[str, Any] = {
    **{key: value for key, value in DEEPSEEK_V3_FAMILY.defaults.items() if key not in _OF_ROTARY},
    "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "q_lora_rank": None, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "moe_intermediate_size": 1024, "routed_scaling_factor": 2.446,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
    "layer_types": None, experts.KINDS: None, _PUBLISHED: None, "linear_num_heads": 32,
    "linear_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip

KIMI_LINEAR_FAMILY = Family(
    "kimi_linear",
    name_map(
        "hf-kimi-linear", "KimiLinearForCausalLM", *_RULES,
        # transformers gives the dense layers the name of those with experts.
        renamed=((r"(model\.layers\.\d+\.)block_sparse_moe\.(gate|up|down)_proj\.weight",
                  r"\1mlp.\2_proj.weight"),),
    ),
    _DEFAULTS,
    summary="Kimi Linear: Kimi Delta Attention, latent attention without positions; DeepSeek-V3's "
    "router and experts",
    read=_read,
    write=_write,
    # hidden_act is also the activation of Kimi Delta Attention's convolutions.
    only={"hidden_act": "silu", "moe_router_activation_func": "sigmoid", "use_grouped_topk": True,
          "moe_layer_freq": 1, "mla_use_nope": True, "num_nextn_predict_layers": 0,
          "num_mtp_layers": 0},
    ranges={experts.KINDS: list_of(is_name), _PUBLISHED: nullable(
        lambda table: isinstance(table, dict)
        and all(list_of(integer())(table.get(key, [])) for key in _LAYERS.values()))},
    names=_NAMES,
    aliases={**{name: name for name in _NAMES.values() if name != "n_routed_experts"},
             "num_local_experts": "n_routed_experts"},
    unused=(*DEEPSEEK_V3_FAMILY.unused, *_OF_ROTARY),
    float32=dict.fromkeys(
        ("bfloat16", "float16"), r".*\.router\.gate\.weight|.*\.decay_bias"
    ),
)  # fmt: skip
