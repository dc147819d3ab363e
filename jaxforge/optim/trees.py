"""Trees of parameters: results per leaf taken apart, and parts of a tree."""

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
    """The trees, like `like`, of the first to nth items of leaves that are tuples of n."""

    def item(i: int) -> PyTree:
        return jax.tree.map(lambda _, items: items[i], like, tuples)

    return tuple(item(i) for i in range(n))


def split(tree: PyTree, paths: Set[Path]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The leaves at `paths`, and the others; either may be an empty dict."""
    flat = flatten_dict(tree)
    chosen = {path: leaf for path, leaf in flat.items() if path in paths}
    others = {path: leaf for path, leaf in flat.items() if path not in paths}
    return unflatten_dict(chosen), unflatten_dict(others)


def join(first: PyTree, other: PyTree) -> dict[str, Any]:
    """Join what `split` has split."""
    return unflatten_dict({**flatten_dict(first), **flatten_dict(other)})


@functools.cache  # a state after an update has the type of the one before it
def state_type(name: str, fields: tuple[str, ...]) -> Any:  # noqa: ANN401  # a class
    """Return the named tuple of an optimizer's state whose fields are found when it is built."""
    return namedtuple(name, fields)
