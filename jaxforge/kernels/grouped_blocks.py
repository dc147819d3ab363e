"""Grouped products by blocks of rows, in plain XLA.

A loop runs over blocks of rows; its length depends on the data, but the shapes in it are static. A
block has rows of one group. The last block of a group has one of a few sizes (`row_block_sizes`),
so that on average a sixteenth of the multiplied rows is padding, for any number of groups.
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

_EIGHTHS = (*range(1, 13), 14, 16)  # block sizes in eighths of a group's fair share
_FEW = 2048  # rows up to which a single block size is compiled


def row_block_sizes(rows: int, groups: int) -> tuple[int, ...]:
    """Return the sizes of blocks: multiples of an eighth of a group's fair share, up to two shares.

    Few rows have a single size: compiling more sizes would take longer than multiplying padding.
    """
    if rows <= _FEW:
        return (min(rows, 64),)
    step = max(8, -(-rows // (8 * groups * 8)) * 8)
    return tuple(sorted({min(step * eighths, rows) for eighths in _EIGHTHS}))


# Blocks of rows that are sorted by group, for block sizes 2 and 4 (x: owned, o: only read):
#
# row       0 1 2 3 4   5 6   7 8 9
# group     0 0 0 0 0 | 1 1 | 2 2 2
# block 0   x x x x
# block 1           x   o              size 2: the remainder of group 0
# block 2               x x
# block 3                 o   x x x    size 4: starts at row 6, because the array ends at row 10
#
# `own` masks rows that are only read, `write` preserves them.
class Block(NamedTuple):
    """Rows of one group.

    Attributes:
        size: number of rows that are read, static; fields below are integers on the device.
        is_first: whether the block is known to be the first of its group to run, static.
        group: group of the block.
        start: first row that is read; reduced at the end of the array.
        first: first row that the block owns.
        end: end of the rows that the block owns.
    """

    size: int
    is_first: bool
    group: Array
    start: Array
    first: Array
    end: Array

    def read(self, rows: Rows) -> Float[Array, "size i"]:
        """Return the rows of the block, including rows that it does not own."""
        return jax.lax.dynamic_slice_in_dim(
            rows, self.start, self.size, allow_negative_indices=False
        )

    def masked(self, rows: Rows) -> Float[Array, "size i"]:
        """Return the rows of the block, with zeros for rows that it does not own."""
        bits = _bits(self.read(rows))
        return _floats(jnp.where(self._is_owned, bits, jnp.zeros_like(bits)), rows.dtype)

    def write(self, rows: Rows, new: Float[Array, "size i"]) -> Rows:
        """Replace the rows that the block owns; both arguments are results of `_bits`."""
        return _update(rows, jnp.where(self._is_owned, new, self.read(rows)), self.start)

    def weight(self, w_GOI: Weights) -> Float[Array, "o i"]:
        """Return the weights of the block's group."""
        return jax.lax.dynamic_index_in_dim(
            w_GOI, self.group, keepdims=False, allow_negative_indices=False
        )

    def add(self, sums_GOI: Weights, more_OI: Float[Array, "o i"]) -> Weights:
        """Add to the sum of the block's group; sums are initially zero."""
        total_OI = more_OI if self.is_first else self.weight(sums_GOI) + more_OI
        return _update(sums_GOI, total_OI[None], self.group)

    @property
    def _is_owned(self) -> Array:
        row = self.start + jnp.arange(self.size, dtype=jnp.int32)
        return ((row >= self.first) & (row < self.end))[:, None]


def _update(rows: Array, new: Array, start: Array) -> Array:
    # XLA:CPU runs what is fused into an in-place update in one thread. With the barrier, the update
    # only copies.
    new = jax.lax.optimization_barrier(new)
    at = [start] + [jnp.zeros_like(start)] * (rows.ndim - 1)
    return jax.lax.dynamic_update_slice(rows, new, at, allow_negative_indices=False)


def _bits(x: Array) -> Array:
    """View 16-bit floats as integers, because XLA:CPU selects 16-bit floats via float32."""
    if x.dtype.itemsize != 2:
        return x
    # Without barriers, XLA moves the cast out of the selection again.
    return jax.lax.optimization_barrier(
        jax.lax.bitcast_convert_type(jax.lax.optimization_barrier(x), jnp.uint16)
    )


def _floats(bits: Array, dtype: jnp.dtype) -> Array:
    return bits if bits.dtype == dtype else jax.lax.bitcast_convert_type(bits, dtype)


