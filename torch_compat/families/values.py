"""Possible values of keys of `config.json`, which may come from a stranger.

The default value of a key tells its type: an integer is at least 1, a number is positive. A family
gives the range of a key whose default says too little (`Family.ranges`), unless several families
share the key (`_SHARED`). Without limits, the product of a few values would exhaust the memory.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch_compat.families.family import Family
from torch_compat.formats import limits
from torch_compat.formats.limits import is_name

Check = Callable[[Any], bool]
"""Value of a key -> whether it is possible."""


def integer(least: int = 1, most: int = limits.WIDTH) -> Check:
    """Return the check of integers in a range that includes both bounds."""
    return lambda value: type(value) is int and least <= value <= most


def list_of(check: Check) -> Check:
    """Return the check of lists whose items are possible."""
    return lambda value: isinstance(value, list) and all(map(check, value))


def nullable(check: Check) -> Check:
    """Return the check of values that may also be null."""
    return lambda value: value is None or check(value)


def is_size(value: Any) -> bool:  # noqa: ANN401 (untrusted JSON)
    """Return whether a value is a positive number within the range of float32."""
    return type(value) in (int, float) and 1e-30 < value < 1e30


def _is_flag(value: Any) -> bool:  # noqa: ANN401 (untrusted JSON)
    return isinstance(value, bool)


def _is_table(value: Any) -> bool:  # noqa: ANN401 (untrusted JSON)
    return isinstance(value, dict) and all(map(is_name, value))


LAYER = integer(0, limits.LAYERS)
"""Check of an index or a number of layers."""

_BY_TYPE: Mapping[type, Check] = {bool: _is_flag, int: integer(), float: is_size}
"""Type of a default value -> check."""
_SHARED: Mapping[str, Check] = {
    **dict.fromkeys(
        ("hidden_size", "num_attention_heads", "vocab_size", "intermediate_size",
         "max_position_embeddings", "n_routed_experts", "n_shared_experts", "n_group",
         "topk_group", "num_experts_per_tok"),
        integer(),
    ),
    **dict.fromkeys(
        ("num_hidden_layers", "linear_num_key_heads", "linear_num_value_heads"),
        integer(1, limits.LAYERS),
    ),
    **dict.fromkeys(
        ("num_key_value_heads", "head_dim", "original_max_position_embeddings", "q_lora_rank"),
        nullable(integer()),
    ),
    "sliding_window": nullable(integer(0)),
    **dict.fromkeys(
        ("attn_logit_softcapping", "final_logit_softcapping", "partial_rotary_factor"),
        nullable(is_size),
    ),
    "initializer_range": lambda value: is_size(value) or value == 0,
    **dict.fromkeys(
        ("first_k_dense_replace", "max_window_layers", "num_nextn_predict_layers"), LAYER
    ),
    "layer_types": list_of(is_name),
    "mlp_only_layers": list_of(LAYER),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), _is_table),
}  # fmt: skip


def is_possible(family: Family, key: str, value: Any) -> bool:  # noqa: ANN401 (untrusted JSON)
    """Return whether a key of a family may have a value. A null flag is false."""
    default = family.defaults.get(key)
    if value is None and (default is None or type(default) is bool):
        return True
    check = family.ranges.get(key) or _SHARED.get(key) or _BY_TYPE.get(type(default))
    return key not in family.defaults or check is None or check(value)
