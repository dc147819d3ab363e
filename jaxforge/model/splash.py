"""Splash attention: the flash attention kernel for TPU that comes with JAX, on any mesh.

The kernel knows one sequence on one device. Here it is mapped over the batch, and, where a mesh
splits batch or heads, every device runs it on its own share: attention needs no communication.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    BlockSizes,
    CausalMask,
    MultiHeadMask,
    SegmentIds,
    make_splash_mha,
)
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxforge.parallel.sharding import automatic_axes, automatic_spec

SEQUENCE_MULTIPLE = 128
"""The kernel reads tiles of so many tokens."""

_BLOCK = 512  # tokens of a tile: what MaxText runs with on every generation
_INTERPRET = False  # tests set it, to run the kernel without a TPU

DocIds = Int[Array, "b s"] | None


def splash_attention(
    q_BSHh: Float[Array, "b s heads h"],
    k_BSKh: Float[Array, "b s kv h"],
    v_BSKh: Float[Array, "b s kv h"],
    doc_ids: DocIds,
) -> Float[Array, "b s heads h"]:
    """softmax(q kᵀ / √h) v over the keys at or before each query, of its own document."""
    axes = automatic_axes()
    if not axes:
        return _local(q_BSHh, k_BSKh, v_BSKh, doc_ids)
    queries = automatic_spec("batch", None, "heads", None)
    keys = automatic_spec("batch", None, "kv_heads", None)
    documents = P() if doc_ids is None else automatic_spec("batch", None)
    return jax.shard_map(
        _local,
        in_specs=(queries, keys, keys, documents),
        out_specs=queries,
        axis_names=axes,
        check_vma=False,  # pallas_call says nothing of how its results vary
    )(q_BSHh, k_BSKh, v_BSKh, doc_ids)


def _local(q: Array, k: Array, v: Array, doc_ids: DocIds) -> Array:
    """The share of one device."""
    length, heads = q.shape[1:3]
    kernel = _kernel(length, heads)
    scaled = q * jnp.asarray(q.shape[-1] ** -0.5, q.dtype)
    segments = None if doc_ids is None else SegmentIds(q=doc_ids, kv=doc_ids)
    heads_first = (x.swapaxes(1, 2) for x in (scaled, k, v))
    return jax.vmap(kernel)(*heads_first, segments).swapaxes(1, 2)


def _kernel(length: int, heads: int) -> Callable[..., Array]:
    block = min(_BLOCK, length & -length)  # a power of two that divides the length
    sizes = BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    mask = MultiHeadMask([CausalMask((length, length))] * heads)
    return make_splash_mha(
        mask, block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=_INTERPRET
    )
