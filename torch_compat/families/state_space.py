"""Parameter names and config keys of Mamba-2 layers that several families share."""

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxforge.config.mixers import MAMBA2
from jaxforge.config.model import ATTENTION, NO_MIXER, LayerParts, ModelConfig
from jaxforge.errors import UserError
from torch_compat.families.common import FULL, shortest_period
from torch_compat.families.family import NAME, Config, Table, consecutive_rows, fused
from torch_compat.families.values import integer
from torch_compat.names.table import DepthwiseConvolution, Rule

LINEAR = "linear_attention"
"""Kind of a Mamba-2 layer in transformers 5."""
_KINDS = {LINEAR: MAMBA2, "mamba": MAMBA2, FULL: ATTENTION, "attention": ATTENTION}
"""Kind of a layer in transformers 5 and 4 -> mixer."""
HYBRID_LAYERS = {
    "M": LayerParts(MAMBA2, "none"),
    "*": LayerParts(ATTENTION, "none"),
    "-": LayerParts(NO_MIXER, "dense"),
    "E": LayerParts(NO_MIXER, "experts"),
}
"""Letter of a layer in the patterns of Nemotron-H and Megatron-Core -> its parts."""
_INFINITE = {"__float__": "Infinity"}  # as transformers 5 writes it
_PROJECTIONS = ("z", "x", "b", "c", "dt")


def _projection_rows(model: ModelConfig) -> list[np.ndarray]:
    """Return the rows of the gate, x, B, C and the time steps in `in_proj`."""
    c = model.mamba2
    return consecutive_rows(c.inner_size, c.inner_size, c.group_size, c.group_size, c.heads)


def _convolution_rows(model: ModelConfig) -> list[np.ndarray]:
    """Return the channels of x, B and C in `conv1d`."""
    c = model.mamba2
    return consecutive_rows(c.inner_size, c.group_size, c.group_size)


def mamba2_rules(module: str) -> tuple[Rule, ...]:
    """Return the rules of a Mamba-2 layer.

    Args:
        module: the family's name of the module, such as "model.layers.{i}.mamba.".
    """
    prefix = f"{NAME}{MAMBA2}."
    plain = {"a_log": "A_log", "dt_bias": "dt_bias", "skip": "D", "norm.weight": "norm.weight",
             "out_proj.weight": "out_proj.weight"}  # fmt: skip
    return (
        *(Rule(f"{prefix}{name}", f"{module}{key}") for name, key in plain.items()),
        Rule(f"{prefix}out_proj.bias", f"{module}out_proj.bias", optional=True),
        *(
            rule
            for kind in ("weight", "bias")
            for rule in fused(
                tuple(f"{prefix}{name}_proj.{kind}" for name in _PROJECTIONS),
                f"{module}in_proj.{kind}",
                _projection_rows,
                optional=kind == "bias",
            )
        ),
        *fused(
            tuple(f"{prefix}{name}_conv.weight" for name in "xbc"),
            f"{module}conv1d.weight",
            _convolution_rows,
            change=DepthwiseConvolution(),
        ),
        *fused(
            tuple(f"{prefix}{name}_conv.bias" for name in "xbc"),
            f"{module}conv1d.bias",
            _convolution_rows,
            optional=True,
        ),
    )


KEYS: Mapping[str, str] = {
    "heads": "mamba_n_heads", "head_dim": "mamba_d_head", "state_size": "mamba_d_state",
    "groups": "mamba_n_groups", "conv_size": "mamba_d_conv", "chunk_size": "mamba_chunk_size",
    "conv_bias": "mamba_conv_bias", "proj_bias": "mamba_proj_bias",
}  # fmt: skip
"""Key of `[model.mamba2]` -> key of Bamba and Granite 4."""
DEFAULTS: Mapping[str, Any] = {
    "mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_d_state": 256, "mamba_n_groups": 1,
    "mamba_d_conv": 4, "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_proj_bias": False,
    "mamba_expand": 2, "time_step_limit": None,
}  # fmt: skip
"""Keys of Bamba and Granite 4 and their defaults in transformers."""
RANGES = {"mamba_d_head": lambda value: value == "auto" or integer()(value)}


