"""Helpers for trees of parameters: splitting, joining and unzipping."""

import functools
from collections import namedtuple
from collections.abc import Set
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import PyTree

Path = tuple[str, ...]
"""Keys from the root of nested dicts to a leaf."""


def unzip(n: int, tuples: PyTree, like: PyTree) -> tuple[PyTree, ...]:
    """Convert a tree of n-tuples to n trees with the structure of `like`."""
    return tuple(jax.tree.map(lambda _, items, i=i: items[i], like, tuples) for i in range(n))


def split(tree: PyTree, paths: Set[Path]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a tree into the leaves at `paths` and the others; either may be an empty dict."""
    flat = flatten_dict(tree)
    chosen = {path: leaf for path, leaf in flat.items() if path in paths}
    remaining = {path: leaf for path, leaf in flat.items() if path not in paths}
    return unflatten_dict(chosen), unflatten_dict(remaining)


def join(first: PyTree, other: PyTree) -> dict[str, Any]:
    """Join two trees that `split` returned."""
    return unflatten_dict({**flatten_dict(first), **flatten_dict(other)})


@functools.cache  # the state after an update must have the type of the state before
def state_type(name: str, fields: tuple[str, ...]) -> Any:  # noqa: ANN401  # a class
    """Return the named tuple class of an optimizer state whose fields depend on the rule."""
    return namedtuple(name, fields)
