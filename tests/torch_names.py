"""Parameters in memory by KempnerForge's names, one entry per layer, and back."""

import re

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from torch_compat.names.table import EMBEDDING, HEAD

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


def to_torch(params, *, tied=False):
    """A tree shaped like the parameters as flat names; layers are views."""
    named = {}
    for name, leaf in flatten_dict(params, sep=".").items():
        if name.startswith("layers."):
            for i in range(leaf.shape[0]):
                named[f"layers.{i}.{name.removeprefix('layers.')}"] = leaf[i]
        else:
            named[name] = leaf
    if tied:
        named[HEAD] = named[EMBEDDING]
    return named


def from_torch(named, like):
    """Flat names as a tree shaped like `like`; each name is there, and used."""
    named = {name: np.asarray(array) for name, array in named.items()}
    expected = flatten_dict(like, sep=".")
    if HEAD not in expected:
        named.pop(HEAD, None)  # tied: the same table once more
    layers, stacked = {}, {}
    for name, array in named.items():
        if match := _LAYER.fullmatch(name):
            layers.setdefault(f"layers.{match[2]}", {})[int(match[1])] = array
        else:
            stacked[name] = array
    for name, entries in layers.items():
        stacked[name] = np.stack([entries[i] for i in range(len(entries))])
    assert {n: a.shape for n, a in stacked.items()} == {n: a.shape for n, a in expected.items()}
    return unflatten_dict(stacked, sep=".")
