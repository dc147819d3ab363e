"""Attention of some queries over a part of the keys, with partial results that can be merged.

A partial result is the softmax-weighted mean o of the part's values and the logsumexp of its
scores. Two parts are merged by

    lse = log(e^lse_1 + e^lse_2)        o = e^(lse_1 - lse) o_1 + e^(lse_2 - lse) o_2

(FlashAttention, arXiv:2205.14135, section 3.1). The gradient of a part needs lse and the row sums
δ = Σ o · d_o of the merged result only. So gradients of parts are summed.

Scores exist for one tile of queries and one tile of keys at a time. A tile is skipped if causality,
the window or packed documents make all of it invisible.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxforge.kernels import masking
from jaxforge.kernels.flash_blocks import AFTER, BEFORE, TokenPositions
from jaxforge.kernels.on_first_use import on_first_use
from jaxforge.kernels.scoring import Scoring, product

_TILE = 512  # tokens of queries, and of keys, whose scores exist at a time


class QueryPart(NamedTuple):
    """Queries of some tokens.

    Attributes:
        q: queries.
        tokens: positions and documents of the queries.
    """

    q: Float[Array, "b s heads h"]
    tokens: TokenPositions


class KeyPart(NamedTuple):
    """Keys and values of some tokens.

    Attributes:
        k: keys.
        v: values.
        tokens: positions and documents of the keys.
    """

    k: Float[Array, "b t kv h"]
    v: Float[Array, "b t kv h"]
    tokens: TokenPositions


class PartialResult(NamedTuple):
    """Partial attention result over some of the keys, float32.

    Attributes:
        o: mean of the values, weighted by the softmax over these keys; 0 if no key is visible.
        lse: logsumexp of the scores of these keys; -inf if no key is visible.
    """

    o: Float[Array, "b s heads h"]
    lse: Float[Array, "b s heads"]

    def merged(self, other: "PartialResult") -> "PartialResult":
        """Merge two partial results into the result over the keys of both."""
        lse = jnp.logaddexp(self.lse, other.lse)
        return PartialResult(self.scaled_to(lse) + other.scaled_to(lse), lse)

    def scaled_to(self, lse: Float[Array, "b s heads"]) -> Float[Array, "b s heads h"]:
        """Return the contribution of this part to a result whose logsumexp is `lse`."""
        return self.o * jnp.exp(self.lse - _finite(lse))[..., None]


class Gradients(NamedTuple):
    """Gradients of a partial result, float32."""

    q: Float[Array, "b s heads h"]
    k: Float[Array, "b t kv h"]
    v: Float[Array, "b t kv h"]


class BackwardInputs(NamedTuple):
    """Per-query inputs of the backward pass over all keys, float32.

    Attributes:
        d_o: gradient of the merged result.
        lse: logsumexp of the scores of all keys.
        delta: Σ o · d_o over the width of each head, δ.
    """

    d_o: Float[Array, "b s heads h"]
    lse: Float[Array, "b s heads"]
    delta: Float[Array, "b s heads"]


Window = Int[Array, ""] | None
"""Number of last tokens that a query sees, itself included; None: all."""


def attend_to_part(
    queries: QueryPart, keys: KeyPart, scoring: Scoring, window: Window
) -> PartialResult:
    """Compute the attention of queries over a part of the keys, in plain XLA.

    A query sees the keys at or before its position, in its document and window.

    Args:
        queries: queries and their positions.
        keys: keys, values and their positions.
        scoring: transformation of the products of queries and keys.
        window: number of last positions that a query sees, its own included; None: all.
    """
    # Loop nest: map over query tiles, scan over key tiles, online softmax in the carry.
    #
    #              key tile 0    1    2    3
    # query tile 0      causal   -    -    -       -  skipped: no query may see any key
    # query tile 1      full   causal -    -       full / causal: computed, masked where needed
    # query tile 2      full   full causal -
    #
    # Padding positions: AFTER everything for keys (invisible), BEFORE everything for queries
    # (blind).
    queries = _block_hoisting(queries)
    key_tiles = _split_tiles(keys, AFTER)

    def attend_query_tile(tile: QueryPart) -> PartialResult:
        def merge_key_tile(part: PartialResult, keys: KeyPart) -> tuple[PartialResult, None]:
            def merged() -> PartialResult:
                scores, _ = _scores(tile, keys, scoring, window)
                lse = jax.nn.logsumexp(scores, axis=-1)
                # Rows without a visible key have lse = -inf. Subtracting 0 gives exp(-inf) = 0
                # instead of exp(-inf + inf) = NaN.
                weights = jnp.exp(scores - _finite(lse)[..., None])
                o = product("bkgst,btkh->bskgh", weights.astype(keys.v.dtype), keys.v)
                o = o.reshape(tile.q.shape)
                lse = lse.reshape(lse.shape[0], -1, lse.shape[-1]).swapaxes(1, 2)
                return part.merged(PartialResult(o, lse))

            return jax.lax.cond(_any_visible(tile, keys, window), merged, lambda: part), None

        # The neutral element of `PartialResult.merged`: weight e^-inf = 0.
        o = jnp.zeros(tile.q.shape, jnp.float32)
        return jax.lax.scan(merge_key_tile, PartialResult(o, o[..., 0] - jnp.inf), key_tiles)[0]

    parts = jax.lax.map(attend_query_tile, _split_tiles(queries, BEFORE))
    return _join_tiles(parts, queries.q.shape[1])


def gradients_of_part(
    queries: QueryPart,
    backward_inputs: BackwardInputs,
    keys: KeyPart,
    scoring: Scoring,
    window: Window,
) -> Gradients:
    """Compute the gradients of attention over a part of the keys, in plain XLA.

    Args:
        queries: queries and their positions.
        backward_inputs: gradient and statistics of the result over all keys.
        keys: keys, values and their positions.
        scoring: transformation of the products of queries and keys.
        window: number of last positions that a query sees, its own included; None: all.
    """
    queries = _block_hoisting(queries)
    key_tiles = _split_tiles(keys, AFTER)

    def add_tile(sums: tuple[Array, Array], tile: tuple[QueryPart, BackwardInputs]) -> Any:  # noqa: ANN401
        def add_key_tile(d_q: Array, keys: KeyPart) -> tuple[Array, tuple[Array, Array]]:
            def compute() -> Gradients:
                return _gradients_of_tile(*tile, keys, scoring, window)

            def skip() -> Gradients:
                zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), keys[:2])
                return Gradients(jnp.zeros_like(d_q), *zeros)

            grads = jax.lax.cond(_any_visible(tile[0], keys, window), compute, skip)
            return d_q + grads.q, (grads.k, grads.v)

        # Gradients of queries add up over key tiles (carry of the inner scan), those of keys over
        # query tiles (carry of the outer scan).
        d_q, d_key_tiles = jax.lax.scan(add_key_tile, jnp.zeros_like(tile[1].d_o), key_tiles)
        return jax.tree.map(jnp.add, sums, d_key_tiles), d_q

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), key_tiles[:2])
    tiles = _split_tiles(queries, BEFORE), _split_tiles(backward_inputs, 0)
    (d_k, d_v), d_q = jax.lax.scan(add_tile, zeros, tiles)
    length = keys.k.shape[1]
    return Gradients(
        _join_tiles(d_q, queries.q.shape[1]), _join_tiles(d_k, length), _join_tiles(d_v, length)
    )


def _block_hoisting(queries: QueryPart) -> QueryPart:
    """Return the queries behind a barrier, which ties their positions to the loop over layers.

    Differentiation of `lax.scan` moves computations that do not depend on the layer out of the loop
    over layers. Masks depend on positions only: those of all tiles would be computed at once, and
    held in memory. Behind the barrier, positions depend on the queries of the layer.
    """
    return jax.lax.optimization_barrier(queries)


_flash_forward = on_first_use("flash", "forward")
_flash_backward = on_first_use("flash", "backward")


def _attend_by_flash(
    queries: QueryPart, keys: KeyPart, scoring: Scoring, window: Window
) -> PartialResult:
    # float32: the caller merges partial results, and rounds only once.
    o, lse = _flash_forward(
        queries.q, keys.k, keys.v, queries.tokens, keys.tokens, window, scoring, dtype=jnp.float32
    )  # fmt: skip
    return PartialResult(o, lse.swapaxes(1, 2))


def _gradients_by_flash(
    queries: QueryPart,
    backward_inputs: BackwardInputs,
    keys: KeyPart,
    scoring: Scoring,
    window: Window,
) -> Gradients:
    lse, delta = (x.swapaxes(1, 2) for x in (backward_inputs.lse, backward_inputs.delta))
    grads = _flash_backward(
        queries.q, keys.k, keys.v, queries.tokens, keys.tokens, lse, delta, backward_inputs.d_o,
        window, scoring, dtype=jnp.float32,
    )  # fmt: skip
    return Gradients(*grads)


class PartialKernel(NamedTuple):
    """Implementation of `attend_to_part` and `gradients_of_part`."""

    attend: Callable[[QueryPart, KeyPart, Scoring, Window], PartialResult]
    gradients: Callable[[QueryPart, BackwardInputs, KeyPart, Scoring, Window], Gradients]


PARTIAL_KERNELS = {
    "tiles": PartialKernel(attend_to_part, gradients_of_part),
    "triton": PartialKernel(_attend_by_flash, _gradients_by_flash),
}
"""Implementations by name: "tiles" in plain XLA for any platform; "triton" for GPUs."""

T = TypeVar("T")


def _split_tiles(arrays: T, padding: int) -> T:
    """Split arrays [b, s, ...] into tiles [n, b, t, ...].

    The last tile is padded with `padding` in integer arrays (positions, documents), and with zeros
    in others.
    """
    length = jax.tree.leaves(arrays)[0].shape[1]
    size = min(length, _TILE)
    n = -(-length // size)

    def cut(x: Array) -> Array:
        fill = padding if jnp.issubdtype(x.dtype, jnp.integer) else 0
        widths = ((0, 0), (0, n * size - length), *((0, 0),) * (x.ndim - 2))
        x = jnp.pad(x, widths, constant_values=fill)
        return x.reshape(x.shape[0], n, size, *x.shape[2:]).swapaxes(0, 1)

    return jax.tree.map(cut, arrays)


def _join_tiles(tiles: T, length: int) -> T:
    """Undo `_split_tiles` for arrays of `length` tokens."""

    def join(x: Array) -> Array:
        x = x.swapaxes(0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]

    return jax.tree.map(join, tiles)


def _any_visible(queries: QueryPart, keys: KeyPart, window: Window) -> Bool[Array, ""]:
    """Return whether any query may see any key, from the extreme positions of each row."""
    q, k = queries.tokens, keys.tokens
    (first_q, last_q), (first_k, last_k) = _range(q.positions), _range(k.positions)
    # Conservative interval tests on each row: false only if provably nothing is visible. Ranges of
    # document ids that are disjoint share no document.
    is_visible = first_k <= last_q
    if window is not None:
        is_visible &= first_q - last_k < window
    if q.documents is not None and k.documents is not None:
        (first_q, last_q), (first_k, last_k) = _range(q.documents), _range(k.documents)
        is_visible &= (first_k <= last_q) & (first_q <= last_k)
    return jnp.any(is_visible)


def _range(x_BS: Int[Array, "b s"]) -> tuple[Int[Array, "b"], Int[Array, "b"]]:
    return jnp.min(x_BS, axis=1), jnp.max(x_BS, axis=1)


def _scores(
    queries: QueryPart, keys: KeyPart, scoring: Scoring, window: Window
) -> tuple[Float[Array, "b kv g s t"], Float[Array, "b s kv g h"]]:
    """Return the scores, -inf for invisible keys, and the queries grouped by key head."""
    batch, length, _, h = queries.q.shape
    q = queries.q.reshape(batch, length, keys.k.shape[2], -1, h)
    products = product("bskgh,btkh->bkgst", q, keys.k)
    capped = scoring.capped(products * scoring.scale_of(h))
    at_q, at_k = queries.tokens, keys.tokens
    is_visible = masking.visible(at_q.positions[:, :, None], at_k.positions[:, None], window)
    if at_q.documents is not None and at_k.documents is not None:
        is_visible &= at_q.documents[:, :, None] == at_k.documents[:, None]
    return jnp.where(is_visible[:, None, None], capped, -jnp.inf), q


def _gradients_of_tile(
    queries: QueryPart,
    backward_inputs: BackwardInputs,
    keys: KeyPart,
    scoring: Scoring,
    window: Window,
) -> Gradients:
    scores, q = _scores(queries, keys, scoring, window)
    lse, delta = (  # [b, s, heads] -> [b, kv, g, s]
        x.swapaxes(1, 2).reshape(len(x), keys.k.shape[2], -1, x.shape[1])
        for x in (backward_inputs.lse, backward_inputs.delta)
    )
    # The backward pass of FlashAttention (arXiv:2205.14135, algorithm 4), with casts to the dtype
    # of the inputs before each product, and sums in float32:
    #
    #   P = exp(S - lse)    dV = Pᵀ dO    dP = dO Vᵀ    dS = P (dP - δ)    dQ = dS K    dK = dSᵀ Q
    weights = jnp.exp(scores - _finite(lse)[..., None])
    d_o = backward_inputs.d_o.reshape(q.shape).astype(keys.v.dtype)
    d_weights = product("bskgh,btkh->bkgst", d_o, keys.v)
    d_scores = scoring.score_gradients(scores, weights, d_weights, delta[..., None], q.shape[-1])
    d_scores, weights = d_scores.astype(q.dtype), weights.astype(q.dtype)
    return Gradients(
        product("bkgst,btkh->bskgh", d_scores, keys.k).reshape(queries.q.shape),
        product("bkgst,bskgh->btkh", d_scores, q),
        product("bkgst,bskgh->btkh", weights, d_o),
    )


def _finite(lse: Array) -> Array:
    """Replace -inf, the logsumexp of rows without a visible key, by 0."""
    return jnp.where(jnp.isneginf(lse), 0.0, lse)
