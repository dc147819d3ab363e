"""Parameters in memory by KempnerForge's names, one entry per layer, and back."""

import re

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from torch_compat.names.table import EMBEDDING, HEAD

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(.+)")


def to_torch(params, config=None, *, tied=False):
    """A tree shaped like the parameters as flat names; layers and experts are views.

    A model with several stacks of layers needs its `[model]`.
    """
    named = {}
    for name, leaf in flatten_dict(params, sep=".").items():
        stack, _, remaining = name.partition(".")
        rows = config.stacks if config else {"layers": range(leaf.shape[0])}
        if stack not in rows:
            named[name] = leaf
            continue
        for row, i in enumerate(rows[stack]):
            if remaining.startswith("mlp.experts."):
                of = remaining.removeprefix("mlp.experts.")
                for j, expert in enumerate(leaf[row]):
                    named[f"layers.{i}.mlp.experts.{j}.{of}"] = expert
            else:
                named[f"layers.{i}.{remaining}"] = leaf[row]
    if tied:
        named[HEAD] = named[EMBEDDING]
    return named


def from_torch(named, like, config=None):
    """Flat names as a tree shaped like `like`; each name is there, and used."""
    named = {name: np.asarray(array) for name, array in named.items()}
    expected = flatten_dict(like, sep=".")
    if HEAD not in expected:
        named.pop(HEAD, None)  # tied: the same table once more
    stack_of = {i: name for name, rows in (config.stacks if config else {}).items() for i in rows}
    layers, experts, stacked = {}, {}, {}
    for name, array in named.items():
        if match := _LAYER.fullmatch(name):
            layer, remaining = int(match[1]), match[2]
            stack = stack_of.get(layer, "layers")
            if of_expert := _EXPERT.fullmatch(remaining):
                whole = f"{stack}.mlp.experts.{of_expert[2]}"
                experts.setdefault((whole, layer), {})[int(of_expert[1])] = array
            else:
                layers.setdefault(f"{stack}.{remaining}", {})[layer] = array
        else:
            stacked[name] = array
    for (name, layer), entries in experts.items():
        layers.setdefault(name, {})[layer] = np.stack([entries[j] for j in range(len(entries))])
    for name, entries in layers.items():
        stacked[name] = np.stack([entries[i] for i in sorted(entries)])
    assert {n: a.shape for n, a in stacked.items()} == {n: a.shape for n, a in expected.items()}
    return unflatten_dict(stacked, sep=".")
