"""Attention to the keys that an indexer selects (DeepSeek Sparse Attention, arXiv:2512.02556).

The indexer has heads j of its own, with one key for all of them. It scores each query s with each
key t that s sees, and s attends to its `top_k` keys of the largest scores:

    I_st = Σ_j w_sj · relu(q_sj · k_t)

The selection has no gradient. The indexer is trained to predict the weights p of attention,
averaged over heads, and p has no gradient in this loss:

    divergence of s = KL(p_s ‖ softmax I_s)         over the keys that s attends to

In the warm-up, queries attend to all keys that they see, and so does the divergence.

All scores of attention are computed, and those of other keys are masked. Queries are computed a few
at a time, as many as the number of keys allows, and once more in the backward pass: memory grows
with S and not with S².
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree, UInt32

from jaxforge.kernels.dot_product_attention import SegmentIds
from jaxforge.kernels.masking import visible
from jaxforge.kernels.scoring import Scoring, product
from jaxforge.parallel import collectives
from jaxforge.parallel.sharding import Axes, run_on_shares

_QUERIES, _SCORES = 128, 2**24
"""Queries that are computed at once, and the most scores of a device (64 MiB)."""
_PARTS = 4
"""Parts of a sequence, whose queries skip the keys of later parts: 5/8 of the pairs remain."""


class Index(NamedTuple):
    """Values of the indexer.

    Attributes:
        q: queries.
        weights: weights of the heads, float32, with all factors of the scores.
        k: keys, which all heads share.
    """

    q: Float[Array, "b s heads h"]
    weights: Float[Array, "b s heads"]
    k: Float[Array, "b t h"]


class Selection(NamedTuple):
    """Options of the selection.

    Attributes:
        top_k: number of keys that a query attends to.
        is_warm_up: whether queries attend to all keys that they see.
        measures: whether to compute the divergence and the share of weight.
    """

    top_k: int
    is_warm_up: bool
    measures: bool


class SparseOut(NamedTuple):
    """Results of attention.

    Attributes:
        y: outputs of the heads.
        divergence: KL(p ‖ softmax I) of each query, nats.
        coverage: share of the weight of attention to all keys that the selected keys have, averaged
            over heads; it has no gradient.
    """

    y: Float[Array, "b s heads hv"]
    divergence: Float[Array, "b s"] | None = None
    coverage: Float[Array, "b s"] | None = None


def sparse_attention(
    q: Float[Array, "b s heads h"],
    k: Float[Array, "b s heads h"],
    v: Float[Array, "b s heads hv"],
    index: Index,
    at: tuple[Int[Array, "b s"], SegmentIds],
    selection: Selection,
    scoring: Scoring,
) -> SparseOut:
    """Attend to selected keys on any mesh; devices gather the keys of sequences that they share.

    Args:
        q: queries.
        k: keys.
        v: values.
        index: values of the indexer.
        at: position of each token in its row, and its document in packed rows.
        selection: options of the selection.
        scoring: scale and soft cap of the scores.
    """

    def local(
        q: Array, k: Array, v: Array, index: tuple[Array, ...], index_k: Array,
        at: tuple[Int[Array, "b s"], SegmentIds],
    ) -> tuple[Array, ...]:  # fmt: skip
        return _attend((q, *index), (k, v, index_k), at, selection, scoring)

    heads: Axes = ("batch", "context", "heads", None)
    tokens = heads[:2]
    out = run_on_shares(
        local, (q, k, v, (index.q, index.weights[..., None]), index.k, at),
        (heads, heads, heads, heads, (*tokens, None), tokens),
        (heads, tokens, tokens) if selection.measures else (heads,),
    )  # fmt: skip
    return SparseOut(*out)


def _attend(
    queries: tuple[Array, ...],
    keys: tuple[Array, ...],
    at: tuple[Int[Array, "b s"], SegmentIds],
    selection: Selection,
    scoring: Scoring,
) -> tuple[Array, ...]:
    """Return the fields of `SparseOut` that the selection asks for."""
    dtype, (positions_BS, ids_BS) = queries[0].dtype, at
    ids_BS = jnp.zeros_like(positions_BS) if ids_BS is None else ids_BS
    # The gradients of a key come from all queries: they are summed in float32.
    of_keys = [collectives.gather_keys(x, "context", 1) for x in keys]
    of_keys = [x.astype(jnp.promote_types(dtype, jnp.float32)) for x in of_keys]
    of_keys += [collectives.all_gather(x, "context", 1) for x in (positions_BS, ids_BS)]
    attend = functools.partial(_attend_to_keys, selection, scoring)
    of_queries, length = (*queries, positions_BS, ids_BS), positions_BS.shape[1]
    is_split = collectives.axis_size("context") > 1
    if is_split or length < _PARTS * _QUERIES:
        return attend(of_queries, of_keys)
    # Queries see no later keys.
    bounds = [length * i // _PARTS for i in range(_PARTS + 1)]
    parts = (
        attend([x[:, first:end] for x in of_queries], [x[:, :end] for x in of_keys])
        for first, end in itertools.pairwise(bounds)
    )
    return tuple(jnp.concatenate(results, axis=1) for results in zip(*parts, strict=True))


def _attend_to_keys(
    selection: Selection, scoring: Scoring, queries: Sequence[Array], keys: Sequence[Array]
) -> tuple[Array, ...]:
    """Attend with a part of the queries.

    Args:
        selection: options of the selection.
        scoring: scale and soft cap of the scores.
        queries: queries, those of the indexer, its weights, positions and documents [b, s, ...].
        keys: keys and values, keys of the indexer, positions and documents [b, t, ...].
    """
    dtype, local_heads = queries[0].dtype, queries[0].shape[2]
    heads = local_heads * collectives.axis_size("heads")
    positions_BT, ids_BT = keys[3:]

    def of_query(row: tuple[Array, ...]) -> tuple[Array, ...]:
        q_BHh, index_q, index_weights, position_B, id_B = row
        k_BTHh, v_BTHh, index_k = (x.astype(dtype) for x in keys[:3])
        seen_BT = visible(position_B[:, None], positions_BT) & (id_B[:, None] == ids_BT)
        index_BT = _index_scores(index_q, index_weights, index_k)
        chosen_BT = _choose(index_BT, seen_BT, selection.top_k)
        attended_BT = seen_BT if selection.is_warm_up else chosen_BT
        scores = product("bhi,bthi->bht", q_BHh, k_BTHh)
        scores = scoring.capped(scores * scoring.scale_of(q_BHh.shape[-1]))
        weights = jax.nn.softmax(jnp.where(attended_BT[:, None], scores, -jnp.inf), axis=-1)
        y_BHh = jnp.einsum("bht,bthv->bhv", weights.astype(dtype), v_BTHh)
        if not selection.measures:
            return (y_BHh,)
        weights, scores = jax.lax.stop_gradient((weights, scores))
        mean_BT = collectives.psum(jnp.sum(weights, axis=1), "heads") / heads
        coverage_BH = _coverage(scores, chosen_BT[:, None], seen_BT[:, None])
        coverage_B = collectives.psum(jnp.sum(coverage_BH, axis=1), "heads") / heads
        return y_BHh, _divergence(mean_BT, index_BT, attended_BT), coverage_B

    # Blocks of queries are steps of a loop, from which XLA cannot move what they compute again.
    of_query = jax.checkpoint(of_query, prevent_cse=False)
    most_heads = max(local_heads, queries[1].shape[2])
    results: tuple[Array, ...] = _map_queries(of_query, queries, most_heads * positions_BT.size)
    return results


def _coverage(
    scores: Float[Array, "b heads t"], chosen: Bool[Array, "b 1 t"], seen: Bool[Array, "b 1 t"]
) -> Float[Array, "b heads"]:
    """Return the share of the softmax over the seen keys that the chosen ones have."""
    # With the largest chosen score as reference, large scores of other keys give inf: share 0.
    top = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf, where=chosen)
    of_chosen, of_seen = (
        jnp.sum(jnp.exp(jnp.where(mask, scores, -jnp.inf) - top), axis=-1)
        for mask in (chosen, seen)
    )
    return of_chosen / of_seen


def _map_queries(
    of_query: Callable[[tuple[Array, ...]], PyTree], rows: Sequence[Array], scores: int
) -> PyTree:
    """Map a function over the tokens of arrays [b, s, ...].

    Args:
        of_query: function of the values of a query in all rows of the batch.
        rows: values of the queries.
        scores: number of scores of a query.
    """
    at_once = max(1, min(_QUERIES, rows[0].shape[1], _SCORES // scores))
    results = jax.lax.map(of_query, tuple(jnp.moveaxis(x, 1, 0) for x in rows), batch_size=at_once)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), results)


def _index_scores(
    q: Float[Array, "b heads h"], weights: Float[Array, "b heads 1"], k: Float[Array, "b t h"]
) -> Float[Array, "b t"]:
    products = jax.nn.relu(product("bji,bti->bjt", q, k))
    return collectives.psum(jnp.sum(weights * products, axis=1), "heads")


def _choose(
    scores: Float[Array, "b t"], seen: Bool[Array, "b t"], top_k: int
) -> Bool[Array, "b t"]:
    return seen & select_largest(jnp.where(seen, scores, -jnp.inf), top_k)


def choose_cached(index: Index, seen: Bool[Array, "b s t"], top_k: int) -> Bool[Array, "b s t"]:
    """Return which keys of a cache the queries attend to.

    Args:
        index: values of the indexer; the keys are those of the cache.
        seen: keys that each query sees.
        top_k: number of keys that a query attends to.
    """

    def of_query(row: tuple[Array, ...]) -> Bool[Array, "b t"]:
        index_q, index_weights, seen_BT = row
        return _choose(_index_scores(index_q, index_weights, index.k), seen_BT, top_k)

    batch, _, heads, _ = index.q.shape
    scores = batch * heads * seen.shape[2]
    chosen: Array = _map_queries(of_query, (index.q, index.weights[..., None], seen), scores)
    return chosen


def pick_cached(index: Index, seen: Bool[Array, "b 1 t"], top_k: int) -> Int[Array, "b k"]:
    """Return the keys of a cache that single queries attend to; some may be invisible."""
    scores_BT = _index_scores(index.q[:, 0], index.weights[:, 0, :, None], index.k)
    return jax.lax.top_k(jnp.where(seen[:, 0], scores_BT, -jnp.inf), top_k)[1]


def _divergence(
    p: Float[Array, "b t"], scores: Float[Array, "b t"], mask: Bool[Array, "b t"]
) -> Float[Array, "b"]:
    """Return KL(p ‖ softmax of the scores under a mask); the weights p sum to 1."""
    log_total = jax.nn.logsumexp(scores, axis=-1, where=mask)
    expected = jnp.sum(p * jnp.where(mask, scores, 0), axis=-1)
    return log_total - expected - jnp.sum(jax.scipy.special.entr(p), axis=-1)


def select_largest(scores: Float[Array, "*b t"], k: int) -> Bool[Array, "*b t"]:
    """Return whether each score is among the k largest; of equal ones, the first are chosen.

    The k-th largest is found bit by bit: a sort would take longer than the scores.
    """
    if k >= scores.shape[-1]:
        return jnp.ones_like(scores, bool)
    keys = _ordered_bits(jax.lax.stop_gradient(scores))

    def add_bit(i: Int[Array, ""], least: UInt32[Array, "*b 1"]) -> UInt32[Array, "*b 1"]:
        higher = least | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        enough = jnp.sum(keys >= higher, axis=-1, keepdims=True, dtype=jnp.int32) >= k
        return jnp.where(enough, higher, least)

    least = jnp.zeros((*scores.shape[:-1], 1), jnp.uint32)
    least = jax.lax.fori_loop(0, 32, add_bit, least)  # the k-th largest
    is_larger, is_equal = keys > least, keys == least
    room = k - jnp.sum(is_larger, axis=-1, keepdims=True, dtype=jnp.int32)
    return is_larger | (is_equal & (jnp.cumsum(is_equal, axis=-1, dtype=jnp.int32) <= room))


def _ordered_bits(x: Float[Array, "..."]) -> UInt32[Array, "..."]:
    """Return integers in the order of the float32 numbers."""
    x32 = x.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(jnp.where(x32 == 0, 0.0, x32), jnp.uint32)  # no -0
    is_negative = bits >> 31 == 1
    return jnp.where(is_negative, ~bits, bits | jnp.uint32(1 << 31))
