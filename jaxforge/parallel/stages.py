"""Assignment of layers to pipeline stages, and a forward pass through the stages."""

import functools
import itertools
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


class Locations(NamedTuple):
    """Parameters of layers in a pipeline whose stages have different layers.

    Attributes:
        stack: index of a layer's stack in `Stack.stack_names`; the number of stacks: no layer.
        row: row of the layer among those of its stack that are on the same virtual stage.
    """

    stack: Any
    row: Any


class Stack(NamedTuple):
    """Order of layers in stacked parameters: stage after stage, and within a stage chunk by chunk.

    A virtual stage holds consecutive layers. If the number of layers is not divisible, the first
    virtual stages have one more layer, as in KempnerForge, and the others a row of zeros. A block
    of zeros adds zero to the residual stream, and gets no gradient.

    A model with several stacks of parameters has an order of all layers, which is also that of
    their auxiliary outputs, and an order of the layers of each stack (`of`). In each of them, all
    virtual stages have the same number of rows.

    Attributes:
        layers: number of layers.
        stages: size of the mesh axis `pp`.
        chunks: number of virtual stages of a stage.
        names: name of each layer's stack; (): there is one stack.
        counts: number of layers of each virtual stage; (): as equal as possible.
    """

    layers: int
    stages: int = 1
    chunks: int = 1
    names: tuple[str, ...] = ()
    counts: tuple[int, ...] = ()

    @property
    def layer_counts(self) -> tuple[int, ...]:
        """Number of layers of each virtual stage."""
        virtual_stages = self.stages * self.chunks
        each, longer = divmod(self.layers, virtual_stages)
        return self.counts or tuple(each + (i < longer) for i in range(virtual_stages))

    @property
    def per_chunk(self) -> int:
        """Number of rows of a virtual stage."""
        return max(self.layer_counts)

    @property
    def is_padded(self) -> bool:
        """True if some rows hold no layer."""
        return len(set(self.layer_counts)) > 1

    @property
    def stack_names(self) -> tuple[str, ...]:
        """Names of the stacks; (): there is one stack."""
        names = tuple(sorted(set(self.names)))
        return names if len(names) > 1 else ()

    @property
    def is_in_order(self) -> bool:
        """True if row i holds layer i, and there are no other rows."""
        return not self.is_padded and (self.stages == 1 or self.chunks == 1)

    @property
    def is_checkpoint_order(self) -> bool:
        """True if the layers of all stacks are in order."""
        orders = [self.of(name) for name in self.stack_names] or [self]
        return all(order.is_in_order for order in orders)

    @property
    def has_equal_stages(self) -> bool:
        """True if all virtual stages have the same stacks in the same order.

        In a model with one stack, a row of zeros replaces a missing layer.
        """
        return not self.stack_names or len(set(self._names_by_virtual_stage())) == 1

    def of(self, name: str) -> "Stack":
        """Return the order of the layers of a stack, which are numbered from 0."""
        if not self.stack_names:
            return self
        counts = tuple(names.count(name) for names in self._names_by_virtual_stage())
        return Stack(sum(counts), self.stages, self.chunks, counts=counts)

    def _names_by_virtual_stage(self) -> list[tuple[str, ...]]:
        ends = itertools.accumulate(self.layer_counts)
        return [self.names[end - n : end] for n, end in zip(self.layer_counts, ends, strict=True)]

    def rows(self) -> np.ndarray:
        """Return the layer of each row; -1: no layer."""
        rows = np.full((self.stages, self.chunks, self.per_chunk), -1)
        first = 0
        for virtual, n in enumerate(self.layer_counts):
            chunk, stage = divmod(virtual, self.stages)
            rows[stage, chunk, :n] = first + np.arange(n)
            first += n
        return rows.reshape(-1)

    def locations(self) -> Locations:
        """Return the location of each row of all layers [rows]."""
        stack = np.full((self.stages, self.chunks, self.per_chunk), len(self.stack_names), np.int32)
        row = np.zeros_like(stack)
        for virtual, names in enumerate(self._names_by_virtual_stage()):
            chunk, stage = divmod(virtual, self.stages)
            for i, name in enumerate(names):
                stack[stage, chunk, i] = self.stack_names.index(name)
                row[stage, chunk, i] = names[:i].count(name)
        return Locations(stack.reshape(-1), row.reshape(-1))

    def stack(self, by_layer: Array) -> Array:
        """Return stacked rows from an array with one entry per layer; zeros in empty rows."""
        if self.is_in_order:
            return by_layer
        padded = jnp.concatenate([by_layer, jnp.zeros_like(by_layer[:1])])  # index -1: zeros
        return padded[self.rows()]

    def unstack(self, rows: Array) -> Array:
        """Undo `stack`: return an array with one entry per layer."""
        return rows if self.is_in_order else rows[self._rows_of_layers()]

    def rows_of_stack(self, name: str, by_row: Array) -> Array:
        """Return the entries of the layers of a stack, in the order of its rows.

        Args:
            name: name of the stack.
            by_row: array with an entry per row of all layers.

        Returns:
            An array with an entry per row of the stack; zeros in empty rows.
        """
        if not self.stack_names:
            return by_row
        layers = np.flatnonzero(np.array(self.names) == name)
        rows, order = self._rows_of_layers()[layers], self.of(name)
        if not order.is_padded:
            return by_row[np.sort(rows)]
        return order.stack(by_row[rows])

    def _rows_of_layers(self) -> np.ndarray:
        """Return the row of each layer."""
        rows = self.rows()
        return np.argsort(rows)[(rows < 0).sum() :]


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
            stage_x, stage_cache, outputs = arriving, take_rows(cache), None
            for turn in range(stack.stages):
                stage_x = jnp.where(stage == turn, arriving, stage_x)
                y, new_cache, outputs = run(take_rows(layers), stage_x, positions, stage_cache)
                if is_recurrent:
                    keep = functools.partial(jnp.where, stage == turn)
                    new_cache = jax.tree.map(keep, new_cache, stage_cache)
                stage_cache = new_cache
                arriving = jax.lax.ppermute(y, STAGES, ring)
            chunks.append((stage_cache, outputs))
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
