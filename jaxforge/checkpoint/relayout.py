"""Layout of checkpoints on the devices: the order of layers, and groups that train apart.

Checkpoints hold layers in order. If stages hold them in another order (`parallel.stages.Stack`:
chunks, or stages of unequal length), a tree is rearranged on the devices before it is written and
after it is read, which needs memory for a copy. A tree is parameters, a train state, or any other
tree with the names of parameters.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from jaxforge.parallel.groups import REPLICAS
from jaxforge.parallel.mesh import STAGES
from jaxforge.parallel.stages import Stack, is_stack
from jaxforge.state.train_state import Groups, TrainState


def by_layer(tree: PyTree, stack: Stack) -> PyTree:
    """Return a tree in checkpoint order: entry i of stacked parameters is layer i.

    Args:
        tree: arrays, or abstract values with shardings.
        stack: order of layers in `tree`.
    """
    if stack.is_checkpoint_order:
        return tree
    # Rows of padding are dropped here, so the first dimension may differ from that of `tree`.
    ordered = _map_stacked(lambda name, leaf: _abstract_by_layer(leaf, stack.of(name)), tree)
    if isinstance(jax.tree.leaves(tree)[0], jax.ShapeDtypeStruct):
        return ordered
    at = _shardings(ordered)
    return _rearranged(tree, lambda name, leaf: stack.of(name).unstack(leaf), at, at)


def by_stage(tree: PyTree, stack: Stack, like: PyTree) -> PyTree:
    """Return a tree in the order of the stages.

    Args:
        tree: arrays in checkpoint order.
        stack: requested order of layers.
        like: abstract values with the requested shardings.
    """
    if stack.is_checkpoint_order:
        return tree
    at, result = _shardings(tree), _shardings(like)
    return _rearranged(tree, lambda name, leaf: stack.of(name).stack(leaf), at, result)


def as_groups(like: TrainState, outer: PyTree, n: int) -> TrainState:
    """Return the state of `n` groups as it is saved, given that of devices that train together.

    Devices that are replicas of each other share the arrays of all groups.

    Args:
        like: abstract values with shardings.
        outer: state of the outer optimizer.
        n: number of groups.
    """

    def for_each(leaf: Leaf) -> jax.ShapeDtypeStruct:
        return _with_whole_rows(leaf, n, leaf.shape, leaf.sharding.spec, REPLICAS)

    own = Groups(like.params, like.opt_state, like.model_state)
    guard, counts, groups = jax.tree.map(for_each, (like.guard, like.counts, own))
    return dataclasses.replace(like, opt_state=outer, guard=guard, counts=counts, groups=groups)


Leaf = Any
"""Array or abstract value."""


def _rearranged(
    tree: PyTree, reorder: Callable[[str, Array], Array], at: PyTree, result: PyTree
) -> PyTree:
    """Return the tree with its stacked parameters in another order.

    Args:
        tree: arrays.
        reorder: function that rearranges the rows of an array of the named stack.
        at: shardings that do not split rows, so that each device rearranges its own part. With
            split rows, the partitioner of jax 0.11 aborts.
        result: shardings of the result.
    """

    def rearrange(tree: PyTree) -> PyTree:
        return _map_stacked(
            lambda name, leaf, at: jax.lax.with_sharding_constraint(
                reorder(name, jax.lax.with_sharding_constraint(leaf, at)), at
            ),
            tree, at,
        )  # fmt: skip

    # Not donated: a run continues with the arrays that it saves.
    compiled: Any = jax.jit(rearrange, out_shardings=result)
    return compiled(tree)


def _shardings(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def _map_stacked(function: Callable[..., Leaf], tree: PyTree, *more: PyTree) -> PyTree:
    """Apply a function of (name of the stack, leaf, leaves of `more`) to stacked parameters."""

    def map_leaf(path: jax.tree_util.KeyPath, leaf: Leaf, *leaves: Any) -> Leaf:  # noqa: ANN401
        # Moments and averages have the names of parameters further down in their path.
        names = [key.key for key in path if is_stack(getattr(key, "key", ""))]
        return function(names[0], leaf, *leaves) if names else leaf

    return jax.tree_util.tree_map_with_path(map_leaf, tree, *more)


def _abstract_by_layer(leaf: Leaf, stack: Stack) -> jax.ShapeDtypeStruct:
    """Return the abstract value in checkpoint order, with one entry per layer.

    The axis of the stages moves from the rows to the first other dimension that it divides.
    """
    return _with_whole_rows(leaf, stack.layers, leaf.shape[1:], leaf.sharding.spec[1:], STAGES)


def _with_whole_rows(
    leaf: Leaf, n: int, shape: tuple[int, ...], spec: Sequence[Any], axis: str
) -> jax.ShapeDtypeStruct:
    """Return an abstract value [n, *shape] of rows that no mesh axis splits.

    Args:
        leaf: abstract value that gives the dtype and the mesh.
        n: number of rows.
        shape: shape of a row.
        spec: mesh axes of a row. It may be shorter than the shape: missing dimensions are whole.
        axis: mesh axis that also splits the first dimension of a row that it divides.
    """
    mesh, split = leaf.sharding.mesh, [*spec, *[None] * (len(shape) - len(spec))]
    for i, axes in enumerate(split):
        names = (axes,) if isinstance(axes, str) else tuple(axes or ())
        parts = math.prod(mesh.shape[name] for name in (*names, axis))
        if shape[i] % parts == 0:
            split[i] = (*names, axis)
            break
    whole = NamedSharding(mesh, P(None, *split))
    return jax.ShapeDtypeStruct((n, *shape), leaf.dtype, sharding=whole)
