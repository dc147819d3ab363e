"""Causal attention by blocks of queries in plain XLA, without an S x S array of scores.

A block of queries is multiplied only with the keys up to its own end, and with a sliding window or
a chunk only with the keys that it can see. Memory is [block, S], and few invisible scores are
computed. The backward pass recomputes the scores from the saved logsumexp (Dao et al. 2022,
FlashAttention, arXiv:2205.14135, algorithm 4):

    P  = exp(Q Kᵀ/√h - lse)      dV = Pᵀ dO       δ  = rowsum(dO ∘ O)
    dS = P ∘ (dO Vᵀ - δ)/√h      dQ = dS K        dK = dSᵀ Q

For capped scores s = c tanh(Q Kᵀ/(c √h)), dS has the further factor 1 - (s/c)². A sink is the score
of an extra key with value 0. It is part of lse, and its gradient is -Σ exp(sink - lse) δ.

Query heads that share a key head are folded into rows, so that keys are not repeated:

    q  [B, S, K·G, h]  ->  [B, K, R, h]     R = S·G; query i of head g is row i·G + g
    k  [B, S, K, h]    ->  [B, K, S, h]     the same for v, of any width

Blocks of queries and their keys (x) of one sequence; a window w starts keys later:

    causal                    window
    block 0   x . . .         x . . .
    block 1   x x . .         x x . .       the loop over blocks is unrolled, because each block
    block 2   x x x .         . x x .       has another static number of keys
    block 3   x x x x         . . x x
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxforge.kernels import masking
from jaxforge.kernels.scoring import PLAIN, Scoring, product

_BLOCKS = 8  # blocks of a sequence; of causal scores, only diagonal blocks are partly masked
_SMALLEST = 32  # queries of a block: smaller products are not fast

SegmentIds = Int[Array, "b s"] | None
Reach = Int[Array, ""] | None
Sinks = Float[Array, "heads"] | None


class _Inputs(NamedTuple):
    """Inputs of attention, or their gradients."""

    q: Float[Array, "b s heads h"]
    k: Float[Array, "b s kv h"]
    v: Float[Array, "b s kv hv"]
    segment_ids: SegmentIds
    reach: Reach
    sinks: Sinks


class _Static(NamedTuple):
    """Compile-time constants of the kernel."""

    window: int | None
    chunk: int | None
    scoring: Scoring


class _Folded(NamedTuple):
    """Folded queries [b, kv, R, h], keys and values [b, kv, s, width].

    Sinks are those of rows, [kv, R, 1].
    """

    q: Array
    k: Array
    v: Array
    sinks: Array | None


def blockwise_attention(
    q_BSHh: Float[Array, "b s heads h"],
    k_BSKh: Float[Array, "b s kv h"],
    v_BSKh: Float[Array, "b s kv hv"],
    segment_ids: SegmentIds,
    window: int | None = None,
    chunk: int | None = None,
    reach: Reach = None,
    scoring: Scoring = PLAIN,
    sinks: Sinks = None,
) -> Float[Array, "b s heads hv"]:
    """Compute softmax(q kᵀ / √h) v over visible keys: earlier, same document, window and chunk.

    `reach` is a window that is an array: keys outside of it are masked, but not skipped. `sinks`
    are extra logits that join the scores of each query and take a part of the weight.
    """
    inputs = _Inputs(q_BSHh, k_BSKh, v_BSKh, segment_ids, reach, sinks)
    return _attention(_Static(window, chunk, scoring), inputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static: _Static, inputs: _Inputs) -> Array:
    return _attend(static, inputs)[0]


def _attend(static: _Static, inputs: _Inputs) -> tuple[Array, tuple[_Inputs, Array, list[Array]]]:
    q, k, v, *_ = inputs
    scoring, folded = static.scoring, _fold_all(inputs)
    outputs, lses = [], []
    for block in _blocks(static, inputs):
        scores = product("bkrh,bkth->bkrt", folded.q[:, :, block.rows], folded.k[:, :, block.keys])
        scores = scoring.capped(scores * scoring.scale_of(q.shape[-1]))
        scores = jnp.where(block.visible, scores, -jnp.inf)
        # Every query sees itself, so `top` is finite. A block has all visible keys at once: there
        # is no running maximum to rescale.
        top = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - top)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        if folded.sinks is not None:
            # If the exponential overflows, total is inf, and keys get weight 0.
            total += jnp.exp(folded.sinks[:, block.rows] - top)
        output = product("bkrt,bkth->bkrh", weights.astype(v.dtype), folded.v[:, :, block.keys])
        outputs.append((output / total).astype(v.dtype))
        lses.append(top + jnp.log(total))
    shape = (*q.shape[:3], v.shape[3])
    output = _unfold_queries(jnp.concatenate(outputs, axis=2), k.shape[2], shape)
    return output, (inputs, output, lses)


def _differentiate(
    static: _Static, saved: tuple[_Inputs, Array, list[Array]], d_output: Array
) -> tuple[_Inputs]:
    inputs, output, lses = saved
    q, k, *_ = inputs
    kv_heads, dtype = k.shape[2], q.dtype
    folded, d_out = _fold_all(inputs), _fold_queries(d_output, kv_heads)
    # δ = rowsum(dO ∘ O), in float32 like dO Vᵀ, from which it is subtracted below.
    products = d_output.astype(jnp.float32) * output.astype(jnp.float32)
    delta = jnp.sum(_fold_queries(products, kv_heads), axis=-1, keepdims=True)
    d_queries, d_keys, d_values = [], [], []
    # The same blocks as in the forward pass: scores are recomputed, and lse turns them into weights
    # without another maximum or sum.
    for block, lse in zip(_blocks(static, inputs), lses, strict=True):
        queries, d_out_block = folded.q[:, :, block.rows], d_out[:, :, block.rows]
        keys, values = folded.k[:, :, block.keys], folded.v[:, :, block.keys]
        scores = product("bkrh,bkth->bkrt", queries, keys)
        scores = static.scoring.capped(scores * static.scoring.scale_of(q.shape[-1]))
        # Masked before exp, as above: XLA:CPU does not fuse a select behind exp with its uses.
        weights = jnp.exp(jnp.where(block.visible, scores, -jnp.inf) - lse)
        d_weights = product("bkrh,bkth->bkrt", d_out_block, values)
        d_scores = static.scoring.score_gradients(
            scores, weights, d_weights, delta[:, :, block.rows], q.shape[-1]
        ).astype(dtype)
        d_queries.append(product("bkrt,bkth->bkrh", d_scores, keys))
        # A key is seen by several blocks: its float32 gradients are padded to [.., S, ..] and
        # summed below, and rounded once.
        other_keys = (block.keys.start, k.shape[1] - block.keys.stop)
        padding = ((0, 0), (0, 0), other_keys, (0, 0))
        d_keys.append(jnp.pad(product("bkrt,bkrh->bkth", d_scores, queries), padding))
        d_value = product("bkrt,bkrh->bkth", weights.astype(dtype), d_out_block)
        d_values.append(jnp.pad(d_value, padding))
    d_query = jnp.concatenate(d_queries, axis=2)
    gradients = _Inputs(
        _unfold_queries(d_query.astype(dtype), kv_heads, q.shape),
        functools.reduce(jnp.add, d_keys).astype(dtype).swapaxes(1, 2),
        functools.reduce(jnp.add, d_values).astype(dtype).swapaxes(1, 2),
        None,
        None,
        _sink_gradients(inputs.sinks, folded, lses, delta, q.shape[1]),
    )
    return (gradients,)


def _sink_gradients(
    sinks: Sinks, folded: _Folded, lses: list[Array], delta: Array, length: int
) -> Sinks:
    """Return the gradient of the sinks: each row's δ times the sink's weight, summed over rows."""
    if sinks is None or folded.sinks is None:
        return None
    of_rows = jnp.exp(folded.sinks - jnp.concatenate(lses, axis=2)) * delta
    of_heads = of_rows.reshape(*of_rows.shape[:2], length, -1)
    return -jnp.sum(of_heads, axis=(0, 2)).reshape(sinks.shape).astype(sinks.dtype)


_attention.defvjp(_attend, _differentiate)


class _Block(NamedTuple):
    """A block of queries: folded rows, range of keys, and mask of visible pairs."""

    rows: slice
    keys: slice
    visible: Array


def _blocks(static: _Static, inputs: _Inputs) -> Iterator[_Block]:
    q, k, _, segment_ids, reach, *_ = inputs
    window, chunk, _ = static
    length, kv_heads = q.shape[1], k.shape[2]
    group = q.shape[2] // kv_heads
    size = max(_SMALLEST, -(-length // _BLOCKS))
    for start in range(0, length, size):
        end = min(start + size, length)
        # The first key that the first query of the block sees; later queries see no earlier one.
        first = 0 if window is None else max(0, start - window + 1)
        first = first if chunk is None else max(first, start // chunk * chunk)
        queries, keys = jnp.arange(start, end)[:, None], jnp.arange(first, end)
        visible = masking.visible(queries, keys, window if reach is None else reach, chunk)
        if segment_ids is not None:
            same = segment_ids[:, start:end, None] == segment_ids[:, None, first:end]
            visible = (visible & same)[:, None]
        visible = jnp.repeat(visible, group, axis=-2)  # rows of a query are adjacent
        yield _Block(slice(start * group, end * group), slice(first, end), visible)


def _fold_all(inputs: _Inputs) -> _Folded:
    q, k, v, _, _, sinks = inputs
    kv_heads = k.shape[2]
    if sinks is not None:
        # Row i·G + g belongs to head g of its group: sinks of the G heads repeat for every query.
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
