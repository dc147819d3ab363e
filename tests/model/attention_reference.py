"""Random heads and documents, and a naive reference of attention."""

import jax.numpy as jnp
import numpy as np

from jaxforge.kernels.scoring import PLAIN


def naive_attention(q, k, v, allowed, scoring=PLAIN):
    """Attend query by query in float64; heads of a group share keys."""
    scale, cap = scoring.scale or q.shape[-1] ** -0.5, scoring.softcap
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    out = np.zeros_like(q)
    group = q.shape[2] // k.shape[2]
    for b, i, head in np.ndindex(*q.shape[:3]):
        keys, values = k[b, :, head // group], v[b, :, head // group]
        seen = allowed[b, i]
        scores = keys[seen] @ q[b, i, head] * scale
        scores = cap * np.tanh(scores / cap) if cap else scores
        weights = np.exp(scores - scores.max())
        out[b, i, head] = weights / weights.sum() @ values[seen]
    return out


def allowed_keys(length, segment_ids=None, window=None, batch=2, chunk=None):
    back = np.arange(length)[:, None] - np.arange(length)
    allowed = (back >= 0) & (back < (window or length))
    if chunk is not None:
        allowed &= np.arange(length)[:, None] // chunk == np.arange(length) // chunk
    allowed = np.broadcast_to(allowed, (batch, length, length))
    return (
        allowed
        if segment_ids is None
        else allowed & (segment_ids[:, :, None] == segment_ids[:, None])
    )


def random_heads(length, kv_heads, *, n_queries=None, scale=1.0, h=8, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    kv = (2, length, kv_heads, h)
    shapes = [(2, n_queries or length, 6, h), kv, kv]
    return [jnp.asarray(scale * rng.standard_normal(shape), dtype) for shape in shapes]


def random_documents(length):
    return np.sort(np.random.default_rng(1).integers(0, 5, (2, length)), axis=1).astype(np.int32)