def mamba2(c: Config, where: str) -> Table:
    """Read the settings of Mamba-2 layers from the keys of Bamba, Granite 4 and Falcon-H1.

    Raises:
        UserError: the heads do not add up to the width of the layer.
    """
    table = {key: c[hf_key] for key, hf_key in KEYS.items()}
    size = c.get("mamba_d_ssm")  # Falcon-H1
    inner = size or c["mamba_expand"] * c["hidden_size"]
    if table["head_dim"] == "auto":
        table["head_dim"] = max(1, inner // table["heads"])
    if table["head_dim"] * table["heads"] != inner:
        raise UserError(
            f"{where}: mamba_n_heads * mamba_d_head = {table['heads']} * {table['head_dim']} must "
            f"be {'mamba_d_ssm' if size else 'mamba_expand * hidden_size'} = {inner}"
        )
    return {MAMBA2: table | time_step_limits(c["time_step_limit"], where)}


def mamba2_keys(model: ModelConfig) -> Table:
    """Return the keys that `mamba2` reads."""
    c = model.mamba2
    return {
        **{hf_key: getattr(c, key) for key, hf_key in KEYS.items()},
        "mamba_expand": c.inner_size // model.dim,
        "time_step_limit": time_step_limit_key(model),
    }


def time_step_limits(limit: Any, where: str) -> Table:  # noqa: ANN401 (untrusted JSON)
    """Read the limits of time steps from a pair; an infinite number is not a limit.

    Raises:
        UserError: it is not a pair of such numbers.
    """
    if limit is None:
        return {}
    pair = [math.inf if x == _INFINITE else x for x in limit] if isinstance(limit, list) else []
    are_numbers = all(type(x) in (int, float) and x >= 0 for x in pair)
    if len(pair) != 2 or not are_numbers or not pair[0] < min(pair[1], 1e30):
        raise UserError(
            f"{where}: time_step_limit = {reprlib.repr(limit)} is not a range of numbers"
        )
    least, most = map(float, pair)
    return {"time_step_min": least} | ({} if math.isinf(most) else {"time_step_max": most})


def time_step_limit_key(model: ModelConfig) -> list[Any]:
    """Return the key that `time_step_limits` reads."""
    least, most = model.mamba2.time_step_limits
    return [least, _INFINITE if math.isinf(most) else most]


def mixers(kinds: Sequence[str], n_layers: int, where: str) -> Table:
    """Read the mixer of each layer.

    Args:
        kinds: kind of each layer as in `layer_types`.
        n_layers: number of layers.
        where: the file, for messages.

    Raises:
        UserError: a kind is unknown, or their number is not the number of layers.
    """
    if len(kinds) != n_layers or not set(kinds) <= _KINDS.keys():
        raise UserError(
            f"{where}: layer_types has {len(kinds)} layers of {', '.join(sorted(set(kinds)))}; "
            f"it must have {n_layers}, of {LINEAR} and {FULL}"
        )
    return pattern([_KINDS[kind] for kind in kinds])


def hybrid_patterns(letters: str) -> Table:
    """Return the keys of `[model]` for layers of one part, by their letters."""
    parts = [HYBRID_LAYERS[letter] for letter in letters]
    feed_forwards = shortest_period([part.feed_forward for part in parts])
    return {**pattern([part.mixer for part in parts]), "feed_forward_pattern": feed_forwards}


def pattern(names: Sequence[str]) -> Table:
    """Return the keys of `[model]` for the mixers of all layers."""
    return {} if set(names) == {ATTENTION} else {"mixer_pattern": shortest_period(names)}


def layer_kinds(model: ModelConfig) -> list[str]:
    """Return the kind of each layer, as transformers 5 names it."""
    kinds = {MAMBA2: LINEAR, ATTENTION: FULL}
    return [kinds.get(parts.mixer, parts.mixer) for parts in model.layer_parts]
