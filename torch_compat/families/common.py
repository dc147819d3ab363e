"""Keys of `config.json` that several families share, read and written."""

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxforge.config.model import ModelConfig, RopeScaling
from jaxforge.errors import UserError
from torch_compat.families.family import Config, Table
from torch_compat.formats.limits import is_name

PLAIN = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "ffn_hidden_dim": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
}
"""Our key -> theirs, where both mean the same and neither has a default worth taking."""
NEEDED: Mapping[str, Any] = dict.fromkeys(PLAIN.values())
"""Keys that every file has."""
COMMON: Mapping[str, Any] = {
    **NEEDED, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None,
    "rope_parameters": None, "tie_word_embeddings": False, "initializer_range": 0.02,
    "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu",
}  # fmt: skip
"""Llama's keys, and what it takes for those that are absent."""
BIASES: Mapping[str, Any] = {"attention_bias": False, "mlp_bias": False}
FULL, SLIDING = "full_attention", "sliding_attention"

_ORIGINAL = "original_max_position_embeddings"
_SCALINGS: Mapping[str, Mapping[str, str]] = {
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor"},
    "llama3": {"factor": "factor", "low_freq_factor": "low_freq_factor",
               "high_freq_factor": "high_freq_factor", "original_max_seq_len": _ORIGINAL},
    "yarn": {"factor": "factor", "original_max_seq_len": _ORIGINAL,
             "attention_factor": "attention_factor", "beta_fast": "beta_fast",
             "beta_slow": "beta_slow", "truncate": "truncate"},
    "longrope": {"factor": "factor", "original_max_seq_len": _ORIGINAL,
                 "attention_factor": "attention_factor", "short_factor": "short_factor",
                 "long_factor": "long_factor"},
}  # fmt: skip
"""Kind of rotary scaling -> our key -> theirs."""
_MAY_BE_ABSENT = ("attention_factor", "beta_fast", "beta_slow", "truncate")
_ROTARY = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "mscale", "mscale_all_dim",
    "finetuned", *(theirs for of_kind in _SCALINGS.values() for theirs in of_kind.values()),
}  # fmt: skip
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh",
                "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}  # fmt: skip
_THEIR_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh",
                      "relu": "relu", "swiglu_oai": "silu"}  # fmt: skip
"""gpt-oss's files say silu, which its model does not look at; no other has what it is."""


def shape(c: Config) -> Table:
    """The sizes of a model with RMSNorm, its ties and its initial weights."""
    heads, head = c["num_attention_heads"], c.get("head_dim")
    table = {ours: c[theirs] for ours, theirs in PLAIN.items()} | {
        "n_kv_heads": c.get("num_key_value_heads") or heads,
        "norm_eps": c["rms_norm_eps"],
        "tie_embeddings": bool(c["tie_word_embeddings"]),
        "init_std": c["initializer_range"],
    }
    if head is not None and head * heads != c["hidden_size"]:
        table["head_dim"] = head
    return table


def head_size(c: Config) -> int:
    """Width of a head."""
    return c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]


def feed_forward(c: Config, where: str, key: str = "hidden_act", *, gated: bool = True) -> Table:
    """The activation, and whether there is a gate.

    Raises:
        UserError: the activation is none of ours.
    """
    activation = _ACTIVATIONS.get(c[key]) if isinstance(c[key], str) else None
    if activation is None:
        raise UserError(
            f"{where}: jaxforge's model has no counterpart of {key} = {reprlib.repr(c[key])}; here "
            f"are {', '.join(_ACTIVATIONS)}"
        )
    table: Table = {"activation": activation}
    return table if gated == (activation == "silu") else {**table, "gated_mlp": gated}


def biases(c: Config) -> Table:
    """Return the biases of attention and feed-forward, as Llama names them."""
    attention = {"qkv_bias": True, "o_bias": True} if c["attention_bias"] else {}
    return {**attention, "mlp_bias": True} if c.get("mlp_bias") else attention


def scale(value: float, c: Config) -> Table:
    """Return the scale of attention scores, if it is not the usual one."""
    return {} if value == head_size(c) ** -0.5 else {"attention_scale": value}


def llama(c: Config, where: str) -> Table:
    """A model such as Llama, with biases where it has keys for them."""
    table = shape(c) | rotary(c, where) | feed_forward(c, where)
    return table | (biases(c) if "attention_bias" in c else {})


