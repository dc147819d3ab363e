"""Splash attention: the flash attention kernel for TPU that comes with JAX.

The kernel knows one sequence on one device. Here it is mapped over the batch;
`attention_backends.attend_locally` brings it to a mesh.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    BlockSizes,
    CausalMask,
    LocalMask,
    Mask,
    MultiHeadMask,
    SegmentIds,
    make_splash_mha,
)
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask import (
    ChunkedCausalMask,
)
from jaxtyping import Array, Float, Int

from jaxforge.model.scoring import PLAIN, Scoring

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
    """softmax(q kᵀ / √h) v over the keys at or before each query, of its own document.

    Of a window of tokens, its own included, it sees those, and of a row in chunks its own chunk;
    tiles outside of it are not computed. `sinks` are a logit of each head that joins its scores.
    """
    length, heads, h = q_BSHh.shape[1:]
    kernel = _kernel(length, heads, _mask(length, window, chunk), scoring.softcap)
    scaled = q_BSHh * jnp.asarray(scoring.scale_of(h), q_BSHh.dtype)
    segments = None if segment_ids is None else SegmentIds(q=segment_ids, kv=segment_ids)
    heads_first = (x.swapaxes(1, 2) for x in (scaled, k_BSKh, v_BSKh))
    of_rows = jax.vmap(kernel, in_axes=(0, 0, 0, 0, None))
    return of_rows(*heads_first, segments, sinks).swapaxes(1, 2)


def _mask(length: int, window: int | None, chunk: int | None) -> Mask:
    shape = length, length
    if chunk is not None:
        return ChunkedCausalMask(shape, chunk)
    return CausalMask(shape) if window is None else LocalMask(shape, (window - 1, 0), 0)


def _kernel(length: int, heads: int, of_head: Mask, softcap: float | None) -> Callable[..., Array]:
    block = min(_BLOCK, length & -length)  # a power of two that divides the length
    sizes = BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    mask = MultiHeadMask([of_head] * heads)
    return make_splash_mha(
        mask, block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=_INTERPRET,
        attn_logits_soft_cap=softcap,
    )  # fmt: skip
