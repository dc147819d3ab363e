"""Causal attention by blocks of queries, in plain XLA: no S x S array of scores, no wasted half.

A block of queries meets only the keys up to its own end, and of a sliding window or a chunk only
those that it reaches, so that memory is [block, S] and what nobody sees is hardly computed. The
backward pass recomputes the scores from the saved logsumexp (Dao et al. 2022, FlashAttention,
arXiv:2205.14135, algorithm 4):

    P  = exp(Q Kᵀ/√h - lse)      dV = Pᵀ dO       δ  = rowsum(dO ∘ O)
    dS = P ∘ (dO Vᵀ - δ)/√h      dQ = dS K        dK = dSᵀ Q

Of capped scores s = c tanh(Q Kᵀ/(c √h)), dS has the factor 1 - (s/c)² as well. A sink is one more
score, of a key whose value is 0: it is in lse, and has the gradient -Σ exp(sink - lse) δ.

Query heads that share a key head are folded into its rows: one product each, nothing repeated.
R: rows of a block, which are queries x heads per key head.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxforge.kernels import masking
from jaxforge.kernels.scoring import PLAIN, Scoring, soft_cap_slope

_BLOCKS = 8  # blocks a sequence: of what is computed, a sixteenth is masked
_SMALLEST = 32  # queries: below it, products are too small to be fast

SegmentIds = Int[Array, "b s"] | None
Reach = Int[Array, ""] | None
Sinks = Float[Array, "heads"] | None


class _Folded(NamedTuple):
    """Queries [b, kv, R, h]; keys and values [b, kv, s, h]; the sinks of rows [kv, R, 1]."""

    q: Array
    k: Array
    v: Array
    sinks: Array | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 7))
def blockwise_attention(
    q_BSHh: Float[Array, "b s heads h"],
    k_BSKh: Float[Array, "b s kv h"],
    v_BSKh: Float[Array, "b s kv h"],
    segment_ids: SegmentIds,
    window: int | None = None,
    chunk: int | None = None,
    reach: Reach = None,
    scoring: Scoring = PLAIN,
    sinks: Sinks = None,
) -> Float[Array, "b s heads h"]:
    """softmax(q kᵀ / √h) v over the keys at or before each query, of its document, window, chunk.

    `reach` is a window that only the device knows: no key is left out for it, but masked. `sinks`
    are logits beside the scores of each query, and take weight from them.
    """
    return _forward(q_BSHh, k_BSKh, v_BSKh, segment_ids, window, chunk, reach, scoring, sinks)[0]


def _forward(
    q: Array,
    k: Array,
    v: Array,
    segment_ids: SegmentIds,
    window: int | None,
    chunk: int | None,
    reach: Reach,
    scoring: Scoring,
    sinks: Sinks,
) -> tuple[Array, tuple[Array, ...]]:
    kv_heads, scale = k.shape[2], scoring.scale_of(q.shape[-1])
    folded, outputs, lses = _fold_all(q, k, v, sinks), [], []
    for block in _blocks(q, k, segment_ids, window, chunk, reach):
        scores = _product("bkrh,bkth->bkrt", folded.q[:, :, block.rows], folded.k[:, :, block.keys])
        scores = jnp.where(block.visible, scoring.capped(scores * scale), -jnp.inf)
        top = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - top)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        if folded.sinks is not None:
            total += jnp.exp(folded.sinks[:, block.rows] - top)  # inf: nothing is left for keys
        output = _product("bkrt,bkth->bkrh", weights.astype(v.dtype), folded.v[:, :, block.keys])
        outputs.append((output / total).astype(v.dtype))
        lses.append(top + jnp.log(total))
    return _unfold_queries(jnp.concatenate(outputs, axis=2), kv_heads, q.shape), tuple(lses)


def _attend(
    q: Array,
    k: Array,
    v: Array,
    segment_ids: SegmentIds,
    window: int | None,
    chunk: int | None,
    reach: Reach,
    scoring: Scoring,
    sinks: Sinks,
) -> tuple[Array, tuple]:
    output, lses = _forward(q, k, v, segment_ids, window, chunk, reach, scoring, sinks)
    return output, (q, k, v, segment_ids, reach, sinks, output, lses)


def _differentiate(
    window: int | None, chunk: int | None, scoring: Scoring, saved: tuple, d_output: Array
) -> tuple[Array, Array, Array, None, None, Sinks]:
    q, k, v, segment_ids, reach, sinks, output, lses = saved
    kv_heads, dtype, scale = k.shape[2], q.dtype, scoring.scale_of(q.shape[-1])
    folded = _fold_all(q, k, v, sinks)
    d_out = _fold_queries(d_output, kv_heads)
    product = d_output.astype(jnp.float32) * output.astype(jnp.float32)
    delta = jnp.sum(_fold_queries(product, kv_heads), axis=-1, keepdims=True)
    d_queries, d_keys, d_values = [], [], []
    blocks = _blocks(q, k, segment_ids, window, chunk, reach)
    for block, lse in zip(blocks, lses, strict=True):
        queries, d_out_block = folded.q[:, :, block.rows], d_out[:, :, block.rows]
        keys, values = folded.k[:, :, block.keys], folded.v[:, :, block.keys]
        scores = scoring.capped(_product("bkrh,bkth->bkrt", queries, keys) * scale)
        weights = jnp.where(block.visible, jnp.exp(scores - lse), 0.0)
        d_weights = _product("bkrh,bkth->bkrt", d_out_block, values)
        d_scores = weights * (d_weights - delta[:, :, block.rows]) * scale
        if scoring.softcap is not None:
            d_scores *= soft_cap_slope(scores, scoring.softcap)
        d_scores = d_scores.astype(dtype)
        d_queries.append(_product("bkrt,bkth->bkrh", d_scores, keys))
        others = (block.keys.start, k.shape[1] - block.keys.stop)
        around = ((0, 0), (0, 0), others, (0, 0))
        d_keys.append(jnp.pad(_product("bkrt,bkrh->bkth", d_scores, queries), around))
        d_value = _product("bkrt,bkrh->bkth", weights.astype(dtype), d_out_block)
        d_values.append(jnp.pad(d_value, around))
    d_query = jnp.concatenate(d_queries, axis=2)
    return (
        _unfold_queries(d_query.astype(dtype), kv_heads, q.shape),
        _total(d_keys).astype(dtype).swapaxes(1, 2),
        _total(d_values).astype(dtype).swapaxes(1, 2),
        None,
        None,
        _sink_gradients(sinks, folded, lses, delta, q.shape[1]),
    )


def _sink_gradients(
    sinks: Sinks, folded: _Folded, lses: tuple[Array, ...], delta: Array, length: int
) -> Sinks:
    """What a sink takes of each row's δ, summed over the rows of its head."""
    if sinks is None or folded.sinks is None:
        return None
    taken = jnp.exp(folded.sinks - jnp.concatenate(lses, axis=2)) * delta
    of_heads = taken.reshape(*taken.shape[:2], length, -1)
    return -jnp.sum(of_heads, axis=(0, 2)).reshape(sinks.shape).astype(sinks.dtype)


