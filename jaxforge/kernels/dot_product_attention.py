"""Attention by plain products or `jax.nn.dot_product_attention`, with the whole score matrix.

Queries may see any keys, given as a mask. cuDNN's kernel is called by the same function of JAX.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxforge.kernels.masking import visible
from jaxforge.kernels.scoring import PLAIN, Scoring

Queries = Float[Array, "b s heads h"]
Keys = Float[Array, "b t kv h"]
Values = Float[Array, "b t kv hv"]
Output = Float[Array, "b s heads hv"]
SegmentIds = Int[Array, "b s"] | None
Sinks = Float[Array, "heads"] | None


def reference_attention(
    q: Queries,
    k: Keys,
    v: Values,
    segment_ids: SegmentIds,
    window: int | None = None,
    chunk: int | None = None,
    reach: Int[Array, ""] | None = None,
    scoring: Scoring = PLAIN,
    sinks: Sinks = None,
) -> Output:
    """Attend with all S x S scores in float32."""
    if reach is None and chunk is None and scoring.softcap is None and sinks is None:
        return _dot_product(q, k, v, segment_ids, window, "xla", scoring)
    tokens = jnp.arange(q.shape[1])
    seen = visible(tokens[:, None], tokens, window if reach is None else reach, chunk)[None, None]
    if segment_ids is not None:
        seen = seen & _same_document(segment_ids)
    return masked_attention(q, k, v, seen, scoring, sinks)


def cudnn_attention(
    q: Queries,
    k: Keys,
    v: Values,
    segment_ids: SegmentIds,
    window: int | None = None,
    scoring: Scoring = PLAIN,
) -> Output:
    """Attend with cuDNN's kernel; packed documents need an S x S mask per sequence."""
    return _dot_product(q, k, v, segment_ids, window, "cudnn", scoring)


def masked_attention(
    q: Queries,
    k: Keys,
    v: Values,
    mask: Bool[Array, "b 1 s t"],
    scoring: Scoring = PLAIN,
    sinks: Sinks = None,
) -> Output:
    """Attend with any mask by plain products."""
    if scoring.softcap is not None or sinks is not None:
        weights = softmax_weights(q, k, mask, scoring, sinks)
        output = jnp.einsum("bkgst,btkh->bskgh", weights.astype(v.dtype), v)
        return output.reshape(*q.shape[:3], v.shape[3])
    return _at_one_width(q, k, v, scoring, mask=mask, implementation="xla")


def softmax_weights(
    q: Queries,
    k: Keys,
    mask: Bool[Array, "b 1 s t"],
    scoring: Scoring,
    sinks: Sinks,
) -> Float[Array, "b kv group s t"]:
    """Return the float32 weights of keys for each query; with sinks they sum to less than 1."""
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = jnp.einsum("bskgh,btkh->bkgst", grouped, k, preferred_element_type=jnp.float32)
    return _weights_of_scores(scores, q.shape[3], mask, scoring, sinks)


def cached_attention(
    q: Queries,
    k: Float[Array, "b kv t h"],
    v: Float[Array, "b kv t hv"],
    mask: Bool[Array, "b 1 s t"],
    scoring: Scoring = PLAIN,
    sinks: Sinks = None,
) -> Output:
    """Attend with any mask to the keys and values of a cache."""
    grouped = q.reshape(*q.shape[:2], k.shape[1], -1, q.shape[3])
    scores = jnp.einsum(
        "bskgh,bkth->bkgst", grouped, k,
        preferred_element_type=jnp.promote_types(jnp.float32, q.dtype),
    )  # fmt: skip
    weights = _weights_of_scores(scores, q.shape[3], mask, scoring, sinks)
    output = jnp.einsum("bkgst,bkth->bskgh", weights.astype(v.dtype), v)
    return output.reshape(*q.shape[:3], v.shape[3])


def _weights_of_scores(
    scores: Float[Array, "b kv group s t"],
    head_size: int,
    mask: Bool[Array, "b 1 s t"],
    scoring: Scoring,
    sinks: Sinks,
) -> Float[Array, "b kv group s t"]:
    capped = scoring.capped(scores * scoring.scale_of(head_size))
    seen = jnp.where(mask[:, :, None], capped, -jnp.inf)
    if sinks is not None:  # one more key
        column = sinks.reshape(scores.shape[1], -1, 1, 1).astype(seen.dtype)
        column = jnp.broadcast_to(column, (*seen.shape[:-1], 1))
        seen = jnp.concatenate([seen, column], axis=-1)
    return jax.nn.softmax(seen, axis=-1)[..., : scores.shape[-1]]


def _dot_product(
    q: Queries,
    k: Keys,
    v: Values,
    segment_ids: SegmentIds,
    window: int | None,
    implementation: Literal["xla", "cudnn"],
    scoring: Scoring,
) -> Output:
    same = None if segment_ids is None else _same_document(segment_ids)
    back = None if window is None else (window - 1, 0)
    return _at_one_width(
        q, k, v, scoring, mask=same, is_causal=True, local_window_size=back,
        implementation=implementation,
    )  # fmt: skip


def _at_one_width(q: Queries, k: Keys, v: Values, scoring: Scoring, **options: Any) -> Output:  # noqa: ANN401
    """Attend by JAX's function, which requires queries, keys and values of the same width."""
    head, value = q.shape[3], v.shape[3]
    if head == value:
        return jax.nn.dot_product_attention(q, k, v, scale=scoring.scale, **options)
    # Zeros change no score, and their columns of the result are cut off.
    width = max(head, value)
    q, k, v = (jnp.pad(x, ((0, 0),) * 3 + ((0, width - x.shape[3]),)) for x in (q, k, v))
    scale = scoring.scale_of(head)
    return jax.nn.dot_product_attention(q, k, v, scale=scale, **options)[..., :value]


def _same_document(segment_ids: Int[Array, "b s"]) -> Bool[Array, "b 1 s s"]:
    return (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
