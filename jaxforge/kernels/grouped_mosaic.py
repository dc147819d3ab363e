"""Grouped products on Hopper, in Pallas for GPUs (Mosaic): tiles that tensor cores take from TMA.

Products of rows are the kernel that comes with JAX. Its counterpart for gradients of weights masks
rows inside, asks for a GPU where it is only compiled for one, and rounds to bfloat16. Here the rows
are laid out first so that no two groups share a tile, and sums leave in float32.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot
from jaxtyping import Array, Float

from jaxforge.kernels.grouped_blocks import Rows, Sizes, Weights

Ref = Any  # to memory of one kind or another, for which Pallas has a class each

MULTIPLE = 64
"""What widths must be a multiple of: the kernels read tiles of so many columns."""

# Shapes: M rows, P rows laid out apart (P >= M), G groups, O outputs, I inputs. A tile of dW is
# [128, 128] in registers of a warpgroup; rows arrive in steps of `MULTIPLE` through TMA.
_PROCESSORS = 132  # of an H100; one that has fewer runs some after others
_ROWS = 128  # of a tile
_STEPS = 4  # tiles of a product that are on their way


def _of_rows(x_MI: Rows, w_GOI: Weights, sizes_G: Sizes, *, transpose: bool) -> Rows:
    width = w_GOI.shape[1 if transpose else 2]
    return ragged_dot(
        x_MI, w_GOI.astype(x_MI.dtype), group_sizes=sizes_G, block_m=_ROWS, block_n=_tile(width),
        block_k=MULTIPLE, max_concurrent_steps=_STEPS, grid_block_n=1, transpose_rhs=transpose,
    )  # fmt: skip


matmul = functools.partial(_of_rows, transpose=True)
"""(x_MI, w_GOI, sizes_G) -> each row times its group's weights;
of rows beyond all groups, anything."""

gradient_of_rows = functools.partial(_of_rows, transpose=False)
"""(dy_MO, w_GOI, sizes_G) -> each row of the result's gradient times its group's
weights, transposed."""


def gradient_of_weights(x_MI: Rows, dy_MO: Rows, sizes_G: Sizes) -> Float[Array, "g o i"]:
    """The sum over each group's rows of dy xᵀ, float32."""
    out, inp, groups = dy_MO.shape[1], x_MI.shape[1], sizes_G.shape[0]
    first_G, blocks_G, row_P, is_row_P = _apart(sizes_G, x_MI.shape[0])
    x_PI, dy_PO = (jnp.where(is_row_P[:, None], rows[row_P], 0) for rows in (x_MI, dy_MO))
    kernel = plgpu.kernel(
        functools.partial(_add_up, groups, (_tile(out), _tile(inp))),
        out_type=jax.ShapeDtypeStruct((groups, out, inp), jnp.float32),
        grid=(_PROCESSORS,),
        grid_names=("processor",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    return kernel(first_G, blocks_G, dy_PO.T, x_PI)


def _apart(sizes_G: Sizes, rows: int) -> tuple[Array, Array, Array, Array]:
    """Rows laid out so that each block of `MULTIPLE` is of one group.

    Returns:
        The first block of each group, how many it has, and of each place in the new layout the row
        that goes there and whether one does.
    """
    groups = sizes_G.shape[0]
    blocks_G = -(-sizes_G // MULTIPLE)
    first_G = jnp.cumsum(blocks_G) - blocks_G
    # group sizes 3, 2 with MULTIPLE = 4:  rows  a a a b b  ->  a a a . | b b . .   (. = zeros)
    place_P = jnp.arange((-(-rows // MULTIPLE) + groups) * MULTIPLE, dtype=jnp.int32)
    group_P = jnp.searchsorted(first_G, place_P // MULTIPLE, side="right") - 1
    within_P = place_P - first_G[group_P] * MULTIPLE
    row_P = (jnp.cumsum(sizes_G) - sizes_G)[group_P] + within_P
    return first_G, blocks_G, jnp.minimum(row_P, rows - 1), within_P < sizes_G[group_P]


def _add_up(
    groups: int,
    tile: tuple[int, int],
    first_G: Ref,
    blocks_G: Ref,
    dy_OP: Ref,
    x_PI: Ref,
    dw_GOI: Ref,
) -> None:
    """The kernel: of each group each tile, a sum over the group's blocks of rows."""
    across = dw_GOI.shape[2] // tile[1]

    # A persistent grid: each processor takes (group, tile) pairs in a strided loop.
    @plgpu.nd_loop((groups, dw_GOI.shape[1] // tile[0] * across), collective_axes="processor")
    def _of_tile(loop: plgpu.NDLoopInfo) -> None:
        group, at = loop.index
        o, i = jax.lax.div(at, jnp.int32(across)), jax.lax.rem(at, jnp.int32(across))
        first, blocks = first_G[group], blocks_G[group]

        def sums(sum_ref: Ref) -> Array:
            # A group without rows leaves the accumulator at its initial zeros.
            @pl.when(blocks > 0)
            def _() -> None:
                plgpu.emit_pipeline(
                    lambda _, dy, x: plgpu.wgmma(sum_ref, dy, x),
                    grid=(blocks,),
                    in_specs=[
                        plgpu.BlockSpec(
                            (tile[0], MULTIPLE), lambda k: (o, first + k), delay_release=1
                        ),
                        plgpu.BlockSpec(
                            (MULTIPLE, tile[1]), lambda k: (first + k, i), delay_release=1
                        ),
                    ],
                    max_concurrent_steps=_STEPS,
                )(dy_OP, x_PI)

            return sum_ref[...]

        total = pl.run_scoped(sums, plgpu.ACC(tile))

        @functools.partial(pl.run_scoped, shared=plgpu.SMEM(tile, dtype=jnp.float32))
        def _store(shared: Ref) -> None:
            shared[...] = total
            # The commit orders the writes to shared memory before the asynchronous copy; the wait
            # lets the next tile reuse that memory.
            plgpu.commit_smem()
            slices = pl.ds(o * tile[0], tile[0]), pl.ds(i * tile[1], tile[1])
            plgpu.copy_smem_to_gmem(shared, dw_GOI.at[group, *slices])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _tile(width: int) -> int:
    return 128 if width % 128 == 0 else MULTIPLE
