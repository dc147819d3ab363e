"""Grouped products in plain XLA, a block of rows at a time.

A loop runs over blocks of rows of one group. The number of blocks depends on data; shapes do not.
The last block of a group has one of a few static sizes (`row_block_sizes`), so that on average 1/16
of the multiplied rows is padding, whatever the number of groups.
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

_EIGHTHS = (*range(1, 13), 14, 16)  # block sizes in eighths of rows / groups; each is compiled
_ONE_SIZE_ROWS = 2048  # up to so many rows, a single block size is enough


def row_block_sizes(rows: int, groups: int) -> tuple[int, ...]:
    """Return the ascending sizes of blocks: multiples of 1/8 of an even share, up to two shares.

    For few rows there is one size: padding then costs less time than compiling more sizes.
    """
    if rows <= _ONE_SIZE_ROWS:
        return (min(rows, 64),)
    step = max(8, -(-rows // (8 * groups * 8)) * 8)
    return tuple(sorted({min(step * eighths, rows) for eighths in _EIGHTHS}))


# Rows sorted by group, cut into blocks of one group each. With block sizes 2, 4 and 8:
#
# row     0 1 2 3 4 | 5 6 | 7 8 9 10 11 12 13 14 | 15 16
# group   0 0 0 0 0 | 1 1 | 2 2 2  2  2  2  2  2 |  2  2
# size        8     |  2  |           8          |   2
#
# A block of 5 rows has size 8 and also reads rows 5, 6 and 7 of its neighbours: `own` replaces them
# by zeros, and `write` leaves them unchanged.
class Block(NamedTuple):
    """Rows of one group.

    Attributes:
        size: number of rows that are read. All attributes below are integers on the device, but for
            `is_first`.
        is_first: whether the block is known to be the first of its group.
        group: group of the rows.
        start: first row that is read. It is moved back if the block would exceed the array.
        first: first row of the block itself.
        end: row after the last row of the block itself.
    """

    size: int
    is_first: bool
    group: Array
    start: Array
    first: Array
    end: Array

    def read(self, rows: Rows) -> Float[Array, "size i"]:
        """Return `size` rows, including rows of neighbouring blocks."""
        return jax.lax.dynamic_slice_in_dim(
            rows, self.start, self.size, allow_negative_indices=False
        )

    def own(self, rows: Rows) -> Float[Array, "size i"]:
        """Return `size` rows, with zeros for rows of other blocks, so that they can be summed."""
        bits = _bits(self.read(rows))
        return _floats(jnp.where(self._is_own, bits, jnp.zeros_like(bits)), rows.dtype)

    def write(self, rows: Rows, new: Float[Array, "size i"]) -> Rows:
        """Return `rows` with the rows of this block replaced; both arguments are `_bits`."""
        return _update(rows, jnp.where(self._is_own, new, self.read(rows)), self.start)

    def weight(self, w_GOI: Weights) -> Float[Array, "o i"]:
        """Return the matrix of the block's group."""
        return jax.lax.dynamic_index_in_dim(
            w_GOI, self.group, keepdims=False, allow_negative_indices=False
        )

    def add(self, sums_GOI: Weights, more_OI: Float[Array, "o i"]) -> Weights:
        """Return the sums with `more_OI` added for the block's group; initial sums are zeros."""
        total_OI = more_OI if self.is_first else self.weight(sums_GOI) + more_OI
        return _update(sums_GOI, total_OI[None], self.group)

    @property
    def _is_own(self) -> Array:
        row = self.start + jnp.arange(self.size, dtype=jnp.int32)
        return ((row >= self.first) & (row < self.end))[:, None]


def _update(rows: Array, new: Array, start: Array) -> Array:
    # XLA:CPU runs an in-place update on one thread, with all that is fused into it. The barrier
    # leaves only the copy to that thread.
    new = jax.lax.optimization_barrier(new)
    indices = [start] + [jnp.zeros_like(start)] * (rows.ndim - 1)
    return jax.lax.dynamic_update_slice(rows, new, indices, allow_negative_indices=False)


def _bits(x: Array) -> Array:
    """Return 16-bit floats as integers, which XLA:CPU can select without casts to float32."""
    if x.dtype.itemsize != 2:
        return x
    # Without the barriers, XLA moves the bitcast out of the select again.
    return jax.lax.optimization_barrier(
        jax.lax.bitcast_convert_type(jax.lax.optimization_barrier(x), jnp.uint16)
    )


def _floats(bits: Array, dtype: jnp.dtype) -> Array:
    return bits if bits.dtype == dtype else jax.lax.bitcast_convert_type(bits, dtype)


