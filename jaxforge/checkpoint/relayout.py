"""Between the order of layers on pipeline stages and that of checkpoints, which know no stages.

Where the two differ (`parallel.stages.Stack`: chunks, or stages of unequal length), a tree is
rearranged on the devices before it is written and after it is read; memory for a copy of it is
needed meanwhile. A tree is parameters, a train state, or any that has parameters' names in it.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from jaxforge.config.model import LAYERS
from jaxforge.parallel.mesh import STAGES
from jaxforge.parallel.stages import Stack


def by_layer(tree: PyTree, stack: Stack) -> PyTree:
    """The tree as a checkpoint has it: entry i of stacked parameters is layer i.

    Args:
        tree: arrays, or their abstract values with shardings.
        stack: the order that they are in.
    """
    if stack.is_in_order:
        return tree
    wanted = _map_stacked(lambda leaf: _abstract_by_layer(leaf, stack), tree)
    if isinstance(jax.tree.leaves(tree)[0], jax.ShapeDtypeStruct):
        return wanted
    return _rearranged(tree, stack.unstack, _shardings(wanted), _shardings(wanted))


def by_stage(tree: PyTree, stack: Stack, like: PyTree) -> PyTree:
    """The tree as stages have it.

    Args:
        tree: as a checkpoint has it.
        stack: the order wanted.
        like: abstract values with the shardings wanted.
    """
    if stack.is_in_order:
        return tree
    return _rearranged(tree, stack.stack, _shardings(tree), _shardings(like))


Leaf = Any
"""An array or its abstract value."""


def _rearranged(
    tree: PyTree, reorder: Callable[[Array], Array], at: PyTree, result: PyTree
) -> PyTree:
    """The tree with its stacked parameters in another order.

    Args:
        tree: arrays.
        reorder: rearranges the rows of an array.
        at: shardings that do not split rows: only there each device rearranges its own. Left to
            the partitioner, which knows no way to do it in place, that of jax 0.11 aborts.
        result: shardings of the result.
    """

    def rearrange(tree: PyTree) -> PyTree:
        return _map_stacked(
            lambda leaf, at: jax.lax.with_sharding_constraint(
                reorder(jax.lax.with_sharding_constraint(leaf, at)), at
            ),
            tree, at,
        )  # fmt: skip

    compiled: Any = jax.jit(rearrange, out_shardings=result)
    return compiled(tree)


def _shardings(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def _map_stacked(function: Callable[..., Leaf], tree: PyTree, *more: PyTree) -> PyTree:
    def of_leaf(path: jax.tree_util.KeyPath, leaf: Leaf, *others: Any) -> Leaf:  # noqa: ANN401
        is_stacked = any(getattr(key, "key", None) == LAYERS for key in path)
        return function(leaf, *others) if is_stacked else leaf

    return jax.tree_util.tree_map_with_path(of_leaf, tree, *more)


def _abstract_by_layer(leaf: Leaf, stack: Stack) -> jax.ShapeDtypeStruct:
    """One entry a layer; what stages held apart is split along another dimension that divides."""
    shape, mesh = (stack.layers, *leaf.shape[1:]), leaf.sharding.mesh
    spec = [None, *leaf.sharding.spec[1:]]
    spec += [None] * (len(shape) - len(spec))
    for i, axes in enumerate(spec[1:], 1):
        names = (axes,) if isinstance(axes, str) else tuple(axes or ())
        parts = math.prod(mesh.shape[name] for name in (*names, STAGES))
        if shape[i] % parts == 0:
            spec[i] = (*names, STAGES)
            break
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=NamedSharding(mesh, P(*spec)))
