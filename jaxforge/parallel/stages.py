"""Assignment of layers to pipeline stages, and a forward pass through the stages."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PyTree

from jaxforge.config.model import LAYERS
from jaxforge.parallel import collectives
from jaxforge.parallel.mesh import STAGES
from jaxforge.parallel.sharding import manual_over


class Stack(NamedTuple):
    """Order of layers in stacked parameters: stage after stage, and within a stage chunk by chunk.

    A virtual stage holds consecutive layers. If the number of layers is not divisible, the first
    virtual stages have one more layer, as in KempnerForge, and the others a row of zeros. A block
    of zeros adds zero to the residual stream, and gets no gradient.

    A model with several stacks of parameters has the same layers in each virtual stage. A stack
    with some of the layers is in the same order, by its own rows (`stack`, `unstack`).

    Attributes:
        layers: number of layers of the model.
        stages: size of the mesh axis `pp`.
        chunks: number of virtual stages of a stage.
    """

    layers: int
    stages: int = 1
    chunks: int = 1

    @property
    def per_chunk(self) -> int:
        """Number of rows of a virtual stage."""
        return -(-self.layers // (self.stages * self.chunks))

    @property
    def is_padded(self) -> bool:
        """True if some rows hold no layer."""
        return self.layers != self.per_chunk * self.stages * self.chunks

    @property
    def is_in_order(self) -> bool:
        """True if row i holds layer i, and there are no other rows."""
        return not self.is_padded and (self.stages == 1 or self.chunks == 1)

    def rows(self) -> np.ndarray:
        """Return the layer of each row; -1: no layer."""
        each, longer = divmod(self.layers, self.stages * self.chunks)
        rows = np.full((self.stages, self.chunks, self.per_chunk), -1)
        first = 0
        for virtual in range(self.stages * self.chunks):
            n = each + (virtual < longer)
            chunk, stage = divmod(virtual, self.stages)
            rows[stage, chunk, :n] = first + np.arange(n)
            first += n
        return rows.reshape(-1)

    def stack(self, by_layer: Array) -> Array:
        """Return stacked rows from an array with one entry per layer; zeros in empty rows."""
        if self.is_in_order:
            return by_layer
        padded = jnp.concatenate([by_layer, jnp.zeros_like(by_layer[:1])])  # index -1: zeros
        return padded[self._replace(layers=len(by_layer)).rows()]

    def unstack(self, rows: Array) -> Array:
        """Undo `stack`: return an array with one entry per layer."""
        if self.is_in_order:
            return rows
        order = self.part(len(rows)).rows()
        return rows[np.argsort(order)[(order < 0).sum() :]]

    def part(self, rows: int) -> "Stack":
        """Return the order of a stack with `rows` rows, which may hold some of the layers only."""
        return self if rows == len(self.rows()) else self._replace(layers=rows)

    def rows_with(self, layers: Sequence[int]) -> np.ndarray:
        """Return the rows that hold some of the layers."""
        return np.flatnonzero(np.isin(self.rows(), layers))


def is_stack(name: str) -> bool:
    """Return whether a group of parameters is a stack of layers (`ModelConfig.stacks`)."""
    return name == LAYERS or name.endswith(f"_{LAYERS}")


def split_layers(arrays: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split parameters, or a tree of the same structure, into stacks of layers and others."""
    stacks = {name: array for name, array in arrays.items() if is_stack(name)}
    return stacks, {name: array for name, array in arrays.items() if name not in stacks}


def rows_of_chunk(chunk: int, chunks: int, stacked: PyTree) -> PyTree:
    """Return the rows of a chunk among those of a stage; each stack has rows of its own."""

    def rows(leaf: Array) -> Array:
        n = len(leaf) // chunks
        return leaf[chunk * n : (chunk + 1) * n]

    return jax.tree.map(rows, stacked)


def only_rows(is_selected: Bool[Array, "rows"] | np.ndarray, by_row: Array) -> Array:
    """Return the values of some rows, and zeros for the others."""
    return jnp.where(is_selected.reshape(-1, *(1,) * (by_row.ndim - 1)), by_row, 0)


Run = Callable[[PyTree, Array, PyTree, PyTree], tuple[Array, PyTree, PyTree]]
"""(layers, x, positions, cache) -> x and cache after the layers, and auxiliary outputs by layer."""


def forward_pipeline(
    run: Run,
    stack: Stack,
    layers: PyTree,
    x: Array,
    positions: PyTree,
    cache: PyTree,
    *,
    is_recurrent: bool = False,
) -> tuple[Array, PyTree, PyTree]:
    """Run layers that are split over `pp` forward, for one batch.

    Stages run one after another. All stages compute in every turn, and results before a stage's
    own turn are discarded. From its turn on, a stage repeats the same input, so that it writes the
    same keys and values to its cache again. A recurrent state would change again, and is replaced
    in the stage's own turn only.

    Args:
        run: function that runs consecutive layers.
        stack: order of the layers in `layers`.
        layers: stacked parameters of the layers.
        x: input of the first layer [b, s, d].
        positions: positions of the tokens, an argument of `run`.
        cache: cache of all layers, stacked like `layers` and split over `pp`.
        is_recurrent: whether the cache has recurrent states.

    Returns:
        The output of the last layer, the cache, and auxiliary outputs by row; zeros for rows
        without a layer.
    """
    last, is_layer = stack.stages - 1, stack.rows() >= 0
    ring = [(i, (i + 1) % stack.stages) for i in range(stack.stages)]

    # For 3 stages, with the input of each stage in each turn (- is discarded, = is repeated):
    #
    #   turn      0      1      2
    #   stage 0   x      = x    = x
    #   stage 1   -      y0     = y0
    #   stage 2   -      -      y1
    def run_stages(layers: PyTree, x: Array, positions: PyTree, cache: PyTree) -> Any:  # noqa: ANN401
        stage = jax.lax.axis_index(STAGES)
        arriving, positions = jax.lax.pcast((x, positions), STAGES, to="varying")
        chunks = []  # (cache, auxiliary outputs) of each chunk
        for chunk in range(stack.chunks):
            take_rows = functools.partial(rows_of_chunk, chunk, stack.chunks)
            own_x, own_cache, outputs = arriving, take_rows(cache), None
            for turn in range(stack.stages):
                own_x = jnp.where(stage == turn, arriving, own_x)
                y, new_cache, outputs = run(take_rows(layers), own_x, positions, own_cache)
                if is_recurrent:
                    keep = functools.partial(jnp.where, stage == turn)
                    new_cache = jax.tree.map(keep, new_cache, own_cache)
                own_cache = new_cache
                arriving = jax.lax.ppermute(y, STAGES, ring)
            chunks.append((own_cache, outputs))
        result = collectives.psum(jnp.where(stage == last, y, 0), LAYERS)
        return result, *jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *chunks)

    split = jax.P(STAGES)
    x, cache, outputs = jax.shard_map(
        run_stages,
        in_specs=(split, jax.P(), jax.P(), split),
        out_specs=(jax.P(), split, split),
        axis_names=manual_over({STAGES}, jax.sharding.get_abstract_mesh()),
    )(layers, x, positions, cache)

    return x, cache, jax.tree.map(functools.partial(only_rows, is_layer), outputs)