def rotary(c: Config, where: str, *, partial: float | None = None) -> Table:
    """Rotary positions that are the same in all layers.

    Args:
        c: the config; transformers 4 has `rope_theta` and `rope_scaling`, 5 both in
            `rope_parameters`.
        where: the file.
        partial: share of a head that turns where the file does not say; None: always all of it.

    Raises:
        UserError: they are of a kind that is not built, or not complete.
    """
    key = "rope_scaling" if c.get("rope_scaling") else "rope_parameters"
    given = c.get(key) or {}
    if any(isinstance(value, dict) for value in given.values()):
        raise UserError(
            f"{where}: {key} = {reprlib.repr(given)}: here all layers have the same positions"
        )
    share = given.get("partial_rotary_factor", c.get("partial_rotary_factor"))
    table = rotary_from_table(given, c, f"{where}: {key}")
    if partial is None and share not in (None, 1):
        raise UserError(
            f"{where}: jaxforge's model has no counterpart of partial_rotary_factor = "
            f"{reprlib.repr(share)} in this family"
        )
    share = partial if share is None else share
    return table if share in (None, 1) else {**table, "partial_rotary_factor": share}


def rotary_from_table(given: Config, c: Config, what: str) -> Table:
    """`rope_theta` and `rope_scaling` of one table of rotary parameters.

    Args:
        given: the table.
        c: the config around it.
        what: the table in words.

    Raises:
        UserError: it is of a kind that is not built, or not complete.
    """
    if unknown := given.keys() - _ROTARY:
        raise UserError(f"{what} has {min(unknown)}, which is not built")
    for key, value in given.items():
        if key not in ("rope_type", "type", "truncate", "finetuned") and not _is_fine(key, value):
            raise UserError(f"{what} has {key} = {reprlib.repr(value)}")
    theta = given.get("rope_theta", c["rope_theta"])
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return {"rope_theta": theta}
    if not isinstance(kind, str) or kind not in _SCALINGS:
        raise UserError(
            f"{what}: rotary positions of type {reprlib.repr(kind)}; here are default, "
            f"{', '.join(_SCALINGS)}"
        )
    return {"rope_theta": theta, "rope_scaling": _scaling(kind, given, c, what)}


def _scaling(kind: str, given: Config, c: Config, what: str) -> Table:
    longest = c["max_position_embeddings"]
    full = {_ORIGINAL: longest, **given}
    if c.get(_ORIGINAL) is not None:
        full[_ORIGINAL] = c[_ORIGINAL]
    if kind in ("yarn", "longrope") and full.get("factor") is None:
        full["factor"] = longest / full[_ORIGINAL]
    names = _SCALINGS[kind]
    if missing := [
        theirs for ours, theirs in names.items()
        if full.get(theirs) is None and ours not in _MAY_BE_ABSENT
    ]:  # fmt: skip
        raise UserError(f"{what} does not give {', '.join(missing)}")
    table = {ours: full[theirs] for ours, theirs in names.items() if full.get(theirs) is not None}
    if kind == "dynamic":
        table["original_max_seq_len"] = longest
    if kind == "yarn" and "attention_factor" not in table and full.get("mscale_all_dim"):
        table["attention_factor"] = _attention_factor(full)
    return table if kind == "llama3" else {"rope_type": kind, **table}


def _attention_factor(full: Config) -> float:
    """YaRN's, of a file with `mscale` and `mscale_all_dim`."""
    longer = 0.1 * math.log(max(1.0, full["factor"]))
    if not full.get("mscale"):
        return 1 + longer
    return (1 + full["mscale"] * longer) / (1 + full["mscale_all_dim"] * longer)


def _is_fine(key: str, value: Any) -> bool:  # noqa: ANN401 (whatever the file held)
    if value is None:
        return key != "rope_theta"
    if key in ("short_factor", "long_factor"):
        return isinstance(value, list) and all(map(is_size, value))
    return is_size(value)


def is_size(value: Any) -> bool:  # noqa: ANN401 (whatever the file held)
    """A number above zero that a float32 still holds."""
    return type(value) in (int, float) and 1e-30 < value < 1e30


def windows(c: Config, kinds: Sequence[str], where: str, *, differ: bool = False) -> Table:
    """The keys of `[model]` that say which layers see a window of tokens alone.

    Args:
        c: the config.
        kinds: of each layer.
        where: the file.
        differ: whether layers with a window differ in more than that, so that one of all positions
            is still one.

    Raises:
        UserError: there are others, or not as many as layers.
    """
    n_layers, window = c["num_hidden_layers"], c.get("sliding_window")
    if len(kinds) != n_layers or not set(kinds) <= {FULL, SLIDING}:
        raise UserError(
            f"{where}: layer_types has {len(kinds)} layers of {', '.join(sorted(set(kinds)))}; "
            f"here are {n_layers}, of {FULL} and {SLIDING}"
        )
    if SLIDING in kinds and window == 0:  # which some write where no layer has one
        raise UserError(f"{where}: sliding_window = 0 is not possible for a model")
    longest = c["max_position_embeddings"]
    if window is None or SLIDING not in kinds or (window >= longest and not differ):
        return {}  # a window of everything is none
    window = min(window, longest)
    pattern = [] if FULL not in kinds else [kind.removesuffix("_attention") for kind in kinds]
    return {"sliding_window": window, "attention_pattern": pattern}


