"""KempnerForge: our own names, since ours were taken from it."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxforge.errors import UserError
from torch_compat.names.table import EMBEDDING, HEAD, Dialect, Rule, Transposed

_SAME = (
    EMBEDDING,
    HEAD,
    "norm.weight",
    "norm.bias",
    *(
        f"layers.{{i}}.{name}"
        for name in (
            "attention_norm.weight",
            "attention_norm.bias",
            *(f"attention.{m}_proj.{p}" for m in "qkv" for p in ("weight", "bias")),
            "attention.o_proj.weight",
            "attention.q_norm.weight",
            "attention.k_norm.weight",
            "mlp_norm.weight",
            "mlp_norm.bias",
            *(f"mlp.{m}_proj.weight" for m in ("gate", "up", "down")),
            "mlp.router.gate.weight",
            "mlp.router.expert_bias",
            "mlp.router.expert_ema",
            *(f"mlp.shared_expert.{m}_proj.weight" for m in ("gate", "up", "down")),
        )
    ),
)
_EXPERTS = tuple(f"layers.{{i}}.mlp.experts.{{j}}.{m}_proj.weight" for m in ("gate", "up", "down"))

KEMPNERFORGE = Dialect(
    "kempnerforge",
    "KempnerForge's text model",
    tuple(Rule(name, name) for name in (*_SAME, *_EXPERTS)),
    writes_tied_head=True,
)

KEMPNERFORGE_PACKED = Dialect(
    "kempnerforge-packed",
    "KempnerForge with model.moe_packed_experts: all experts of a block in one [E, in, out] tensor",
    (
        *(Rule(name, name) for name in _SAME),
        *(
            Rule(
                f"layers.{{i}}.mlp.experts.{{j}}.{m}_proj.weight",
                f"layers.{{i}}.mlp.{m}_w",
                Transposed(),
            )
            for m in ("gate", "up", "down")
        ),
    ),
    writes_tied_head=True,
)

Params = dict[str, Any]

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


def to_torch(params: Params, *, tied: bool = False) -> dict[str, Any]:
    """A tree shaped like the parameters as KempnerForge's flat names; layers are views.

    Args:
        params: parameters, moments, or any tree like them.
        tied: write the embedding under the output head's name as well.
    """
    named: dict[str, Any] = {}
    for name, leaf in flatten_dict(params, sep=".").items():
        if name.startswith("layers."):
            for i in range(leaf.shape[0]):
                named[f"layers.{i}.{name.removeprefix('layers.')}"] = leaf[i]
        else:
            named[name] = leaf
    if tied:
        named[HEAD] = named[EMBEDDING]
    return named


def from_torch(named: Mapping[str, Any], like: Params) -> Params:
    """KempnerForge's flat names as a tree shaped like `like`.

    Args:
        named: name -> array, every name once.
        like: the parameters' tree; its leaves need only `shape`.

    Raises:
        UserError: names are missing, left over, or of another shape.
    """
    named = dict(named)
    expected = flatten_dict(like, sep=".")
    if HEAD not in expected:
        named.pop(HEAD, None)  # tied: the same table once more
    stacked = _stack(named)
    problems = [f"missing: {n}" for n in expected.keys() - stacked.keys()]
    problems += [f"left over: {n}" for n in stacked.keys() - expected.keys()]
    problems += [
        f"{n} has shape {stacked[n].shape}, the model {tuple(expected[n].shape)}"
        for n in expected.keys() & stacked.keys()
        if stacked[n].shape != tuple(expected[n].shape)
    ]
    if problems:
        raise UserError("the weights do not fit the model:\n  " + "\n  ".join(sorted(problems)))
    return unflatten_dict(stacked, sep=".")


def _stack(named: Mapping[str, Any]) -> dict[str, np.ndarray]:
    layers: dict[str, dict[int, Any]] = {}
    stacked = {}
    for name, array in named.items():
        if match := _LAYER.fullmatch(name):
            layers.setdefault(f"layers.{match[2]}", {})[int(match[1])] = array
        else:
            stacked[name] = np.asarray(array)
    for name, by_index in layers.items():
        holes = set(range(max(by_index) + 1)) - by_index.keys()
        if holes:
            raise UserError(f"{name}: layers {sorted(holes)} are missing")
        stacked[name] = np.stack([np.asarray(by_index[i]) for i in sorted(by_index)])
    return stacked
