"""Reading and writing of `config.json` keys that several families share.

Functions that read take the config and return keys of `[model]`; functions named `*_keys` are their
inverses.
"""

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxforge.config.model import ModelConfig, RopeScaling
from jaxforge.errors import UserError
from torch_compat.families.family import Config, Table
from torch_compat.families.values import is_size

PLAIN = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "ffn_hidden_dim": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
}
"""Key of `[model]` -> required key of `config.json` with the same meaning."""
NEEDED: Mapping[str, Any] = dict.fromkeys(PLAIN.values())
"""Keys that every file must have."""
COMMON: Mapping[str, Any] = {
    **NEEDED, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None,
    "rope_parameters": None, "tie_word_embeddings": False, "initializer_range": 0.02,
    "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu",
}  # fmt: skip
"""Llama's keys and their defaults in transformers."""
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
             "beta_slow": "beta_slow", "truncate": "truncate", "mscale": "mscale",
             "mscale_all_dim": "mscale_all_dim"},
    "longrope": {"factor": "factor", "original_max_seq_len": _ORIGINAL,
                 "attention_factor": "attention_factor", "short_factor": "short_factor",
                 "long_factor": "long_factor"},
    "proportional": {"factor": "factor", "rotated_share": "partial_rotary_factor"},
}  # fmt: skip
"""Type of rotary scaling -> key of `[model.rope_scaling]` -> key of `config.json`."""
_MAY_BE_ABSENT = ("attention_factor", "beta_fast", "beta_slow", "truncate", "mscale",
                  "mscale_all_dim")  # fmt: skip
_ROTARY = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "mscale", "mscale_all_dim",
    "finetuned", *(theirs for of_kind in _SCALINGS.values() for theirs in of_kind.values()),
}  # fmt: skip
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh",
                "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu",
                "relu2": "relu2"}  # fmt: skip
_THEIR_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh",
                      "relu": "relu", "relu2": "relu2", "swiglu_oai": "silu"}  # fmt: skip
"""gpt-oss's files say silu, which its model ignores; transformers has no name for its "
"activation."""


def shape(c: Config) -> Table:
    """Read the sizes, norms, ties and initialization of a model with RMSNorm."""
    heads, head = c["num_attention_heads"], c.get("head_dim")
    table = {key: c[hf_key] for key, hf_key in PLAIN.items()} | {
        "n_kv_heads": c.get("num_key_value_heads") or heads,
        "norm_eps": c["rms_norm_eps"],
        "tie_embeddings": bool(c["tie_word_embeddings"]),
        "init_std": c["initializer_range"],
    }
    if head is not None and head * heads != c["hidden_size"]:
        table["head_dim"] = head
    return table


def shortest_period(names: Sequence[str]) -> list[str]:
    """Return the shortest beginning that yields all names when it is repeated."""
    lengths = range(1, len(names) + 1)
    return next(
        list(names[:length])
        for length in lengths
        if all(name == names[i % length] for i, name in enumerate(names))
    )


def check_usual_heads(c: Config, where: str) -> None:
    """Check that all heads add up to the width, in families that have no other heads.

    Raises:
        UserError: they do not.
    """
    if head_size(c) * c["num_attention_heads"] != c["hidden_size"]:
        raise UserError(
            f"{where}: head_dim = {c['head_dim']}: all heads must add up to hidden_size"
        )


def without_usual_head_dim(keys: Table) -> Table:
    """Return keys without `head_dim` if all heads add up to the width.

    Files of some families lack the key, but transformers reads it.
    """
    is_usual = keys["head_dim"] * keys["num_attention_heads"] == keys["hidden_size"]
    return {k: v for k, v in keys.items() if k != "head_dim" or not is_usual}


