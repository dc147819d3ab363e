"""Products of rows with their group's weights, a block of rows at a time, in plain XLA.

A loop runs over blocks, as many as the groups have: its length is data, the shapes in it are not. A
block has rows of one group. The last one of a group is cut to one of a few sizes (`rungs`), so that
what is multiplied in vain is a sixteenth of the rows on average, whatever the number of groups.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxforge.parallel import collectives

Rows = Float[Array, "m i"]
Weights = Float[Array, "g o i"]
Sizes = Int[Array, "g"]
Carry = TypeVar("Carry")

_EIGHTHS = (*range(1, 13), 14, 16)  # of a group's fair share; each is compiled
_FEW = 2048  # rows


def row_block_sizes(rows: int, groups: int) -> tuple[int, ...]:
    """Sizes of blocks: multiples of an eighth of a group's fair share, up to two of those.

    Of few rows, one: what is multiplied in vain takes less time than to compile the others.
    """
    if rows <= _FEW:
        return (min(rows, 64),)
    step = max(8, -(-rows // (8 * groups * 8)) * 8)
    return tuple(sorted({min(step * eighths, rows) for eighths in _EIGHTHS}))


# Rows sorted by group, cut into blocks of one group each (sizes: a ladder of a few rungs):
#
# group     0 0 0 0 0 | 1 1 | 2 2 2 2 2 2 2
# blocks    [   8    ][ 2  ][    8     ][ 2 ]     a block may read rows of its neighbours:
# own       x x x x x   x x   x x x ...           `own` masks them, `write` preserves them
class Block(NamedTuple):
    """Rows of one group.

    Attributes:
        size: rows that are read; what follows is an integer on the device.
        is_first: whether its group has no other that comes before.
        group: whose rows they are.
        start: the first row that is read; arrays end where the last one does.
        first: the first row that is the block's own.
        end: the row after its last own one.
    """

    size: int
    is_first: bool
    group: Array
    start: Array
    first: Array
    end: Array

    def read(self, rows: Rows) -> Float[Array, "size i"]:
        """Its rows, with others' where it is not filled."""
        return jax.lax.dynamic_slice_in_dim(
            rows, self.start, self.size, allow_negative_indices=False
        )

    def own(self, rows: Rows) -> Float[Array, "size i"]:
        """Its rows, with zeros where it is not filled: sums over rows are right."""
        bits = _bits(self.read(rows))
        return _floats(jnp.where(self._is_own, bits, jnp.zeros_like(bits)), rows.dtype)

    def write(self, rows: Rows, new: Float[Array, "size i"]) -> Rows:
        """Rows with its own ones replaced; both as `_bits`."""
        return _update(rows, jnp.where(self._is_own, new, self.read(rows)), self.start)

    def weight(self, w_GOI: Weights) -> Float[Array, "o i"]:
        """Its group's."""
        return jax.lax.dynamic_index_in_dim(
            w_GOI, self.group, keepdims=False, allow_negative_indices=False
        )

    def add(self, sums_GOI: Weights, more_OI: Float[Array, "o i"]) -> Weights:
        """Adds to its group's sum, which begins at zero."""
        total_OI = more_OI if self.is_first else self.weight(sums_GOI) + more_OI
        return _update(sums_GOI, total_OI[None], self.group)

    @property
    def _is_own(self) -> Array:
        row = self.start + jnp.arange(self.size, dtype=jnp.int32)
        return ((row >= self.first) & (row < self.end))[:, None]


def _update(rows: Array, new: Array, start: Array) -> Array:
    # What is computed in an update in place is computed by one thread: that one only copies.
    new = jax.lax.optimization_barrier(new)
    at = [start] + [jnp.zeros_like(start)] * (rows.ndim - 1)
    return jax.lax.dynamic_update_slice(rows, new, at, allow_negative_indices=False)


def _bits(x: Array) -> Array:
    """16 bits as integers: XLA:CPU takes floats of that size to float32 and back to choose one."""
    if x.dtype.itemsize != 2:
        return x
    # Barriers, or XLA takes the cast out of the choice again.
    return jax.lax.optimization_barrier(
        jax.lax.bitcast_convert_type(jax.lax.optimization_barrier(x), jnp.uint16)
    )


def _floats(bits: Array, dtype: jnp.dtype) -> Array:
    return bits if bits.dtype == dtype else jax.lax.bitcast_convert_type(bits, dtype)


