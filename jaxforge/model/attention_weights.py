"""Attention weights and largest logits for inspection, computed next to the attention kernel.

Fused kernels return neither. Weights are an explicit softmax. Logits are compared in blocks of
queries, so that [queries, keys] is never stored.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxforge.kernels.dot_product_attention import Keys, Queries, SegmentIds, Sinks, softmax_weights
from jaxforge.kernels.masking import Mask, chunk_ids, select_chunk, select_window, visible
from jaxforge.kernels.scoring import Scoring, Slopes, alibi_bias
from jaxforge.parallel.sharding import automatic_size, constrain


def attention_weights(
    masks: Sequence[Mask],
    mask_index: int | Int[Array, ""],
    q: Queries,
    k: Keys,
    segment_ids: SegmentIds,
    scoring: Scoring,
    sinks: Sinks,
    slopes: Slopes = None,
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
        slopes: slopes of ALiBi.
    """
    batch, length, heads, _ = q.shape
    tokens = jnp.arange(length)
    seen_BST = visible(tokens[:, None], tokens, select_window(masks, mask_index))[None]
    segment_ids = _with_chunks(masks, mask_index, q, segment_ids)
    if segment_ids is not None:
        seen_BST = seen_BST & (segment_ids[:, :, None] == segment_ids[:, None, :])
    bias = alibi_bias(slopes, tokens, tokens)
    weights = softmax_weights(q, k, seen_BST[:, None], scoring, sinks, bias)
    return constrain(weights.reshape(batch, heads, length, length), "batch", "heads", None, None)


def max_logits(
    masks: Sequence[Mask],
    mask_index: int | Int[Array, ""],
    q: Queries,
    k: Keys,
    segment_ids: SegmentIds,
    scoring: Scoring,
) -> Float[Array, "b heads"]:
    """Return the largest scaled product of a query and a visible key.

    Soft cap, sinks and ALiBi are left out. The result has no gradient.

    Args:
        masks: masks of the layers (`LayerPlan.masks`).
        mask_index: index of the layer's mask in `masks`.
        q: queries.
        k: keys.
        segment_ids: documents of packed rows.
        scoring: scale of the scores.
    """
    q, k = jax.lax.stop_gradient((q, k))
    batch, length, heads, width = q.shape
    tokens, window = jnp.arange(length), select_window(masks, mask_index)
    ids_BS = _with_chunks(masks, mask_index, q, segment_ids)
    ids_BS = jnp.zeros((batch, length), jnp.int32) if ids_BS is None else ids_BS

    def of_query(row: tuple[Array, Array, Array]) -> Float[Array, "b heads"]:
        token, q_BHh, id_B = row
        grouped = q_BHh.reshape(batch, k.shape[2], -1, width)
        scores = jnp.einsum("bkgh,btkh->bkgt", grouped, k, preferred_element_type=jnp.float32)
        scores *= scoring.scale_of(width)
        seen_BT = visible(token, tokens, window) & (id_B[:, None] == ids_BS)
        largest = jnp.max(scores, axis=-1, initial=-jnp.inf, where=seen_BT[:, None, None])
        return largest.reshape(batch, heads)

    queries = tokens, jnp.moveaxis(q, 1, 0), jnp.moveaxis(ids_BS, 1, 0)
    rows = -(-batch // automatic_size("batch")) * -(-heads // automatic_size("heads"))
    at_once = max(1, min(_QUERIES, _LOGITS // (rows * length)))
    largest = jnp.max(jax.lax.map(of_query, queries, batch_size=at_once), axis=0)
    return constrain(largest, "batch", "heads")


_QUERIES, _LOGITS = 128, 2**26
"""Queries whose logits are computed at once, and the most logits of a device (256 MiB)."""


def _with_chunks(
    masks: Sequence[Mask], mask_index: int | Int[Array, ""], q: Queries, segment_ids: SegmentIds
) -> SegmentIds:
    """Return ids that differ between documents, and between chunks if the layer has some."""
    chunk = select_chunk(masks, mask_index)
    batch, length = q.shape[:2]
    return segment_ids if chunk is None else chunk_ids(batch, length, chunk, segment_ids)