def head_size(c: Config) -> int:
    """Return the width of a head."""
    # At least 1, so that functions may divide by it: `[model]` refuses more heads than channels.
    return c.get("head_dim") or max(1, c["hidden_size"] // c["num_attention_heads"])


def feed_forward(c: Config, where: str, key: str = "hidden_act", *, gated: bool = True) -> Table:
    """Read the activation, and whether the feed-forward is gated.

    Raises:
        UserError: the activation is not supported.
    """
    activation = _ACTIVATIONS.get(c[key]) if isinstance(c[key], str) else None
    if activation is None:
        raise UserError(
            f"{where}: jaxforge's model has no counterpart of {key} = {reprlib.repr(c[key])}; "
            f"supported are {', '.join(_ACTIVATIONS)}"
        )
    table: Table = {"activation": activation}
    return table if gated == (activation == "silu") else {**table, "gated_mlp": gated}


def biases(c: Config) -> Table:
    """Read the biases of attention and feed-forward from Llama's keys."""
    attention = {"qkv_bias": True, "o_bias": True} if c["attention_bias"] else {}
    return {**attention, "mlp_bias": True} if c.get("mlp_bias") else attention


def scale(value: float, c: Config) -> Table:
    """Return the scale of attention scores if it is not the default."""
    return {} if value == head_size(c) ** -0.5 else {"attention_scale": value}


def llama(c: Config, where: str) -> Table:
    """Read a model such as Llama, with biases if the family has keys for them."""
    table = shape(c) | rotary(c, where) | feed_forward(c, where)
    return table | (biases(c) if "attention_bias" in c else {})


def rotary(c: Config, where: str, *, partial: float | None = None) -> Table:
    """Read rotary positions that are the same in all layers.

    Args:
        c: the config: `rope_theta` and `rope_scaling` in transformers 4, `rope_parameters` in 5.
        where: the file, for messages.
        partial: default of the rotated fraction of a head; None: all of it is always rotated.

    Raises:
        UserError: the rotary positions are of an unsupported type or incomplete.
    """
    key = "rope_scaling" if c.get("rope_scaling") else "rope_parameters"
    params = c.get(key) or {}
    if any(isinstance(value, dict) for value in params.values()):
        raise UserError(
            f"{where}: {key} = {reprlib.repr(params)}: all layers must have the same positions"
        )
    # transformers 5 moved the key into the table.
    share = params.get("partial_rotary_factor", c.get("partial_rotary_factor"))
    table = rotary_from_table(params, c, f"{where}: {key}")
    if table.get("rope_scaling", {}).get("rope_type") == "proportional":
        raise UserError(
            f"{where}: jaxforge's model has no counterpart of {key} of type 'proportional' in this "
            "family"
        )
    if partial is None and share not in (None, 1):
        raise UserError(
            f"{where}: jaxforge's model has no counterpart of partial_rotary_factor = "
            f"{reprlib.repr(share)} in this family"
        )
    share = partial if share is None else share
    return table if share in (None, 1) else {**table, "partial_rotary_factor": share}


def rotary_from_table(params: Config, c: Config, what: str) -> Table:
    """Read `rope_theta` and `rope_scaling` from a table of rotary parameters.

    Args:
        params: the table.
        c: the config that contains the table.
        what: description of the table, for messages.

    Raises:
        UserError: the table is of an unsupported type or incomplete.
    """
    if unknown := params.keys() - _ROTARY:
        raise UserError(f"{what} has {min(unknown)}, which is not supported")
    for key, value in params.items():
        if key not in ("rope_type", "type", "truncate", "finetuned") and not _is_valid(key, value):
            raise UserError(f"{what} has {key} = {reprlib.repr(value)}")
    theta = params.get("rope_theta", c["rope_theta"])
    # Older files name the key `type`.
    kind = params.get("rope_type", params.get("type", "default"))
    if kind == "default":
        return {"rope_theta": theta}
    if not isinstance(kind, str) or kind not in _SCALINGS:
        raise UserError(
            f"{what}: rotary positions of type {reprlib.repr(kind)}; supported are "
            f"default, {', '.join(_SCALINGS)}"
        )
    return {"rope_theta": theta, "rope_scaling": _scaling(kind, params, c, what)}


def _scaling(kind: str, params: Config, c: Config, what: str) -> Table:
    longest = c["max_position_embeddings"]
    # transformers takes the longest context if the file does not give the original one.
    full = {_ORIGINAL: longest, **params}
    if kind == "proportional":
        full = {"factor": 1.0, "partial_rotary_factor": 1.0, **full}
    if c.get(_ORIGINAL) is not None:
        full[_ORIGINAL] = c[_ORIGINAL]
    if kind in ("yarn", "longrope") and full.get("factor") is None:
        full["factor"] = longest / full[_ORIGINAL]
    names = _SCALINGS[kind]
    if missing := [
        hf_key for key, hf_key in names.items()
        if full.get(hf_key) is None and key not in _MAY_BE_ABSENT
    ]:  # fmt: skip
        raise UserError(f"{what} does not give {', '.join(missing)}")
    table = {key: full[hf_key] for key, hf_key in names.items() if full.get(hf_key) is not None}
    if kind == "dynamic":
        table["original_max_seq_len"] = longest
    if kind == "yarn" and not (full.get("mscale_all_dim") and "kv_lora_rank" in c):
        # Only latent attention scales its scores by `mscale_all_dim`. Otherwise both keys determine
        # no more than the factor of rotated queries and keys.
        table = {key: value for key, value in table.items() if not key.startswith("mscale")}
        if "attention_factor" not in table and full.get("mscale_all_dim"):
            table["attention_factor"] = _attention_factor(full)
    return table if kind == "llama3" else {"rope_type": kind, **table}


def _attention_factor(full: Config) -> float:
    """Return YaRN's attention factor for a file with `mscale` and `mscale_all_dim`."""
    # YaRN (arXiv:2309.00071): m(k) = 1 + 0.1 k ln factor; the result is m(mscale) /
    # m(mscale_all_dim).
    longer = 0.1 * math.log(max(1.0, full["factor"]))
    if not full.get("mscale"):
        return 1 + longer
    return (1 + full["mscale"] * longer) / (1 + full["mscale_all_dim"] * longer)


def _is_valid(key: str, value: Any) -> bool:  # noqa: ANN401 (untrusted JSON)
    if value is None:
        return key != "rope_theta"
    if key in ("short_factor", "long_factor"):
        return isinstance(value, list) and all(map(is_size, value))
    return is_size(value)


def check_layer_types(
    kinds: Sequence[str], n_layers: int, known: Sequence[str], where: str, key: str = "layer_types"
) -> None:
    """Check the kinds of layers in a list of a file, one for each layer.

    Raises:
        UserError: a kind is unknown, or their number is not the number of layers.
    """
    if len(kinds) != n_layers or not set(kinds) <= set(known):
        raise UserError(
            f"{where}: {key} has {len(kinds)} layers of {', '.join(sorted(set(kinds)))}; "
            f"it must have {n_layers}, of {' and '.join(known)}"
        )


def sliding_kinds(c: Config) -> list[str]:
    """Return the kind of each layer: by default, each `sliding_window_pattern`-th is full."""
    n_layers, period = c["num_hidden_layers"], c["sliding_window_pattern"]
    return c["layer_types"] or [SLIDING if (i + 1) % period else FULL for i in range(n_layers)]


def windows(c: Config, kinds: Sequence[str], where: str, *, differ: bool = False) -> Table:
    """Return the keys of `[model]` for layers with a sliding window.

    Args:
        c: the config.
        kinds: kind of attention of each layer.
        where: the file, for messages.
        differ: whether layers with a window differ from others in further settings, so that a
            window of all positions must be kept.

    Raises:
        UserError: a kind is unknown, or their number is not the number of layers.
    """
    check_layer_types(kinds, c["num_hidden_layers"], (FULL, SLIDING), where)
    window = c.get("sliding_window")
    if SLIDING in kinds and window == 0:  # some files have 0 without layers with a window
        raise UserError(f"{where}: sliding_window must be at least 1, not 0")
    longest = c["max_position_embeddings"]
    if window is None or SLIDING not in kinds or (window >= longest and not differ):
        return {}  # a window of all positions is not a window
    window = min(window, longest)
    pattern = [] if FULL not in kinds else [kind.removesuffix("_attention") for kind in kinds]
    return {"sliding_window": window, "attention_pattern": pattern}


def uniform_window(c: Config, where: str) -> Table:
    """Read a window in every layer, or in none."""
    return windows(c, [SLIDING] * c["num_hidden_layers"], where)


def rotary_by_layer_kind(c: Config, where: str, local_theta: float | None) -> Table:
    """Read rotary positions that may differ between full and sliding layers.

    Args:
        c: the config: `rope_parameters` by kind of layer, or the keys of transformers 4, in which
            `rope_scaling` only applies to full layers.
        where: the file, for messages.
        local_theta: default of the base in sliding layers; None: the base of full layers.

    Raises:
        UserError: sliding layers have a scaling of their own.
    """
    key, scaling = "rope_parameters", c.get("rope_scaling") or {}
    params = c.get(key) or {}
    by_kind = {kind: params.get(kind) or {} for kind in (FULL, SLIDING)}
    # A table without kinds is that of full layers; sliding layers have the defaults.
    if not params.keys() & by_kind.keys():
        by_kind = {FULL: params, SLIDING: {}}
    elif params.keys() - by_kind.keys() or not all(isinstance(t, dict) for t in by_kind.values()):
        raise UserError(f"{where}: {key} = {reprlib.repr(params)}: must have {FULL} and {SLIDING}")
    full = rotary_from_table({**by_kind[FULL], **scaling}, c, f"{where}: {key} of {FULL}")
    local_config = c if local_theta is None else {**c, "rope_theta": local_theta}
    local = rotary_from_table(by_kind[SLIDING], local_config, f"{where}: {key} of {SLIDING}")
    if local == full:
        return full
    if "rope_scaling" in local:
        raise UserError(f"{where}: {key}: a scaling of sliding layers is not supported")
    return {**full, "local_rope_theta": local["rope_theta"]}


def layer_kinds(model: ModelConfig) -> list[str]:
    """Return the kind of each layer's attention, as transformers names it."""
    return [FULL if window is None else SLIDING for window in model.windows]


def shape_keys(model: ModelConfig) -> Table:
    """Return the keys that `shape` reads."""
    return {
        **{hf_key: getattr(model, key) for key, hf_key in PLAIN.items()},
        "intermediate_size": model.ffn_dim,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_std,
        "attention_dropout": 0.0,
    }


def activation_key(model: ModelConfig) -> str:
    """Return the name of the activation in transformers."""
    return _THEIR_ACTIVATIONS[model.activation]


def bias_keys(model: ModelConfig) -> Table:
    """Return the keys that `biases` reads."""
    return {"attention_bias": model.qkv_bias and model.o_bias, "mlp_bias": model.mlp_bias}


def llama_keys(model: ModelConfig) -> Table:
    """Return the keys that `llama` reads, except biases."""
    return {**shape_keys(model), **rotary_keys(model), "hidden_act": activation_key(model)}


def rotary_keys(model: ModelConfig, *, partial: bool = False) -> Table:
    """Return the keys that `rotary` reads, for transformers 4 and 5."""
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
    """Return the keys that `rotary_by_layer_kind` reads."""
    full = _rotary_table(model.rope_theta, model.rope_scaling)
    local = model.local_rope_theta
    return {"rope_parameters": {
        FULL: full, SLIDING: full if local is None else _rotary_table(local, None),
    }}  # fmt: skip


def _rotary_table(theta: float, scaling: RopeScaling | None) -> Table:
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    table = {
        hf_key: list(value) if isinstance(value, tuple) else value
        for key, hf_key in _SCALINGS[scaling.rope_type].items()
        if (value := getattr(scaling, key)) is not None
    }
    if scaling.rope_type == "proportional" and scaling.factor == 1.0:
        del table["factor"]  # the default; transformers warns of an unknown key
    return {"rope_type": scaling.rope_type, "rope_theta": theta, **table}


def window_keys(model: ModelConfig) -> Table:
    """Return the key of the window, null without one."""
    return {"sliding_window": model.sliding_window if any(model.windows) else None}


def scaling_keys(scaling: RopeScaling | None) -> Table:
    """Return the keys of a scaling without those that its kind ignores."""
    return {} if scaling is None else _rotary_table(0.0, scaling) | {
        "original": scaling.original_max_seq_len if scaling.rope_type == "dynamic" else None
    }  # fmt: skip
