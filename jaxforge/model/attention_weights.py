"""Attention weights and largest logits for inspection, computed next to the attention kernel.

Fused kernels return neither. Weights are an explicit softmax. Logits are compared in blocks of
queries, so that [queries, keys] is never stored. Devices that share sequences gather the keys for
their own queries.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxforge.config.eval import ATTENTION_WEIGHTS, MAX_LOGITS
from jaxforge.kernels.attention_backends import run_per_device
from jaxforge.kernels.context_parallel import context_size, local_chunk_ids
from jaxforge.kernels.dot_product_attention import Keys, Queries, SegmentIds, Sinks, softmax_weights
from jaxforge.kernels.masking import Mask, chunk_ids, select_chunk, select_window, visible
from jaxforge.kernels.scoring import Scoring
from jaxforge.model.layer import Context, LayerSettings
from jaxforge.parallel import collectives
from jaxforge.parallel.sharding import automatic_size, constrain


def capture_scores(
    q_BSHh: Float[Array, "b s heads h"],
    k_BSKh: Float[Array, "b s kv h"],
    context: Context,
    settings: LayerSettings,
    scoring: Scoring,
    sinks: Float[Array, "heads"] | None = None,
    selected_BSS: Bool[Array, "b s s"] | None = None,
) -> dict[str, Array]:
    """Return the captured attention weights and largest logits, by name.

    Both are computed apart from the kernel, which never has the whole matrix of scores.

    Args:
        q_BSHh: queries.
        k_BSKh: keys.
        context: positions and documents of the tokens.
        settings: settings of the layer, with the names to capture.
        scoring: scale and soft cap of the scores.
        sinks: an extra logit per head that joins the scores; None: there are none.
        selected_BSS: keys that each query attends to; None: all that it sees. The largest logits
            are those of all keys that queries see.
    """
    kind, plan, runtime, capture, _ = settings
    captured: dict[str, Array] = {}
    inputs = plan.masks, kind.mask, q_BSHh, k_BSKh, context.segment_ids, scoring
    if ATTENTION_WEIGHTS in capture.points:
        assert context_size() == 1  # otherwise no device has all keys
        captured[ATTENTION_WEIGHTS] = attention_weights(*inputs, sinks, selected_BSS)
    # QK-Clip needs only the largest logit, which devices can combine.
    if MAX_LOGITS in capture.points:
        strategy = runtime.context if context_size() > 1 else None
        captured[MAX_LOGITS] = max_logits(*inputs, context.positions, strategy)
    return captured


def attention_weights(
    masks: Sequence[Mask],
    mask_index: int | Int[Array, ""],
    q: Queries,
    k: Keys,
    segment_ids: SegmentIds,
    scoring: Scoring,
    sinks: Sinks,
    selected: Bool[Array, "b s s"] | None = None,
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
        selected: keys that each query attends to; None: all that it sees.
    """
    batch, length, heads, _ = q.shape
    tokens = jnp.arange(length)
    seen_BST = visible(tokens[:, None], tokens, select_window(masks, mask_index))[None]
    segment_ids = _with_chunks(masks, mask_index, q, segment_ids)
    if segment_ids is not None:
        seen_BST = seen_BST & (segment_ids[:, :, None] == segment_ids[:, None, :])
    if selected is not None:
        seen_BST = seen_BST & selected
    weights = softmax_weights(q, k, seen_BST[:, None], scoring, sinks)
    return constrain(weights.reshape(batch, heads, length, length), "batch", "heads", None, None)


def max_logits(
    masks: Sequence[Mask],
    mask_index: int | Int[Array, ""],
    q: Queries,
    k: Keys,
    segment_ids: SegmentIds,
    scoring: Scoring,
    positions: Int[Array, "b s"] | None = None,
    strategy: str | None = None,
) -> Float[Array, "b heads"]:
    """Return the largest scaled product of a query and a visible key.

    Soft cap and sinks are left out. The result has no gradient.

    Args:
        masks: masks of the layers (`LayerPlan.masks`).
        mask_index: index of the layer's mask in `masks`.
        q: queries.
        k: keys.
        segment_ids: documents of packed rows.
        scoring: scale of the scores.
        positions: positions of the tokens in their rows, if devices share sequences.
        strategy: value of `distributed.cp_strategy`, if devices share sequences.
    """
    q, k = jax.lax.stop_gradient((q, k))
    if strategy is not None:
        assert positions is not None
        of_tokens = positions, segment_ids
        return _max_logits_across_devices(masks, mask_index, q, k, of_tokens, scoring, strategy)
    tokens, window = jnp.arange(q.shape[1]), select_window(masks, mask_index)
    ids_BS = _with_chunks(masks, mask_index, q, segment_ids)
    ids_BS = jnp.zeros(q.shape[:2], jnp.int32) if ids_BS is None else ids_BS
    queries = tokens, jnp.moveaxis(q, 1, 0), jnp.moveaxis(ids_BS, 1, 0)
    largest = _max_over_queries(queries, (tokens, k, ids_BS), window, scoring)
    return constrain(largest, "batch", "heads")


