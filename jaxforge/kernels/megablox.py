"""Grouped products by megablox, the Pallas kernels of JAX for TPU.

A kernel computes tiles of rows. A tile that groups share is computed for each of them. So tiles are
small for small groups: a sixteenth of a group's fair share of rows, within limits of the MXU. Rows
that belong to no group are not written.

A tile of weights that spans the inner dimension is fetched once for all rows of its group.
Otherwise it is fetched for each tile of rows, which takes longer than the product of a small tile.
"""

import functools

import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jaxtyping import Array, Float

from jaxforge.kernels.grouped_blocks import Rows, Sizes, Weights

_LANES = 128
_ROWS = (128, 512)  # minimum and maximum rows of a tile
_FEW = 256  # rows of a tile up to which weights shall be fetched once
_BYTES = 2 << 20  # maximum size of a tile of weights
INTERPRET = False  # tests set it, to run the kernels without a TPU


def _multiply_rows(x_MI: Rows, w_GOI: Weights, sizes_G: Sizes, *, transpose: bool) -> Rows:
    rows, width = x_MI.shape[0], w_GOI.shape[1 if transpose else 2]
    tile_rows, inner = choose_row_tile(rows, sizes_G.shape[0]), x_MI.shape[1]
    elements, limit = _BYTES // x_MI.dtype.itemsize, 1024 if x_MI.dtype.itemsize == 2 else 512
    if tile_rows <= _FEW and inner % _LANES == 0 and inner * _LANES <= elements:
        tiling = tile_rows, inner, tile(width, elements // inner // _LANES * _LANES)
    else:
        tiling = tile_rows, tile(inner, limit), tile(width, limit)
    return gmm(
        _padded(x_MI, tiling[0]), w_GOI.astype(x_MI.dtype), sizes_G, x_MI.dtype, tiling,
        transpose_rhs=transpose, interpret=INTERPRET,
    )[:rows]  # fmt: skip


matmul = functools.partial(_multiply_rows, transpose=True)
"""(x_MI, w_GOI, sizes_G) -> each row times the weights of its group; rows beyond all groups are
undefined."""

gradient_of_rows = functools.partial(_multiply_rows, transpose=False)
"""(dy_MO, w_GOI, sizes_G) -> each row of the result's gradient times the transposed weights of its
group."""


def gradient_of_weights(x_MI: Rows, dy_MO: Rows, sizes_G: Sizes) -> Float[Array, "g o i"]:
    """Sum dy xᵀ over the rows of each group, in float32."""
    rows = choose_row_tile(x_MI.shape[0], sizes_G.shape[0])
    # A tile of float32 sums, its two output buffers, and the tiles of rows fit into 16 MiB.
    tiling = rows, tile(dy_MO.shape[1], 512), tile(x_MI.shape[1], 1024)
    return tgmm(
        _padded(dy_MO, rows).T, _padded(x_MI, rows), sizes_G, jnp.float32, tiling,
        interpret=INTERPRET,
    )  # fmt: skip


def tile(size: int, limit: int) -> int:
    """Return the largest multiple of 128 up to `limit` that pads `size` by at most a tenth."""
    tiles = range(limit, 0, -_LANES)
    return next((t for t in tiles if -(-size // t) * t <= 1.1 * size), min(size, _LANES))


def choose_row_tile(rows: int, groups: int) -> int:
    """Return the rows of a tile: a sixteenth of a group's fair share, within `_ROWS`."""
    least, most = _ROWS
    rows_per_tile = min(most, max(least, rows // (16 * groups)))
    return 1 << (rows_per_tile.bit_length() - 1)


def _padded(rows: Rows, multiple: int) -> Rows:
    return jnp.pad(rows, ((0, -rows.shape[0] % multiple), (0, 0)))
