"""Attention weights for inspection, by an explicit softmax next to the attention kernel."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxforge.kernels.attention_backends import Keys, Queries, SegmentIds, Sinks, softmax_weights
from jaxforge.kernels.masking import Mask, chunk_ids, select_chunk, select_window, visible
from jaxforge.kernels.scoring import Scoring
from jaxforge.parallel.sharding import constrain


def attention_weights(
    masks: Sequence[Mask],
    mask_index: int | Int[Array, ""],
    q: Queries,
    k: Keys,
    segment_ids: SegmentIds,
    scoring: Scoring,
    sinks: Sinks,
) -> Float[Array, "b heads s s"]:
    """Return the weight of every key for every query of its sequence, 0 for invisible keys.

    Args:
        masks: masks of the layers (`LayerPlan.masks`).
        mask_index: index of the layer's mask in `masks`.
        q: queries.
        k: keys.
        segment_ids: documents of packed rows.
        scoring: scale and soft cap of the scores.
        sinks: an extra logit per head; weights then sum to less than 1.
    """
    batch, length, heads, _ = q.shape
    tokens = jnp.arange(length)
    seen_BST = visible(tokens[:, None], tokens, select_window(masks, mask_index))[None]
    if (chunk := select_chunk(masks, mask_index)) is not None:
        segment_ids = chunk_ids(batch, length, chunk, segment_ids)
    if segment_ids is not None:
        seen_BST = seen_BST & (segment_ids[:, :, None] == segment_ids[:, None, :])
    weights = softmax_weights(q, k, seen_BST[:, None], scoring, sinks)
    return constrain(weights.reshape(batch, heads, length, length), "batch", "heads", None, None)
