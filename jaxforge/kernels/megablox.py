"""Grouped products by megablox, the Pallas kernels for TPU that come with JAX.

A kernel computes tiles of rows. A tile that several groups share is computed once for each of them,
so that tiles are smaller for smaller groups: 1/16 of an even share of the rows, within the limits
of the MXU. Rows of a tile that belong to no group are not written.

A tile of weights with the whole inner dimension is fetched once for all rows of its group. Other
tiles are fetched for each tile of rows, which takes longer than the product of a small tile.
"""

import functools

import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jaxtyping import Array, Float

from jaxforge.kernels.grouped_blocks import Rows, Sizes, Weights

_LANES = 128
_ROWS = (128, 512)  # minimal and maximal number of rows of a tile
_WHOLE_INNER_ROWS = 256  # up to so many rows of a tile, weights keep the whole inner dimension
_WEIGHT_BYTES = 2 << 20  # of a tile of weights
_INTERPRET = False  # tests set it, to run the kernels without a TPU


def _multiply_rows(x_MI: Rows, w_GOI: Weights, sizes_G: Sizes, *, transpose: bool) -> Rows:
    rows, width = x_MI.shape[0], w_GOI.shape[1 if transpose else 2]
    tile_rows, inner = choose_row_tile(rows, sizes_G.shape[0]), x_MI.shape[1]
    itemsize = x_MI.dtype.itemsize
    elements, limit = _WEIGHT_BYTES // itemsize, 1024 if itemsize == 2 else 512
    if tile_rows <= _WHOLE_INNER_ROWS and inner % _LANES == 0 and inner * _LANES <= elements:
        tiling = tile_rows, inner, tile(width, elements // inner // _LANES * _LANES)
    else:
        tiling = tile_rows, tile(inner, limit), tile(width, limit)
    return gmm(
        _padded(x_MI, tiling[0]), w_GOI.astype(x_MI.dtype), sizes_G, x_MI.dtype, tiling,
        transpose_rhs=transpose, interpret=_INTERPRET,
    )[:rows]  # fmt: skip


matmul = functools.partial(_multiply_rows, transpose=True)
"""(x_MI, w_GOI, sizes_G) -> product of each row with its group's weights [M, O].

Results of rows beyond all groups are undefined.
"""

gradient_of_rows = functools.partial(_multiply_rows, transpose=False)
"""(dy_MO, w_GOI, sizes_G) -> gradient of the rows [M, I]."""


def gradient_of_weights(x_MI: Rows, dy_MO: Rows, sizes_G: Sizes) -> Float[Array, "g o i"]:
    """Return the gradient of the weights: the float32 sum of dy xᵀ over each group's rows."""
    rows = choose_row_tile(x_MI.shape[0], sizes_G.shape[0])
    # A tile of float32 sums, two copies that are being written, and the rows fit into 16 MiB.
    tiling = rows, tile(dy_MO.shape[1], 512), tile(x_MI.shape[1], 1024)
    return tgmm(
        _padded(dy_MO, rows).T, _padded(x_MI, rows), sizes_G, jnp.float32, tiling,
        interpret=_INTERPRET,
    )  # fmt: skip


def tile(size: int, limit: int) -> int:
    """Return the largest multiple of 128 up to `limit` whose tiling pads `size` by at most 10 %."""
    tiles = range(limit, 0, -_LANES)
    return next((t for t in tiles if -(-size // t) * t <= 1.1 * size), min(size, _LANES))


def choose_row_tile(rows: int, groups: int) -> int:
    """Return the rows of a tile: 1/16 of an even share, within limits, as a power of two."""
    least, most = _ROWS
    limited = min(most, max(least, rows // (16 * groups)))
    return 1 << (limited.bit_length() - 1)


def _padded(rows: Rows, multiple: int) -> Rows:
    return jnp.pad(rows, ((0, -rows.shape[0] % multiple), (0, 0)))