def loop_over_blocks(
    sizes_G: Sizes, rows: int, body: Callable[[Block, Carry], Carry], carry: Carry
) -> Carry:
    """Run `carry = body(block, carry)` over all blocks of all groups.

    There is one loop for each block size. A single loop with a switch would copy its carry. Loops
    run in ascending order of sizes: smaller blocks hold the remainder of a group, so that nothing
    has been added for the group before.

    Args:
        sizes_G: number of rows of each group, which are consecutive.
        rows: number of rows of all arrays, M.
        body: function of a block and the carry; it is compiled for each block size.
        carry: initial carry.
    """
    block_sizes = row_block_sizes(rows, sizes_G.shape[0])
    table, firsts = _block_table(sizes_G, rows, block_sizes)

    def step(size: int, i: Array, carry: Carry) -> Carry:
        row = jax.lax.dynamic_index_in_dim(table, i, keepdims=False, allow_negative_indices=False)
        return body(Block(size, size < block_sizes[-1], *row), carry)

    for i, size in enumerate(block_sizes):
        run = functools.partial(step, size)
        carry = jax.lax.fori_loop(firsts[i], firsts[i + 1], run, carry)
    return carry


@functools.partial(jax.jit, static_argnums=(1, 2))
def _block_table(sizes_G: Sizes, rows: int, block_sizes: tuple[int, ...]) -> tuple[Array, Array]:
    """Plan the blocks of all groups.

    Returns:
        The blocks (group, start, first, end), sorted by block size, and the index of the first
        block of each size, with the number of blocks at the end.
    """
    groups, largest = sizes_G.shape[0], block_sizes[-1]
    blocks_G = -(-sizes_G // largest)
    last_G = jnp.cumsum(blocks_G)
    # Each group has at most one block that is not full, which bounds the number of blocks. Blocks
    # beyond `last_G[-1]` are unused.
    block = jnp.arange(rows // largest + groups, dtype=jnp.int32)
    group = jnp.minimum(jnp.sum(last_G <= block[:, None], axis=1, dtype=jnp.int32), groups - 1)
    ends = jnp.cumsum(sizes_G)[group]
    first = ends - sizes_G[group] + (block - (last_G - blocks_G)[group]) * largest
    end = jnp.minimum(first + largest, ends)
    # The smallest size that holds the rows; unused blocks come last.
    index = jnp.sum(jnp.asarray(block_sizes) < (end - first)[:, None], axis=1, dtype=jnp.int32)
    index = jnp.where(block < last_G[-1], index, len(block_sizes))
    size = jnp.asarray((*block_sizes, 0), jnp.int32)[index]
    # A block at the end of the array starts earlier instead of reading beyond it.
    columns = [group, jnp.minimum(first, rows - size), first, end]
    table = jnp.stack(columns, axis=1)[jnp.argsort(index)]
    counts = index < jnp.arange(len(block_sizes) + 1)[:, None]
    return table, jnp.sum(counts, axis=1, dtype=jnp.int32)


@jax.jit
def matmul(x_MI: Rows, w_GOI: Weights, sizes_G: Sizes) -> Float[Array, "m o"]:
    """Return the product of each row with its group's weights; zeros for rows beyond all groups."""
    return _multiply_rows("bi,oi->bo", x_MI, w_GOI, sizes_G, w_GOI.shape[1])


@jax.jit
def gradient_of_rows(dy_MO: Rows, w_GOI: Weights, sizes_G: Sizes) -> Float[Array, "m i"]:
    """Return the gradient of the rows: dy times its group's weights, transposed."""
    return _multiply_rows("bo,oi->bi", dy_MO, w_GOI, sizes_G, w_GOI.shape[2])


def _multiply_rows(equation: str, x_MI: Rows, w_GOI: Weights, sizes_G: Sizes, width: int) -> Rows:
    def body(block: Block, rows: Array) -> Array:
        weight = block.weight(w_GOI).astype(x_MI.dtype)
        return block.write(rows, _bits(product(equation, block.read(x_MI), weight, x_MI.dtype)))

    initial = zeros((x_MI.shape[0], width), _bits(x_MI).dtype, x_MI)
    return _floats(loop_over_blocks(sizes_G, x_MI.shape[0], body, initial), x_MI.dtype)


@jax.jit
def gradient_of_weights(x_MI: Rows, dy_MO: Array, sizes_G: Sizes) -> Float[Array, "g o i"]:
    """Return the gradient of the weights: the float32 sum of dy xᵀ over each group's rows."""

    def body(block: Block, dw_GOI: Array) -> Array:
        return block.add(dw_GOI, product("bo,bi->oi", block.own(dy_MO), block.own(x_MI)))

    shape = (sizes_G.shape[0], dy_MO.shape[1], x_MI.shape[1])
    return loop_over_blocks(sizes_G, x_MI.shape[0], body, zeros(shape, jnp.float32, x_MI))


def product(equation: str, a: Array, b: Array, dtype: jnp.dtype = jnp.float32) -> Array:
    """Return an einsum with sums in float32, which makes bfloat16 five times faster with AMX."""
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32).astype(dtype)


def zeros(shape: tuple[int, ...], dtype: jnp.dtype, like: Array) -> Array:
    """Return zeros that vary over the same mesh axes as `like`, as the carry of a loop must."""
    return collectives.varying(jnp.zeros(shape, dtype), collectives.varying_axes(like))
