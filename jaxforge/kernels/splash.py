"""Splash attention: the flash attention kernel for TPU that comes with JAX.

The kernel knows one sequence on one device. Here it is mapped over the batch;
`attention_backends.attend_locally` brings it to a mesh. Tiles that it computes are listed when it
is made, from its mask; documents are known later, and by them tiles are struck from the lists.
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
"""The kernel reads tiles of so many tokens."""

_BLOCK = 512  # tokens of a tile: what MaxText runs with on every generation
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
    """Compute softmax(q kᵀ / √h) v over the keys at or before each query, in its document.

    Of a window of tokens, its own included, it sees those, and of a row in chunks its own chunk;
    tiles outside of it are not computed, nor those whose queries and keys share no document.
    `sinks` are a logit of each head that joins its scores.
    """
    length, heads, h = q_BSHh.shape[1:]
    # The kernel multiplies q by nothing: scale the queries instead, in their dtype.
    kernel = _kernel(length, heads, _mask(length, window, chunk), scoring.softcap)
    scaled = q_BSHh * jnp.asarray(scoring.scale_of(h), q_BSHh.dtype)
    q, k, v = (x.swapaxes(1, 2) for x in (scaled, k_BSKh, v_BSKh))

    def of_row(q: Array, k: Array, v: Array, ids: Int[Array, "s"] | None) -> Array:
        own = kernel if ids is None else _within_documents(kernel, ids)
        y = own(q, k, v, None if ids is None else SegmentIds(q=ids, kv=ids), sinks)
        assert isinstance(y, jax.Array)  # without residuals
        return y

    return jax.vmap(of_row)(q, k, v, segment_ids).swapaxes(1, 2)


def _within_documents(kernel: SplashAttentionKernel, ids: Int[Array, "s"]) -> SplashAttentionKernel:
    """Return the kernel without tiles whose queries and keys share no document."""
    tiles = ids.reshape(-1, _block(len(ids)))
    # A tile of queries and one of keys share a document only if their ranges of ids overlap (ids
    # ascend along a row). The mask of the forward and both backward kernels lose the others.
    first, last = jnp.min(tiles, axis=1), jnp.max(tiles, axis=1)
    meet = (first[:, None] <= last) & (first <= last[:, None])
    of_keys, of_queries = kernel.dkv_mask_info, kernel.dq_mask_info
    assert of_keys is not None
    assert of_queries is not None
    return SplashAttentionKernel(
        _struck(kernel.fwd_mask_info, meet),
        _struck(of_queries, meet),
        _struck(of_keys, meet, by_keys=True),
        **kernel.kwargs,
    )


def _struck(info: MaskInfo, meet: Bool[Array, "n n"], *, by_keys: bool = False) -> MaskInfo:
    """Lists without tiles that do not meet: instead of one, what comes next is fetched meanwhile.

    A tile of queries has a list of tiles of keys; `by_keys` it is the other way round.
    """
    if info.data_next is None or info.block_mask is None:  # nothing is listed: all are computed
        return info
    turned = (0, 2, 1) if by_keys else (0, 1, 2)
    listed, mask = (jnp.transpose(x, turned) for x in (info.data_next, info.block_mask))
    # Per head and row of tiles, in the order of execution:
    #
    # listed[h, i, t]   tile of the other side to prefetch for step t
    # mask[h, i, t]     0: skip, 1: compute with mask, 2: compute without mask
    #
    # Steps that are struck get mask 0. Their prefetch is replaced by that of the next step that
    # stays, so that the pipeline of transfers has no bubble: `cummin` from the right finds it.
    own = jnp.arange(len(meet))[:, None]
    stays = (mask > 0) & meet[own, listed.astype(jnp.int32)]
    at = jnp.arange(stays[0].size)
    following = jnp.where(stays.reshape(len(stays), -1), at, len(at) - 1)
    following = jax.lax.cummin(following, axis=1, reverse=True)
    fetched = jnp.take_along_axis(listed.reshape(following.shape), following, axis=1)
    return info._replace(
        data_next=jnp.transpose(fetched.reshape(listed.shape), turned),
        block_mask=jnp.transpose(jnp.where(stays, mask, 0), turned),
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
    """Mask that computes only those of its tiles that are partially visible.

    The kernel asks for every tile while the step is traced: of 131,072 tokens, that took a minute.
    """

    reach: int
    """How many tokens back a query sees at most."""

    def __getitem__(self, tile: tuple[slice, slice]) -> np.ndarray:
        rows, columns = tile
        # Distances query - key over the corners of the tile decide it without a comparison per
        # pair.
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
