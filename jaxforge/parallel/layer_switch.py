"""Choice between layers of different structure, in the one program of all pipeline stages.

Each device runs the layer that its stage has in a row. The devices of a stage choose the same
layer, so that collectives over other mesh axes complete. A collective whose groups include devices
of several stages must not be part of a layer.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree

from jaxforge.parallel import collectives

Shape = tuple[tuple[int, ...], jnp.dtype]
Outputs = TypeVar("Outputs")
Tree = TypeVar("Tree", bound=PyTree)
LayerResult = tuple[Array, tuple[list[Array], Outputs]]
"""x after a layer, and its other results: arrays of its own, and outputs that all layers have."""


def run_layer(
    index: Int[Array, ""],
    layers: Sequence[Callable[[], LayerResult[Outputs]]],
    x: Array,
    axes: frozenset[str],
) -> LayerResult[Outputs]:
    """Run one of several layers, or none.

    Args:
        index: index of the layer; the number of layers: none.
        layers: the layers.
        x: result without a layer.
        axes: manual mesh axes over which results vary.

    Returns:
        The result of the layer, in which arrays contain the layer's own ones (`arrays_of_layer`).
        Without a layer, the arrays and outputs are zeros.
    """
    # Branches of a switch must return the same shapes, but layers of different kinds do not: each
    # fills some of `shapes`, which hold the arrays of any of them.
    abstract = [jax.eval_shape(layer) for layer in layers]
    shapes = _shared_shapes(arrays for _, (arrays, _) in abstract)

    def vary(tree: Tree) -> Tree:
        return jax.tree.map(lambda leaf: collectives.varying(leaf, axes), tree)

    def run(layer: Callable[[], LayerResult[Outputs]]) -> LayerResult[Outputs]:
        y, (arrays, outputs) = layer()
        # Arrays of other layers stay zeros, which nothing reads.
        shared = [jnp.zeros(*shape) for shape in shapes]
        for i, array in zip(_indices(shapes, arrays), arrays, strict=True):
            shared[i] = array
        # Zeros vary over no axis, results over some: the branches must agree.
        return vary((y, (shared, outputs)))

    def run_nothing() -> LayerResult[Outputs]:
        _, (_, like) = abstract[0]
        outputs = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
        return vary((x, ([jnp.zeros(*shape) for shape in shapes], outputs)))

    branches = [lambda layer=layer: run(layer) for layer in layers]
    return jax.lax.switch(index, [*branches, run_nothing])


def arrays_of_layer(shared: Sequence[Array], like: Sequence[Array]) -> list[Array]:
    """Return a layer's own arrays from those that `run_layer` returned.

    Args:
        shared: arrays that any of the layers may have filled.
        like: arrays with the shapes and the order of those that the layer returned.
    """
    shapes = [(array.shape, array.dtype) for array in shared]
    return [shared[i] for i in _indices(shapes, like)]


def change_if(condition: Bool[Array, ""], change: Callable[[Tree], Tree], tree: Tree) -> Tree:
    """Return `change(tree)`, or the unchanged tree on devices without the condition.

    A loop of one or no turn: XLA changes its arrays in place. Through a conditional they are
    copied.
    """
    return jax.lax.fori_loop(0, condition.astype(jnp.int32), lambda _, tree: change(tree), tree)


def _shared_shapes(arrays_of_layers: Iterable[Sequence[jax.ShapeDtypeStruct]]) -> list[Shape]:
    """Return the shapes of the fewest arrays that can hold the arrays of any of the layers."""
    shapes: list[Shape] = []
    for arrays in arrays_of_layers:
        free = list(shapes)
        for array in arrays:
            shape = array.shape, array.dtype
            if shape in free:
                free.remove(shape)
            else:
                shapes.append(shape)
    return shapes


def _indices(shapes: Sequence[Shape], arrays: Sequence[Array]) -> list[int]:
    """Return the index of the shared array of each array of a layer."""
    # First fit, in the same order for writing and for reading: both find the same array.
    free = list(range(len(shapes)))
    indices = []
    for array in arrays:
        index = next(i for i in free if shapes[i] == (array.shape, array.dtype))
        free.remove(index)
        indices.append(index)
    return indices