def uniform_window(c: Config, where: str) -> Table:
    """A window in every layer, or in none."""
    return windows(c, [SLIDING] * c["num_hidden_layers"], where)


def rotary_by_layer_kind(c: Config, where: str, local_theta: float | None) -> Table:
    """Rotary positions of full layers, and of sliding ones where they are others.

    Args:
        c: the config: `rope_parameters` by the kind of layer, or what transformers 4 had, in which
            `rope_scaling` is for full layers alone.
        where: the file.
        local_theta: base in sliding layers, where the file does not say; None: that of full ones.

    Raises:
        UserError: they are not such that sliding layers have none of their scaling.
    """
    key, scaling = "rope_parameters", c.get("rope_scaling") or {}
    given = c.get(key) or {}
    by_kind = {kind: given.get(kind) or {} for kind in (FULL, SLIDING)}
    if not given.keys() & by_kind.keys():
        by_kind = {FULL: given, SLIDING: {}}
    elif given.keys() - by_kind.keys() or not all(isinstance(t, dict) for t in by_kind.values()):
        raise UserError(f"{where}: {key} = {reprlib.repr(given)}: here are {FULL} and {SLIDING}")
    full = rotary_from_table({**by_kind[FULL], **scaling}, c, f"{where}: {key} of {FULL}")
    inner = c if local_theta is None else {**c, "rope_theta": local_theta}
    local = rotary_from_table(by_kind[SLIDING], inner, f"{where}: {key} of {SLIDING}")
    if local == full:
        return full
    if "rope_scaling" in local:
        raise UserError(f"{where}: {key}: sliding layers have no scaling of their own here")
    return {**full, "local_rope_theta": local["rope_theta"]}


def layer_kinds(model: ModelConfig) -> list[str]:
    """The name of each layer's attention in transformers."""
    return [FULL if window is None else SLIDING for window in model.windows]


def shape_keys(model: ModelConfig) -> Table:
    """The keys of `shape`."""
    return {
        **{theirs: getattr(model, ours) for ours, theirs in PLAIN.items()},
        "intermediate_size": model.ffn_dim,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_std,
        "attention_dropout": 0.0,
    }


def activation_key(model: ModelConfig) -> str:
    """The name of the activation in transformers."""
    return _THEIR_ACTIVATIONS[model.activation]


def bias_keys(model: ModelConfig) -> Table:
    """The keys of `biases`."""
    return {"attention_bias": model.qkv_bias and model.o_bias, "mlp_bias": model.mlp_bias}


def llama_keys(model: ModelConfig) -> Table:
    """The keys of `llama`, but for biases."""
    return {**shape_keys(model), **rotary_keys(model), "hidden_act": activation_key(model)}


def rotary_keys(model: ModelConfig, *, partial: bool = False) -> Table:
    """The keys of `rotary`, for transformers 4 and 5."""
    table = _rotary_table(model.rope_theta, model.rope_scaling)
    scaling = {key: value for key, value in table.items() if key != "rope_theta"}
    share = {"partial_rotary_factor": model.partial_rotary_factor} if partial else {}
    return {
        "rope_theta": model.rope_theta,  # transformers 4
        "rope_scaling": scaling if model.rope_scaling else None,
        "rope_parameters": {**table, **share},  # transformers 5
        **share,
    }


def rotary_by_layer_kind_keys(model: ModelConfig) -> Table:
    """The keys of `rotary_by_layer_kind`."""
    full = _rotary_table(model.rope_theta, model.rope_scaling)
    local = model.local_rope_theta
    return {"rope_parameters": {
        FULL: full, SLIDING: full if local is None else _rotary_table(local, None),
    }}  # fmt: skip


def _rotary_table(theta: float, scaling: RopeScaling | None) -> Table:
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    table = {
        theirs: list(value) if isinstance(value, tuple) else value
        for ours, theirs in _SCALINGS[scaling.rope_type].items()
        if (value := getattr(scaling, ours)) is not None
    }
    return {"rope_type": scaling.rope_type, "rope_theta": theta, **table}


def window_keys(model: ModelConfig) -> Table:
    """The window, if there is one."""
    return {"sliding_window": model.sliding_window if any(model.windows) else None}


def scaling_keys(scaling: RopeScaling | None) -> Table:
    """Return the keys of a scaling without those that its kind ignores."""
    return {} if scaling is None else _rotary_table(0.0, scaling) | {
        "original": scaling.original_max_seq_len if scaling.rope_type == "dynamic" else None
    }  # fmt: skip


def check_table(value: Any) -> bool:  # noqa: ANN401 (whatever the file held)
    """Return whether a value is an object with printable keys."""
    return isinstance(value, dict) and all(map(is_name, value))
