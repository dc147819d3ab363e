"""Splash attention: the flash attention kernel for TPU that comes with JAX.

The kernel computes one sequence on one device. Here it is mapped over the batch;
`attention_backends.attend_locally` runs it on a mesh. The static mask determines, at trace time,
the tiles that the kernel computes. Tiles whose queries and keys share no document are removed from
these lists at run time.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import (
    BlockSizes,
    CausalMask,
    LocalMask,
    Mask,
    MultiHeadMask,
    SegmentIds,
    make_splash_mha,
)
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import (
    SplashAttentionKernel,
)
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask import (
    ChunkedCausalMask,
)
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo
from jaxtyping import Array, Bool, Float, Int

from jaxforge.kernels.scoring import PLAIN, Scoring

SEQUENCE_MULTIPLE = 128
"""Divisor of sequence lengths: the kernel reads tiles of 128 tokens."""

_BLOCK = 512  # tokens of a tile, as MaxText uses on all generations of TPUs
_INTERPRET = False  # tests set it, to run the kernel without a TPU

DocumentIds = Int[Array, "b s"] | None


def splash_attention(
    q_BSHh: Float[Array, "b s heads h"],
    k_BSKh: Float[Array, "b s kv h"],
    v_BSKh: Float[Array, "b s kv h"],
    segment_ids: DocumentIds,
    window: int | None = None,
    chunk: int | None = None,
    scoring: Scoring = PLAIN,
    sinks: Float[Array, "heads"] | None = None,
) -> Float[Array, "b s heads h"]:
    """Compute softmax(q kᵀ / √h) v over visible keys: earlier, same document, window and chunk.

    Tiles without a visible key are not computed. `sinks` holds a logit of each head that joins the
    scores and has no value.
    """
    length, heads, h = q_BSHh.shape[1:]
    # The kernel applies no scale to products: scale the queries instead, in their dtype.
    kernel = _kernel(length, heads, _mask(length, window, chunk), scoring.softcap)
    scaled = q_BSHh * jnp.asarray(scoring.scale_of(h), q_BSHh.dtype)
    q, k, v = (x.swapaxes(1, 2) for x in (scaled, k_BSKh, v_BSKh))

    def attend(q: Array, k: Array, v: Array, ids: Int[Array, "s"] | None) -> Array:
        row_kernel = kernel if ids is None else _within_documents(kernel, ids)
        y = row_kernel(q, k, v, None if ids is None else SegmentIds(q=ids, kv=ids), sinks)
        assert isinstance(y, jax.Array)  # without residuals
        return y

    return jax.vmap(attend)(q, k, v, segment_ids).swapaxes(1, 2)


def _within_documents(kernel: SplashAttentionKernel, ids: Int[Array, "s"]) -> SplashAttentionKernel:
    """Return the kernel without tiles whose queries and keys share no document."""
    tiles = ids.reshape(-1, _block(len(ids)))
    # A tile of queries and one of keys share a document only if their ranges of ids overlap. Other
    # pairs are removed from the forward and both backward kernels.
    first, last = jnp.min(tiles, axis=1), jnp.max(tiles, axis=1)
    overlaps = (first[:, None] <= last) & (first <= last[:, None])
    dkv_info, dq_info = kernel.dkv_mask_info, kernel.dq_mask_info
    assert dkv_info is not None
    assert dq_info is not None
    return SplashAttentionKernel(
        _remove_tiles(kernel.fwd_mask_info, overlaps),
        _remove_tiles(dq_info, overlaps),
        _remove_tiles(dkv_info, overlaps, by_keys=True),
        **kernel.kwargs,
    )


def _remove_tiles(
    info: MaskInfo, overlaps: Bool[Array, "n n"], *, by_keys: bool = False
) -> MaskInfo:
    """Return the lists of tiles without pairs that do not overlap.

    Args:
        info: for each tile of queries, the list of tiles of keys.
        overlaps: whether a tile of queries and one of keys may share a document.
        by_keys: whether `info` instead lists tiles of queries for each tile of keys.
    """
    if info.data_next is None or info.block_mask is None:  # no lists: all tiles are computed
        return info
    order = (0, 2, 1) if by_keys else (0, 1, 2)
    prefetched, mask = (jnp.transpose(x, order) for x in (info.data_next, info.block_mask))
    # For each head h and row of tiles i, in the order of execution t:
    #
    # prefetched[h, i, t]   index of the other tile (of keys, or of queries) to fetch for step t
    # mask[h, i, t]         0: skip, 1: compute with mask, 2: compute without mask
    #
    # Removed steps get mask 0. They fetch the tile of the next remaining step, so that transfers
    # have no gap: `cummin` from the right finds that step.
    row = jnp.arange(len(overlaps))[:, None]
    remains = (mask > 0) & overlaps[row, prefetched.astype(jnp.int32)]
    step = jnp.arange(remains[0].size)
    following = jnp.where(remains.reshape(len(remains), -1), step, len(step) - 1)
    following = jax.lax.cummin(following, axis=1, reverse=True)
    fetched = jnp.take_along_axis(prefetched.reshape(following.shape), following, axis=1)
    return info._replace(
        data_next=jnp.transpose(fetched.reshape(prefetched.shape), order),
        block_mask=jnp.transpose(jnp.where(remains, mask, 0), order),
    )


def _mask(length: int, window: int | None, chunk: int | None) -> Mask:
    shape = length, length
    mask: _ByTile
    if chunk is not None:
        mask, reach = _Chunked(shape, chunk), chunk - 1
    elif window is not None:
        mask, reach = _Local(shape, (window - 1, 0), 0), window - 1
    else:
        mask, reach = _Causal(shape), length
    mask.reach = reach
    return mask


class _ByTile(Mask):
    """Mask that compares positions only in tiles that are partially visible.

    The kernel evaluates every tile while the step is traced. Without this class, that took a minute
    for 131,072 tokens.
    """

    reach: int
    """Largest distance of a visible key from its query, in tokens."""

    def __getitem__(self, tile: tuple[slice, slice]) -> np.ndarray:
        rows, columns = tile
        # The least and greatest distance query - key of a tile, at two of its corners, decide
        # whether all of it is masked or visible.
        nearest, farthest = rows.start - columns.stop + 1, rows.stop - 1 - columns.start
        shape = rows.stop - rows.start, columns.stop - columns.start
        if farthest < 0 or nearest > self.reach:
            return _filled(shape, False)
        if nearest >= 0 and farthest <= self.reach and not isinstance(self, _Chunked):
            return _filled(shape, True)
        return super().__getitem__(tile)


class _Causal(_ByTile, CausalMask):
    pass


class _Local(_ByTile, LocalMask):
    pass


class _Chunked(_ByTile, ChunkedCausalMask):
    pass


@functools.lru_cache(4)
def _filled(shape: tuple[int, int], value: bool) -> np.ndarray:
    tile = np.full(shape, value)
    tile.flags.writeable = False
    return tile


def _block(length: int) -> int:
    return min(_BLOCK, length & -length)  # a power of two that divides the length


def _kernel(length: int, heads: int, of_head: Mask, softcap: float | None) -> SplashAttentionKernel:
    block = _block(length)
    sizes = BlockSizes(
        block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block, block_q_dq=block,
        block_kv_dq=block,
    )  # fmt: skip
    mask = MultiHeadMask([of_head] * heads)
    return make_splash_mha(
        mask, block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=_INTERPRET,
        attn_logits_soft_cap=softcap,
    )  # fmt: skip
