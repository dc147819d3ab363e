"""Grouped products on Hopper in Pallas Mosaic GPU, with tiles that are loaded by TMA.

Products of rows use the kernel of JAX. JAX's kernel for gradients of weights masks rows inside of
the kernel, needs a GPU even for ahead-of-time compilation, and rounds to bfloat16. The kernel here
takes rows in a layout in which no two groups share a tile, and returns float32 sums.
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

Ref = Any  # reference to global or shared memory, or to an accumulator

MULTIPLE = 64
"""Divisor of all widths: the number of columns of the tiles that kernels read."""

# Shapes: M rows, P rows in the layout with padding (P >= M), G groups, O outputs, I inputs. A tile
# of dW is [128, 128] in registers of a warpgroup; rows arrive in steps of `MULTIPLE` through TMA.
_PROCESSORS = 132  # multiprocessors of an H100; on smaller GPUs some run after others
_ROWS = 128  # rows of a tile
_STEPS = 4  # tiles of a product that are in flight


def _multiply_rows(x_MI: Rows, w_GOI: Weights, sizes_G: Sizes, *, transpose: bool) -> Rows:
    width = w_GOI.shape[1 if transpose else 2]
    return ragged_dot(
        x_MI, w_GOI.astype(x_MI.dtype), group_sizes=sizes_G, block_m=_ROWS, block_n=_tile(width),
        block_k=MULTIPLE, max_concurrent_steps=_STEPS, grid_block_n=1, transpose_rhs=transpose,
    )  # fmt: skip


matmul = functools.partial(_multiply_rows, transpose=True)
"""(x_MI, w_GOI, sizes_G) -> each row times the weights of its group; rows beyond all groups are
undefined."""

gradient_of_rows = functools.partial(_multiply_rows, transpose=False)
"""(dy_MO, w_GOI, sizes_G) -> each row of the result's gradient times the transposed weights of its
group."""


def gradient_of_weights(x_MI: Rows, dy_MO: Rows, sizes_G: Sizes) -> Float[Array, "g o i"]:
    """Sum dy xᵀ over the rows of each group, in float32."""
    out, inp, groups = dy_MO.shape[1], x_MI.shape[1], sizes_G.shape[0]
    first_G, blocks_G, row_P, is_row_P = block_layout(sizes_G, x_MI.shape[0])
    x_PI, dy_PO = (jnp.where(is_row_P[:, None], rows[row_P], 0) for rows in (x_MI, dy_MO))
    kernel = plgpu.kernel(
        functools.partial(_sum_kernel, groups, (_tile(out), _tile(inp))),
        out_type=jax.ShapeDtypeStruct((groups, out, inp), jnp.float32),
        grid=(_PROCESSORS,),
        grid_names=("processor",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    return kernel(first_G, blocks_G, dy_PO.T, x_PI)


def block_layout(sizes_G: Sizes, rows: int) -> tuple[Array, Array, Array, Array]:
    """Return a layout of rows in which each block of `MULTIPLE` rows belongs to one group.

    Returns:
        First block and number of blocks of each group, and for each position of the layout its row
        and whether it has one.
    """
    groups = sizes_G.shape[0]
    blocks_G = -(-sizes_G // MULTIPLE)
    first_G = jnp.cumsum(blocks_G) - blocks_G
    # group sizes 3, 2 with MULTIPLE = 4:  rows  a a a b b  ->  a a a . | b b . .   (. = zeros)
    position_P = jnp.arange((-(-rows // MULTIPLE) + groups) * MULTIPLE, dtype=jnp.int32)
    group_P = jnp.searchsorted(first_G, position_P // MULTIPLE, side="right") - 1
    within_P = position_P - first_G[group_P] * MULTIPLE
    row_P = (jnp.cumsum(sizes_G) - sizes_G)[group_P] + within_P
    return first_G, blocks_G, jnp.minimum(row_P, rows - 1), within_P < sizes_G[group_P]


def _sum_kernel(
    groups: int,
    tile: tuple[int, int],
    first_G: Ref,
    blocks_G: Ref,
    dy_OP: Ref,
    x_PI: Ref,
    dw_GOI: Ref,
) -> None:
    """Kernel that sums each tile of each group over the group's blocks of rows."""
    tiles_per_row = dw_GOI.shape[2] // tile[1]

    # A persistent grid: each processor takes (group, tile) pairs in a strided loop.
    @plgpu.nd_loop(
        (groups, dw_GOI.shape[1] // tile[0] * tiles_per_row), collective_axes="processor"
    )
    def _sum_tile(loop: plgpu.NDLoopInfo) -> None:
        group, at = loop.index
        o, i = jax.lax.div(at, jnp.int32(tiles_per_row)), jax.lax.rem(at, jnp.int32(tiles_per_row))
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
