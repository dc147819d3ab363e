"""Splash attention, the flash attention kernel of JAX for TPU.

The kernel handles one sequence on one device. It is mapped over the batch here, and run on a mesh
by `attention_backends.attend_locally`. The list of tiles that it computes is built from a static
mask. Documents are known only at run time, and remove tiles from the list. The lists of rows then
differ, for which `vmap` would make a loop that slices and copies all arrays. Instead, packed rows
are joined to one long sequence, whose list has no tile of two rows.
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
from jaxtyping import Array, Float, Int

from jaxforge.kernels.scoring import PLAIN, Scoring

SEQUENCE_MULTIPLE = 128
"""Divisor of sequence lengths: the kernel reads tiles of this many tokens."""

BLOCK = 512  # tokens of a tile, as in MaxText on every TPU generation
_MOST_STEPS = 1 << 16  # tiles in the list of a call, which is in scalar memory
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
    if segment_ids is None:
        attend_batch = jax.vmap(lambda q, k, v: _result(kernel(q, k, v, sinks=sinks)))
        return attend_batch(*(x.swapaxes(1, 2) for x in (scaled, k_BSKh, v_BSKh))).swapaxes(1, 2)

    def of_rows(
        rows: tuple[Array, Array, Array, Int[Array, "b s"]],
    ) -> Float[Array, "b s heads hv"]:
        *qkv, ids_BS = rows
        q, k, v = (x.reshape(-1, *x.shape[2:]).swapaxes(0, 1) for x in qkv)
        ids = SegmentIds(q=ids_BS.reshape(-1), kv=ids_BS.reshape(-1))
        y = _result(_of_documents(kernel, ids_BS)(q, k, v, ids, sinks))
        return y.swapaxes(0, 1).reshape(*ids_BS.shape, heads, -1)

    inputs, batch = (scaled, k_BSKh, v_BSKh, segment_ids), len(q_BSHh)
    rows = _rows_of_a_call(batch, kernel, aligned=chunk is None or length % chunk == 0)
    if rows == batch:
        return of_rows(inputs)
    parts = jax.tree.map(lambda x: x.reshape(-1, rows, *x.shape[1:]), inputs)
    return jax.lax.map(of_rows, parts).reshape(*q_BSHh.shape[:3], -1)


def _result(y: Array | tuple) -> Array:
    assert isinstance(y, jax.Array)  # a single array, because residuals are not requested
    return y


def _rows_of_a_call(batch: int, kernel: SplashAttentionKernel, *, aligned: bool) -> int:
    """Return the largest divisor of the batch for which the lists of tiles fit into scalar memory.

    Args:
        batch: number of rows.
        kernel: the kernel of one row.
        aligned: whether rows begin with a chunk. Otherwise a call has one row, because chunks are
            counted from its first token.
    """
    listed = kernel.fwd_mask_info.data_next
    assert listed is not None
    most = max(1, _MOST_STEPS // listed.size) if aligned else 1
    return max(n for n in range(1, min(batch, most) + 1) if batch % n == 0)


def _of_documents(
    kernel: SplashAttentionKernel, ids_BS: Int[Array, "b s"]
) -> SplashAttentionKernel:
    """Return the kernel of rows that are joined to one sequence.

    Its lists are those of the kernel of one row, repeated with tiles counted from the first row.
    Tiles whose queries and keys share no document are removed.
    """
    tiles = ids_BS.reshape(-1, _block(ids_BS.shape[1]))
    ranges = jnp.min(tiles, axis=1), jnp.max(tiles, axis=1)
    of_keys, of_queries = kernel.dkv_mask_info, kernel.dq_mask_info
    assert of_keys is not None
    assert of_queries is not None
    rows = len(ids_BS)
    return SplashAttentionKernel(
        _lists_of_rows(kernel.fwd_mask_info, rows, ranges),
        _lists_of_rows(of_queries, rows, ranges),
        _lists_of_rows(of_keys, rows, ranges, by_keys=True),
        **kernel.kwargs,
    )


def _lists_of_rows(
    info: MaskInfo,
    rows: int,
    ranges: tuple[Int[Array, "tiles"], Int[Array, "tiles"]],
    *,
    by_keys: bool = False,
) -> MaskInfo:
    """Repeat lists of tiles for all rows, without tiles that share no document.

    Args:
        info: lists of one row: per tile of queries, or, with `by_keys`, per tile of keys.
        rows: number of rows.
        ranges: smallest and largest document id of each tile of all rows.
        by_keys: whether there is a list per tile of keys.
    """
    assert info.data_next is not None
    assert info.block_mask is not None
    assert info.q_sequence is not None
    axes = (0, 2, 1) if by_keys else (0, 1, 2)
    listed, mask = (jnp.transpose(x, axes) for x in (info.data_next, info.block_mask))
    # Per head and tile, in the order of execution:
    #
    # listed[h, i, t]   tile of keys (by_keys: of queries) to prefetch for step t
    # mask[h, i, t]     0: skip, 1: compute with mask, 2: compute without mask
    #
    first_tiles = np.repeat(np.arange(rows) * listed.shape[1], listed.shape[1])
    listed = jnp.tile(listed.astype(jnp.int32), (1, rows, 1)) + first_tiles[:, None]
    mask = jnp.tile(mask, (1, rows, 1))
    # Two tiles can share a document only if their ranges of ids overlap.
    first, last = ranges
    overlap = (first[:, None] <= last[listed]) & (first[listed] <= last[:, None])
    # Removed steps get mask 0. Their prefetch is replaced by that of the next remaining step, so
    # that the pipeline of transfers has no bubble. `cummin` from the right finds that step.
    remains = (mask > 0) & overlap
    at = np.arange(remains[0].size)
    following = jnp.where(remains.reshape(len(remains), -1), at, len(at) - 1)
    following = jax.lax.cummin(following, axis=1, reverse=True)
    fetched = jnp.take_along_axis(listed.reshape(following.shape), following, axis=1)
    return info._replace(
        data_next=jnp.transpose(fetched.reshape(listed.shape), axes),
        block_mask=jnp.transpose(jnp.where(remains, mask, 0), axes),
        q_sequence=np.arange(rows * len(info.q_sequence), dtype=np.int32),
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