def loop_over_blocks(
    sizes_G: Sizes, rows: int, body: Callable[[Block, Carry], Carry], carry: Carry
) -> Carry:
    """Run `carry = body(block, carry)` over all blocks of all groups.

    There is one loop per block size instead of one loop with a switch, which would copy its carry.
    Loops run from the smallest size to the largest. A block of a smaller size has the remaining
    rows of a group, so it is the first block of its group to run.

    Args:
        sizes_G: number of rows of each group; groups are contiguous.
        rows: number of rows of all arrays, M.
        body: (block, carry) -> carry; compiled for each of `row_block_sizes`.
        carry: initial carry.
    """
    block_sizes = row_block_sizes(rows, sizes_G.shape[0])
    table, firsts = block_table(sizes_G, rows, block_sizes)

    def step(size: int, i: Array, carry: Carry) -> Carry:
        row = jax.lax.dynamic_index_in_dim(table, i, keepdims=False, allow_negative_indices=False)
        return body(Block(size, size < block_sizes[-1], *row), carry)

    for size_index, size in enumerate(block_sizes):
        run = functools.partial(step, size)
        carry = jax.lax.fori_loop(firsts[size_index], firsts[size_index + 1], run, carry)
    return carry


@functools.partial(jax.jit, static_argnums=(1, 2))
def block_table(sizes_G: Sizes, rows: int, block_sizes: tuple[int, ...]) -> tuple[Array, Array]:
    """Return the fields of all blocks, sorted by size, and the first block of each size."""
    groups, largest = sizes_G.shape[0], block_sizes[-1]
    blocks_G = -(-sizes_G // largest)
    last_G = jnp.cumsum(blocks_G)
    # Each group adds at most one partial block: an upper bound of the number of blocks. Entries
    # beyond the actual number sort to the end of the table, and no loop reaches them.
    block = jnp.arange(rows // largest + groups, dtype=jnp.int32)
    group = jnp.minimum(jnp.sum(last_G <= block[:, None], axis=1, dtype=jnp.int32), groups - 1)
    ends = jnp.cumsum(sizes_G)[group]
    first = ends - sizes_G[group] + (block - (last_G - blocks_G)[group]) * largest
    end = jnp.minimum(first + largest, ends)
    size_index = jnp.sum(jnp.asarray(block_sizes) < (end - first)[:, None], axis=1, dtype=jnp.int32)
    size_index = jnp.where(block < last_G[-1], size_index, len(block_sizes))
    size = jnp.asarray((*block_sizes, 0), jnp.int32)[size_index]
    # A block at the end of the array starts earlier instead of reading beyond the end.
    columns = [group, jnp.minimum(first, rows - size), first, end]
    table = jnp.stack(columns, axis=1)[jnp.argsort(size_index)]
    return table, jnp.sum(
        size_index < jnp.arange(len(block_sizes) + 1)[:, None], axis=1, dtype=jnp.int32
    )


@jax.jit
def matmul(x_MI: Rows, w_GOI: Weights, sizes_G: Sizes) -> Float[Array, "m o"]:
    """Multiply each row by the weights of its group; rows beyond all groups are zeros."""
    return _multiply_rows("bi,oi->bo", x_MI, w_GOI, sizes_G, w_GOI.shape[1])


@jax.jit
def gradient_of_rows(dy_MO: Rows, w_GOI: Weights, sizes_G: Sizes) -> Float[Array, "m i"]:
    """Multiply each row of the result's gradient by the transposed weights of its group."""
    return _multiply_rows("bo,oi->bi", dy_MO, w_GOI, sizes_G, w_GOI.shape[2])


def _multiply_rows(equation: str, x_MI: Rows, w_GOI: Weights, sizes_G: Sizes, width: int) -> Rows:
    def body(block: Block, rows: Array) -> Array:
        weight = block.weight(w_GOI).astype(x_MI.dtype)
        return block.write(rows, _bits(product(equation, block.read(x_MI), weight, x_MI.dtype)))

    nothing = zeros((x_MI.shape[0], width), _bits(x_MI).dtype, x_MI)
    return _floats(loop_over_blocks(sizes_G, x_MI.shape[0], body, nothing), x_MI.dtype)


@jax.jit
def gradient_of_weights(x_MI: Rows, dy_MO: Array, sizes_G: Sizes) -> Float[Array, "g o i"]:
    """Sum dy xᵀ over the rows of each group, in float32."""

    def body(block: Block, dw_GOI: Array) -> Array:
        return block.add(dw_GOI, product("bo,bi->oi", block.masked(dy_MO), block.masked(x_MI)))

    shape = (sizes_G.shape[0], dy_MO.shape[1], x_MI.shape[1])
    return loop_over_blocks(sizes_G, x_MI.shape[0], body, zeros(shape, jnp.float32, x_MI))


def product(equation: str, a: Array, b: Array, dtype: jnp.dtype = jnp.float32) -> Array:
    """Compute an `einsum` with float32 sums, which for bfloat16 is five times faster with AMX."""
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32).astype(dtype)


def zeros(shape: tuple[int, ...], dtype: jnp.dtype, like: Array) -> Array:
    """Return zeros that vary over the mesh axes of `like`, as the carry of a loop must."""
    return collectives.varying(jnp.zeros(shape, dtype), collectives.varying_axes(like))