def loop_over_blocks(
    sizes_G: Sizes, rows: int, body: Callable[[Block, Carry], Carry], carry: Carry
) -> Carry:
    """Runs `carry = body(block, carry)` over all blocks of all groups.

    A loop for each of `rungs`, and not one with a switch in it: that would copy what it carries.
    The largest come last: others have what is left of a group, and nothing of it came before.

    Args:
        sizes_G: rows of each group; they follow each other.
        rows: of all arrays, M.
        body: what is done with a block; it is compiled for each of `rungs`.
        carry: the first.
    """
    ladder = row_block_sizes(rows, sizes_G.shape[0])
    table, firsts = _plan(sizes_G, rows, ladder)

    def step(size: int, i: Array, carry: Carry) -> Carry:
        row = jax.lax.dynamic_index_in_dim(table, i, keepdims=False, allow_negative_indices=False)
        return body(Block(size, size < ladder[-1], *row), carry)

    for rung, size in enumerate(ladder):
        run = functools.partial(step, size)
        carry = jax.lax.fori_loop(firsts[rung], firsts[rung + 1], run, carry)
    return carry


@functools.partial(jax.jit, static_argnums=(1, 2))
def _plan(sizes_G: Sizes, rows: int, ladder: tuple[int, ...]) -> tuple[Array, Array]:
    """All blocks, sorted by their rungs: what `Block` says of each, and where each rung begins."""
    groups, largest = sizes_G.shape[0], ladder[-1]
    blocks_G = -(-sizes_G // largest)
    last_G = jnp.cumsum(blocks_G)
    block = jnp.arange(rows // largest + groups, dtype=jnp.int32)  # as many as there can be
    group = jnp.minimum(jnp.sum(last_G <= block[:, None], axis=1, dtype=jnp.int32), groups - 1)
    ends = jnp.cumsum(sizes_G)[group]
    first = ends - sizes_G[group] + (block - (last_G - blocks_G)[group]) * largest
    end = jnp.minimum(first + largest, ends)
    rung = jnp.sum(jnp.asarray(ladder) < (end - first)[:, None], axis=1, dtype=jnp.int32)
    rung = jnp.where(block < last_G[-1], rung, len(ladder))
    size = jnp.asarray((*ladder, 0), jnp.int32)[rung]
    # A block at the end of the array starts earlier instead of reading beyond it.
    columns = [group, jnp.minimum(first, rows - size), first, end]
    table = jnp.stack(columns, axis=1)[jnp.argsort(rung)]
    return table, jnp.sum(rung < jnp.arange(len(ladder) + 1)[:, None], axis=1, dtype=jnp.int32)


@jax.jit
def matmul(x_MI: Rows, w_GOI: Weights, sizes_G: Sizes) -> Float[Array, "m o"]:
    """Each row times its group's weights; of rows beyond all groups, zeros."""
    return _of_rows("bi,oi->bo", x_MI, w_GOI, sizes_G, w_GOI.shape[1])


@jax.jit
def gradient_of_rows(dy_MO: Rows, w_GOI: Weights, sizes_G: Sizes) -> Float[Array, "m i"]:
    """Each row of the result's gradient times its group's weights, transposed."""
    return _of_rows("bo,oi->bi", dy_MO, w_GOI, sizes_G, w_GOI.shape[2])


def _of_rows(equation: str, x_MI: Rows, w_GOI: Weights, sizes_G: Sizes, width: int) -> Rows:
    def body(block: Block, rows: Array) -> Array:
        weight = block.weight(w_GOI).astype(x_MI.dtype)
        return block.write(rows, _bits(product(equation, block.read(x_MI), weight, x_MI.dtype)))

    nothing = zeros((x_MI.shape[0], width), _bits(x_MI).dtype, x_MI)
    return _floats(loop_over_blocks(sizes_G, x_MI.shape[0], body, nothing), x_MI.dtype)


@jax.jit
def gradient_of_weights(x_MI: Rows, dy_MO: Array, sizes_G: Sizes) -> Float[Array, "g o i"]:
    """The sum over each group's rows of dy xᵀ, float32."""

    def body(block: Block, dw_GOI: Array) -> Array:
        return block.add(dw_GOI, product("bo,bi->oi", block.own(dy_MO), block.own(x_MI)))

    shape = (sizes_G.shape[0], dy_MO.shape[1], x_MI.shape[1])
    return loop_over_blocks(sizes_G, x_MI.shape[0], body, zeros(shape, jnp.float32, x_MI))


def product(equation: str, a: Array, b: Array, dtype: jnp.dtype = jnp.float32) -> Array:
    """`einsum` with sums in float32: on CPUs that have AMX, bfloat16 is five times as fast so."""
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32).astype(dtype)


def zeros(shape: tuple[int, ...], dtype: jnp.dtype, like: Array) -> Array:
    """Zeros that vary over the mesh axes that `like` varies over: what a loop may add it to."""
    return collectives.varying(jnp.zeros(shape, dtype), collectives.varying_axes(like))
