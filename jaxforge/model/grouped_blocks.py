"""Products of rows with their group's weights, a block of rows at a time, in plain XLA.

A loop runs over blocks, as many as the groups have: its length is data, the shapes in it are not. A
block has rows of one group. The last one of a group is cut to one of a few sizes (`rungs`), so that
what is multiplied in vain is a sixteenth of the rows on average, whatever the number of groups.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Rows = Float[Array, "m i"]
Weights = Float[Array, "g o i"]
Sizes = Int[Array, "g"]

_RUNGS = 16  # each is compiled
_FEW = 2048  # rows


def rungs(rows: int, groups: int) -> tuple[int, ...]:
    """Sizes of blocks: multiples of an eighth of a group's fair share, up to two of those.

    Of few rows, one: what is multiplied in vain takes less time than to compile the others.
    """
    if rows <= _FEW:
        return (min(rows, 64),)
    step = max(8, -(-rows // (8 * groups * 8)) * 8)
    return tuple(sorted({min(step * i, rows) for i in range(1, _RUNGS + 1)}))


class Block(NamedTuple):
    """Rows of one group, as many as `size` at most.

    Attributes:
        group: whose they are.
        start: the first row that is read; arrays end where the last one does.
        mine: of the rows read, which are the group's and not another block's.
        size: rows that are read.
    """

    group: Int[Array, ""]
    start: Int[Array, ""]
    mine: Array
    size: int

    def of(self, rows: Float[Array, "m i"]) -> Float[Array, "size i"]:
        """The rows that are read."""
        return jax.lax.dynamic_slice_in_dim(rows, self.start, self.size)

    def own(self, rows: Float[Array, "m i"]) -> Float[Array, "size i"]:
        """The same with zeros where a row is not of this block."""
        return jnp.where(self.mine[:, None], self.of(rows), 0)

    def write(self, rows: Float[Array, "m i"], new: Float[Array, "size i"]) -> Rows:
        """`rows` with this block's own replaced."""
        kept = jnp.where(self.mine[:, None], new.astype(rows.dtype), self.of(rows))
        return jax.lax.dynamic_update_slice_in_dim(rows, kept, self.start, 0)


def over_blocks(
    sizes_G: Sizes, rows: int, body: Callable[[Block, Array], Array], carry: Array
) -> Array:
    """Runs `carry = body(block, carry)` over all blocks of all groups.

    A loop for each of `rungs`, and not one with a switch in it: that would copy what it carries.

    Args:
        sizes_G: rows of each group; they follow each other.
        rows: of all arrays, M.
        body: what is done with a block; it is compiled for each of `rungs`.
        carry: the first.
    """
    ladder = rungs(rows, sizes_G.shape[0])
    plan = _plan(sizes_G, rows, ladder)

    def step(size: int, i: Array, carry: Array) -> Array:
        first, end = plan.first[i], plan.end[i]
        start = jnp.minimum(first, rows - size)
        row = start + jnp.arange(size)
        return body(Block(plan.group[i], start, (row >= first) & (row < end), size), carry)

    for rung, size in enumerate(ladder):
        run = functools.partial(step, size)
        carry = jax.lax.fori_loop(plan.rung[rung], plan.rung[rung + 1], run, carry)
    return carry


class _Plan(NamedTuple):
    """All blocks, sorted by their rungs.

    Attributes:
        group: of each block.
        first: its first row.
        end: the row after its last.
        rung: which block is the first of each rung, and at last how many there are.
    """

    group: Array
    first: Array
    end: Array
    rung: Array


def _plan(sizes_G: Sizes, rows: int, ladder: tuple[int, ...]) -> _Plan:
    groups, largest = sizes_G.shape[0], ladder[-1]
    blocks_G = -(-sizes_G // largest)
    last_G = jnp.cumsum(blocks_G)
    block = jnp.arange(rows // largest + groups)  # as many as there can be
    group = jnp.minimum(jnp.sum(last_G <= block[:, None], axis=1), groups - 1)
    ends = jnp.cumsum(sizes_G)[group]
    first = ends - sizes_G[group] + (block - (last_G - blocks_G)[group]) * largest
    end = jnp.minimum(first + largest, ends)
    rung = jnp.sum(jnp.asarray(ladder) < (end - first)[:, None], axis=1)
    rung = jnp.where(block < last_G[-1], rung, len(ladder))
    order = jnp.argsort(rung)
    starts = jnp.sum(rung < jnp.arange(len(ladder) + 1)[:, None], axis=1)
    return _Plan(group[order], first[order], end[order], starts)


def matmul(x_MI: Rows, w_GOI: Weights, sizes_G: Sizes) -> Float[Array, "m o"]:
    """Each row times its group's weights; rows beyond all groups give zeros."""

    def body(block: Block, y_MO: Array) -> Array:
        w_OI = w_GOI[block.group].astype(x_MI.dtype)
        return block.write(y_MO, _product("bi,oi->bo", block.of(x_MI), w_OI))

    y_MO = zeros((x_MI.shape[0], w_GOI.shape[1]), x_MI.dtype, x_MI)
    return over_blocks(sizes_G, x_MI.shape[0], body, y_MO)


def gradient_of_rows(dy_MO: Array, w_GOI: Weights, sizes_G: Sizes) -> Float[Array, "m i"]:
    """Each row of the result's gradient times its group's weights, transposed."""

    def body(block: Block, dx_MI: Array) -> Array:
        w_OI = w_GOI[block.group].astype(dy_MO.dtype)
        return block.write(dx_MI, _product("bo,oi->bi", block.of(dy_MO), w_OI))

    dx_MI = zeros((dy_MO.shape[0], w_GOI.shape[2]), dy_MO.dtype, dy_MO)
    return over_blocks(sizes_G, dy_MO.shape[0], body, dx_MI)


def gradient_of_weights(x_MI: Rows, dy_MO: Array, sizes_G: Sizes) -> Float[Array, "g o i"]:
    """The sum over each group's rows of dy xᵀ, float32."""

    def body(block: Block, dw_GOI: Array) -> Array:
        new_OI = _product("bo,bi->oi", block.own(dy_MO), block.own(x_MI))
        return dw_GOI.at[block.group].add(new_OI)

    shape = (sizes_G.shape[0], dy_MO.shape[1], x_MI.shape[1])
    return over_blocks(sizes_G, x_MI.shape[0], body, zeros(shape, jnp.float32, x_MI))


def zeros(shape: tuple[int, ...], dtype: jnp.dtype, like: Array) -> Array:
    """Zeros that vary over the mesh axes that `like` varies over: what a loop may add it to."""
    return varying(jnp.zeros(shape, dtype), axes_of(like))


def varying(array: Array, axes: frozenset[str]) -> Array:
    """The same array, as one that varies over at least these manual mesh axes."""
    return jax.lax.pcast(array, tuple(sorted(axes - axes_of(array))), to="varying")


def axes_of(array: Array) -> frozenset[str]:
    """The manual mesh axes that an array varies over, where `shard_map` keeps track of them."""
    return jax.typeof(array).manual_axis_type.varying


def _product(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
