"""Splash attention, the flash attention kernel of JAX for TPU.

The kernel handles one sequence on one device. It is mapped over the batch here, and run on a mesh
by `attention_backends.attend_locally`. The list of tiles that it computes is built from a static
mask. Documents are known only at run time, and remove tiles from the list.
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
"""Divisor of sequence lengths: the kernel reads tiles of this many tokens."""

BLOCK = 512  # tokens of a tile, as in MaxText on every TPU generation
INTERPRET = False  # tests set it, to run the kernel without a TPU

DocumentIds = Int[Array, "b s"] | None


def splash_attention(
    q_BSHh: Float[Array, "b s heads h"],
    k_BSKh: Float[Array, "b s kv h"],
    v_BSKh: Float[Array, "b s kv hv"],
    segment_ids: DocumentIds,
    window: int | None = None,
    chunk: int | None = None,
    scoring: Scoring = PLAIN,
    sinks: Float[Array, "heads"] | None = None,
) -> Float[Array, "b s heads hv"]:
    """Compute softmax(q kᵀ / √h) v over the keys at or before each query, in its document.

    A query sees the last `window` tokens, including itself, and its own chunk of `chunk` tokens.
    Tiles outside of both are skipped, and tiles whose queries and keys share no document. `sinks`
    are an extra logit per head that joins the scores.
    """
    length, heads, h = q_BSHh.shape[1:]
    # The kernel does not scale scores, so the queries are scaled, in their dtype.
    kernel = _kernel(length, heads, splash_mask(length, window, chunk), scoring.softcap)
    scaled = q_BSHh * jnp.asarray(scoring.scale_of(h), q_BSHh.dtype)
    q, k, v = (x.swapaxes(1, 2) for x in (scaled, k_BSKh, v_BSKh))

    def of_row(row: tuple[Array, Array, Array, Int[Array, "s"] | None]) -> Array:
        q, k, v, ids = row
        own = kernel if ids is None else _within_documents(kernel, ids)
        y = own(q, k, v, None if ids is None else SegmentIds(q=ids, kv=ids), sinks)
        assert isinstance(y, jax.Array)  # a single array, because residuals are not requested
        return y

    # Rows with lists of tiles of their own need a loop. vmap would make one that carries the
    # results of all rows, and rematerialization then saves that carry in every iteration.
    over_rows = jax.vmap(of_row) if segment_ids is None else functools.partial(jax.lax.map, of_row)
    return over_rows((q, k, v, segment_ids)).swapaxes(1, 2)


def _within_documents(kernel: SplashAttentionKernel, ids: Int[Array, "s"]) -> SplashAttentionKernel:
    """Return the kernel without tiles whose queries and keys share no document."""
    tiles = ids.reshape(-1, _block(len(ids)))
    # A tile of queries and a tile of keys can share a document only if their ranges of ids overlap.
    # Other tiles are removed from the lists of the forward kernel and both backward kernels.
    first, last = jnp.min(tiles, axis=1), jnp.max(tiles, axis=1)
    is_visible = (first[:, None] <= last) & (first <= last[:, None])
    of_keys, of_queries = kernel.dkv_mask_info, kernel.dq_mask_info
    assert of_keys is not None
    assert of_queries is not None
    return SplashAttentionKernel(
        _remove_tiles(kernel.fwd_mask_info, is_visible),
        _remove_tiles(of_queries, is_visible),
        _remove_tiles(of_keys, is_visible, by_keys=True),
        **kernel.kwargs,
    )


def _remove_tiles(
    info: MaskInfo, is_visible: Bool[Array, "n n"], *, by_keys: bool = False
) -> MaskInfo:
    """Remove tiles that share no document, and prefetch the next remaining tile instead.

    Lists are per tile of queries, or, with `by_keys`, per tile of keys.
    """
    if info.data_next is None or info.block_mask is None:  # no list: all tiles are computed
        return info
    axes = (0, 2, 1) if by_keys else (0, 1, 2)
    listed, mask = (jnp.transpose(x, axes) for x in (info.data_next, info.block_mask))
    # Per head and row of tiles, in the order of execution:
    #
    # listed[h, i, t]   tile of keys (by_keys: of queries) to prefetch for step t
    # mask[h, i, t]     0: skip, 1: compute with mask, 2: compute without mask
    #
    # Removed steps get mask 0. Their prefetch is replaced by that of the next remaining step, so
    # that the pipeline of transfers has no bubble. `cummin` from the right finds that step.
    own = jnp.arange(len(is_visible))[:, None]
    remains = (mask > 0) & is_visible[own, listed.astype(jnp.int32)]
    at = jnp.arange(remains[0].size)
    following = jnp.where(remains.reshape(len(remains), -1), at, len(at) - 1)
    following = jax.lax.cummin(following, axis=1, reverse=True)
    fetched = jnp.take_along_axis(listed.reshape(following.shape), following, axis=1)
    return info._replace(
        data_next=jnp.transpose(fetched.reshape(listed.shape), axes),
        block_mask=jnp.transpose(jnp.where(remains, mask, 0), axes),
    )


def splash_mask(length: int, window: int | None, chunk: int | None) -> Mask:
    """Return the causal mask of a layer, limited to a window or to chunks."""
    shape = length, length
    mask: _TiledMask
    if chunk is not None:
        mask, reach = _Chunked(shape, chunk), chunk - 1
    elif window is not None:
        mask, reach = _Local(shape, (window - 1, 0), 0), window - 1
    else:
        mask, reach = _Causal(shape), length
    mask.reach = reach
    return mask


class _TiledMask(Mask):
    """Mask that computes a tile only if it is partially visible.

    The kernel reads every tile while the step is traced, which took a minute for 131,072 tokens.
    """

    reach: int
    """Maximum distance from a query to a visible key."""

    def __getitem__(self, tile: tuple[slice, slice]) -> np.ndarray:
        rows, columns = tile
        # The distances query - key at two corners bound those of all pairs of the tile.
        nearest, farthest = rows.start - columns.stop + 1, rows.stop - 1 - columns.start
        shape = rows.stop - rows.start, columns.stop - columns.start
        if farthest < 0 or nearest > self.reach:
            return _filled(shape, False)
        if nearest >= 0 and farthest <= self.reach and not isinstance(self, _Chunked):
            return _filled(shape, True)
        return super().__getitem__(tile)


class _Causal(_TiledMask, CausalMask):
    pass


class _Local(_TiledMask, LocalMask):
    pass


class _Chunked(_TiledMask, ChunkedCausalMask):
    pass


@functools.lru_cache(4)
def _filled(shape: tuple[int, int], value: bool) -> np.ndarray:
    tile = np.full(shape, value)
    tile.flags.writeable = False
    return tile


def _block(length: int) -> int:
    return min(BLOCK, length & -length)  # a power of two that divides the length


def _kernel(length: int, heads: int, of_head: Mask, softcap: float | None) -> SplashAttentionKernel:
    block = _block(length)
    sizes = BlockSizes(
        block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block, block_q_dq=block,
        block_kv_dq=block,
    )  # fmt: skip
    mask = MultiHeadMask([of_head] * heads)
    return make_splash_mha(
        mask, block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=INTERPRET,
        attn_logits_soft_cap=softcap,
    )  # fmt: skip
