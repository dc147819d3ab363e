"""Assignment of layers to pipeline stages, and a forward pass through the stages."""

import functools
from collections.abc import Callable
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
    """The order of layers in stacked parameters: stage after stage, and in each chunk after chunk.

    A layer's virtual stage is that of consecutive layers; where their number does not divide, early
    ones have one layer more, as in KempnerForge, and the others a row of zeros: a block of zeros
    adds nothing to the residual stream, and gets no gradient.

    Attributes:
        layers: how many layers the model has.
        stages: size of the mesh axis `pp`.
        chunks: virtual stages of a stage.
    """

    layers: int
    stages: int = 1
    chunks: int = 1

    @property
    def per_chunk(self) -> int:
        """Rows of a virtual stage."""
        return -(-self.layers // (self.stages * self.chunks))

    @property
    def is_in_order(self) -> bool:
        """Return whether row i holds layer i and no other rows exist."""
        return self.layers == len(self.rows()) and (self.stages == 1 or self.chunks == 1)

    def rows(self) -> np.ndarray:
        """The layer of each row; -1: none."""
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
        """Rows from an array with one entry a layer."""
        rows = self.rows()
        padded = jnp.concatenate([by_layer, jnp.zeros_like(by_layer[:1])])  # where -1 points
        return by_layer if self.is_in_order else padded[rows]

    def unstack(self, rows: Array) -> Array:
        """One entry a layer: `stack` undone."""
        order = self.rows()
        return rows if self.is_in_order else rows[np.argsort(order)[(order < 0).sum() :]]


def split_layers(arrays: dict[str, Any]) -> tuple[PyTree, dict[str, Any]]:
    """The layers of parameters, or of a tree like them, and all others."""
    others = {name: part for name, part in arrays.items() if name != LAYERS}
    return arrays.get(LAYERS, {}), others


def only_rows(is_selected: Bool[Array, "rows"] | np.ndarray, by_row: Array) -> Array:
    """Return the values of some rows, and zeros for the others."""
    return jnp.where(is_selected.reshape(-1, *(1,) * (by_row.ndim - 1)), by_row, 0)


Run = Callable[[PyTree, Array, PyTree, PyTree], tuple[Array, PyTree, PyTree]]
"""(layers, x, place, cache) -> x and cache after these layers, and what each tells besides."""


def forward_pipeline(
    run: Run, stack: Stack, layers: PyTree, x: Array, positions: PyTree, cache: PyTree
) -> tuple[Array, PyTree, PyTree]:
    """Run layers that are split over `pp`: each stage waits for the one before it.

    For one batch that goes forward only. All stages compute at a time, most of them in vain: a
    stage's result counts from the turn on in which its input has come. It keeps that input, so that
    what it writes to the cache stays.

    Args:
        run: what runs some of the layers.
        stack: where the layers are.
        layers: parameters, stacked.
        x: [b, s, d], input of the first layer.
        positions: passed on to `run`.
        cache: stacked as the layers are, and split over `pp`.

    Returns:
        What leaves the last layer, the cache, and what layers tell; rows without one tell zeros.
    """
    last, is_layer = stack.stages - 1, stack.rows() >= 0
    ring = [(i, (i + 1) % stack.stages) for i in range(stack.stages)]

    def every_stage(layers: PyTree, x: Array, positions: PyTree, cache: PyTree) -> Any:  # noqa: ANN401
        stage = jax.lax.axis_index(STAGES)
        arriving, positions = jax.lax.pcast((x, positions), STAGES, to="varying")
        chunks = []  # of each, the cache, and what was told
        for chunk in range(stack.chunks):
            rows = slice(chunk * stack.per_chunk, (chunk + 1) * stack.per_chunk)
            of_chunk = functools.partial(jax.tree.map, lambda leaf, rows=rows: leaf[rows])
            mine, own_cache, outputs = arriving, of_chunk(cache), None
            for turn in range(stack.stages):
                mine = jnp.where(stage == turn, arriving, mine)
                y, own_cache, outputs = run(of_chunk(layers), mine, positions, own_cache)
                arriving = jax.lax.ppermute(y, STAGES, ring)
            chunks.append((own_cache, outputs))
        result = collectives.psum(jnp.where(stage == last, y, 0), LAYERS)
        return result, *jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *chunks)

    split = jax.P(STAGES)
    x, cache, outputs = jax.shard_map(
        every_stage,
        in_specs=(split, jax.P(), jax.P(), split),
        out_specs=(jax.P(), split, split),
        axis_names=manual_over({STAGES}, jax.sharding.get_abstract_mesh()),
    )(layers, x, positions, cache)

    return x, cache, jax.tree.map(functools.partial(only_rows, is_layer), outputs)