def _max_logits_across_devices(
    masks: Sequence[Mask],
    mask_index: int | Int[Array, ""],
    q: Queries,
    k: Keys,
    of_tokens: tuple[Int[Array, "b s"], SegmentIds],
    scoring: Scoring,
    strategy: str,
) -> Float[Array, "b heads"]:
    """Compare the queries of each device with the keys of all devices that share its sequences."""
    scalars = () if isinstance(mask_index, int) else (mask_index,)

    def local(
        q: Array, k: Array, _: Array, of_tokens: PyTree, __: None, *scalars: Array
    ) -> Float[Array, "b 1 heads 1"]:
        at_BS, ids_BS = of_tokens
        index = scalars[0] if scalars else mask_index
        if (chunk := select_chunk(masks, index)) is not None:
            ids_BS = local_chunk_ids(chunk, ids_BS, at_BS.shape, strategy)
        ids_BS = jnp.zeros_like(at_BS) if ids_BS is None else ids_BS
        queries = tuple(jnp.moveaxis(x, 1, 0) for x in (at_BS[..., None], q, ids_BS))
        keys = tuple(collectives.all_gather(x, "context", 1) for x in (at_BS, k, ids_BS))
        largest = _max_over_queries(queries, keys, select_window(masks, index), scoring)
        return collectives.pmax(largest, "context")[:, None, :, None]

    largest = run_per_device(local, q, k, k, of_tokens, None, *scalars)
    return jnp.max(largest, axis=(1, 3))


def _max_over_queries(
    queries: tuple[Array, ...],
    keys: tuple[Array, ...],
    window: int | Int[Array, ""] | None,
    scoring: Scoring,
) -> Float[Array, "b heads"]:
    """Return the largest logit of each head.

    Args:
        queries: positions [s] or [s, b, 1], queries [s, b, heads, h], and document ids [s, b].
        keys: positions [t] or [b, t], keys [b, t, kv, h], and document ids [b, t].
        window: number of tokens that a query sees; None: all.
        scoring: scale of the scores.
    """
    tokens, k, ids_BT = keys
    _, batch, heads, width = queries[1].shape

    def of_query(row: tuple[Array, Array, Array]) -> Float[Array, "b heads"]:
        token, q_BHh, id_B = row
        grouped = q_BHh.reshape(batch, k.shape[2], -1, width)
        scores = jnp.einsum("bkgh,btkh->bkgt", grouped, k, preferred_element_type=jnp.float32)
        scores *= scoring.scale_of(width)
        seen_BT = visible(token, tokens, window) & (id_B[:, None] == ids_BT)
        largest = jnp.max(scores, axis=-1, initial=-jnp.inf, where=seen_BT[:, None, None])
        return largest.reshape(batch, heads)

    rows = -(-batch // automatic_size("batch")) * -(-heads // automatic_size("heads"))
    at_once = max(1, min(_QUERIES, _LOGITS // (rows * k.shape[1])))
    return jnp.max(jax.lax.map(of_query, queries, batch_size=at_once), axis=0)


_QUERIES, _LOGITS = 128, 2**26
"""Queries whose logits are computed at once, and the most logits of a device (256 MiB)."""


def _with_chunks(
    masks: Sequence[Mask], mask_index: int | Int[Array, ""], q: Queries, segment_ids: SegmentIds
) -> SegmentIds:
    """Return ids that differ between documents, and between chunks if the layer has some."""
    chunk = select_chunk(masks, mask_index)
    batch, length = q.shape[:2]
    return segment_ids if chunk is None else chunk_ids(batch, length, chunk, segment_ids)