blockwise_attention.defvjp(_attend, _differentiate)


def _total(parts: list[Array]) -> Array:
    return functools.reduce(jnp.add, parts)


class _Block(NamedTuple):
    """Some queries: their folded rows, the keys among which are those they see, and which."""

    rows: slice
    keys: slice
    visible: Array


def _blocks(
    q: Array,
    k: Array,
    segment_ids: SegmentIds,
    window: int | None,
    chunk: int | None,
    reach: Reach,
) -> Iterator[_Block]:
    length, kv_heads = q.shape[1], k.shape[2]
    group = q.shape[2] // kv_heads
    size = max(_SMALLEST, -(-length // _BLOCKS))
    for start in range(0, length, size):
        end = min(start + size, length)
        first = 0 if window is None else max(0, start - window + 1)
        first = first if chunk is None else max(first, start // chunk * chunk)
        queries, keys = jnp.arange(start, end)[:, None], jnp.arange(first, end)
        visible = masking.visible(queries, keys, window if reach is None else reach, chunk)
        if segment_ids is not None:
            same = segment_ids[:, start:end, None] == segment_ids[:, None, first:end]
            visible = (visible & same)[:, None]
        visible = jnp.repeat(visible, group, axis=-2)
        yield _Block(slice(start * group, end * group), slice(first, end), visible)


def _product(dimensions: str, left: Array, right: Array) -> Float[Array, "b kv _ _"]:
    """A batched product, accumulated in float32."""
    return jnp.einsum(dimensions, left, right, preferred_element_type=jnp.float32)


def _fold_all(q: Array, k: Array, v: Array, sinks: Sinks) -> _Folded:
    kv_heads = k.shape[2]
    if sinks is not None:
        sinks = jnp.tile(sinks.reshape(kv_heads, -1), (1, q.shape[1]))[..., None]
    return _Folded(_fold_queries(q, kv_heads), k.swapaxes(1, 2), v.swapaxes(1, 2), sinks)


def _fold_queries(x_BSHh: Array, kv_heads: int) -> Float[Array, "b kv r h"]:
    batch, length, heads, h = x_BSHh.shape
    x = x_BSHh.reshape(batch, length, kv_heads, heads // kv_heads, h)
    return x.swapaxes(1, 2).reshape(batch, kv_heads, -1, h)


def _unfold_queries(x: Float[Array, "b kv r h"], kv_heads: int, shape: tuple[int, ...]) -> Array:
    batch, length, heads, h = shape
    x = x.reshape(batch, kv_heads, length, heads // kv_heads, h)
    return x.swapaxes(1, 2).reshape(shape)
