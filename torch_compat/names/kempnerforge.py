"""KempnerForge's parameter names: jaxforge's own paths, with one entry per layer.

    layers.attention.q_proj.weight [L, out, in]   <->   layers.{i}.attention.q_proj.weight [out, in]

Every other parameter has the same name and shape on both sides. With tied embeddings KempnerForge
writes the table under both of its names.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxforge.errors import UserError

Params = dict[str, Any]

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_EMBEDDING = "token_embedding.embedding.weight"
_HEAD = "output_head.proj.weight"


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
        named[_HEAD] = named[_EMBEDDING]
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
    if _HEAD not in expected:
        named.pop(_HEAD, None)  # tied: the same table once more
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
