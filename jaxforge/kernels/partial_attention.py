"""Attention over a part of the keys, with results that can be merged over parts.

A partial result is the softmax-weighted mean o over its keys, and the logsumexp of its scores. Two
partial results are merged by

    lse = log(e^lse_1 + e^lse_2)        o = e^(lse_1 - lse) o_1 + e^(lse_2 - lse) o_2

(FlashAttention, arXiv:2205.14135, section 3.1). The gradients of a part depend on other parts only
by lse and the row sums δ = Σ o · d_o of the merged result, so that gradients of parts are summed.

Scores exist for one tile of queries and one tile of keys at a time. A tile is skipped if nothing in
it is visible, because of causality, a window, or packed documents.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxforge.kernels import masking
from jaxforge.kernels.flash_blocks import AFTER, BEFORE, TokenPositions
from jaxforge.kernels.on_first_use import on_first_use
from jaxforge.kernels.scoring import Scoring, product

TILE = 512  # queries, and keys, of a tile


class QueryPart(NamedTuple):
    """A part of the queries.

    Attributes:
        q: the queries.
        at: their positions and documents.
    """

    q: Float[Array, "b s heads h"]
    at: TokenPositions


class KeyPart(NamedTuple):
    """A part of the keys and values.

    Attributes:
        k: the keys.
        v: the values.
        at: their positions and documents.
    """

    k: Float[Array, "b t kv h"]
    v: Float[Array, "b t kv hv"]
    at: TokenPositions


class PartialResult(NamedTuple):
    """Partial attention result over some of the keys, float32.

    Attributes:
        o: mean of values, weighted by the softmax over these keys; 0 if no key is visible.
        lse: logsumexp of the scores; -inf if no key is visible.
    """

    o: Float[Array, "b s heads hv"]
    lse: Float[Array, "b s heads"]

    def merged(self, other: "PartialResult") -> "PartialResult":
        """Merge two partial results into the result over the keys of both."""
        lse = jnp.logaddexp(self.lse, other.lse)
        return PartialResult(self.scaled_to(lse) + other.scaled_to(lse), lse)

    def scaled_to(self, lse: Float[Array, "b s heads"]) -> Float[Array, "b s heads hv"]:
        """Return the contribution to the mean over more keys, whose logsumexp is `lse`."""
        return self.o * jnp.exp(self.lse - _finite(lse))[..., None]


class Gradients(NamedTuple):
    """Gradients of a partial result, float32."""

    q: Float[Array, "b s heads h"]
    k: Float[Array, "b t kv h"]
    v: Float[Array, "b t kv hv"]


class BackwardInputs(NamedTuple):
    """Per-query inputs of the backward pass over all keys, float32.

    Attributes:
        d_o: gradient of the merged result.
        lse: logsumexp of the scores over all keys.
        delta: Σ o · d_o over each head.
    """

    d_o: Float[Array, "b s heads hv"]
    lse: Float[Array, "b s heads"]
    delta: Float[Array, "b s heads"]


Window = Int[Array, ""] | None
"""Number of last tokens that a query sees, including itself; None: all."""


def attend_to_part(
    queries: QueryPart, keys: KeyPart, scoring: Scoring, window: Window
) -> PartialResult:
    """Attend to a part of the keys: those at or before each query, in its document.

    Args:
        queries: the queries.
        keys: the part of the keys.
        scoring: scale and soft cap of the scores.
        window: number of last tokens that a query sees.
    """
    # Loop nest: map over query tiles, scan over key tiles, online softmax in the carry.
    #
    #              key tile 0    1    2    3
    # query tile 0      causal   -    -    -       -  skipped: no query may see any key
    # query tile 1      full   causal -    -       full / causal: computed, masked where needed
    # query tile 2      full   full causal -
    #
    # The last tiles are padded with positions AFTER all queries (invisible keys) and BEFORE all
    # keys (queries that see nothing).
    queries = _keep_in_loop(queries)
    key_tiles = _tiles(keys, AFTER)

    def of_queries(tile: QueryPart) -> PartialResult:
        def of_keys(part: PartialResult, keys: KeyPart) -> tuple[PartialResult, None]:
            def merged() -> PartialResult:
                scores, _ = attention_scores(tile, keys, scoring, window)
                lse = jax.nn.logsumexp(scores, axis=-1)
                # Rows without a visible key have lse = -inf; subtracting 0 instead keeps exp(-inf)
                # = 0.
                weights = jnp.exp(scores - _finite(lse)[..., None])
                o = product("bkgst,btkh->bskgh", weights.astype(keys.v.dtype), keys.v)
                o = o.reshape(*tile.q.shape[:3], -1)
                lse = lse.reshape(lse.shape[0], -1, lse.shape[-1]).swapaxes(1, 2)
                return part.merged(PartialResult(o, lse))

            return jax.lax.cond(_may_see(tile, keys, window), merged, lambda: part), None

        # The neutral element of `PartialResult.merged`: weight e^-inf = 0.
        o = jnp.zeros((*tile.q.shape[:3], keys.v.shape[-1]), jnp.float32)
        return jax.lax.scan(of_keys, PartialResult(o, o[..., 0] - jnp.inf), key_tiles)[0]

    parts = jax.lax.map(of_queries, _tiles(queries, BEFORE))
    return _join_tiles(parts, queries.q.shape[1])


def gradients_of_part(
    queries: QueryPart, of_queries: BackwardInputs, keys: KeyPart, scoring: Scoring, window: Window
) -> Gradients:
    """Compute the gradients of attention to a part of the keys.

    Args:
        queries: the queries.
        of_queries: gradients and statistics of the merged result.
        keys: the part of the keys.
        scoring: scale and soft cap of the scores.
        window: number of last tokens that a query sees.
    """
    queries = _keep_in_loop(queries)
    key_tiles = _tiles(keys, AFTER)

    def add_tile(sums: tuple[Array, Array], tile: tuple[QueryPart, BackwardInputs]) -> Any:  # noqa: ANN401
        def of_keys(d_q: Array, keys: KeyPart) -> tuple[Array, tuple[Array, Array]]:
            def zero_gradients() -> Gradients:
                zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), keys[:2])
                return Gradients(jnp.zeros_like(d_q), *zeros)

            gradients = functools.partial(_gradients_of_tile, *tile, keys, scoring, window)
            grads = jax.lax.cond(_may_see(tile[0], keys, window), gradients, zero_gradients)
            return d_q + grads.q, (grads.k, grads.v)

        # Gradients of queries are summed over key tiles (carry of the inner scan), gradients of
        # keys over query tiles (carry of the outer scan).
        d_q = jnp.zeros(tile[0].q.shape, jnp.float32)
        d_q, of_tiles = jax.lax.scan(of_keys, d_q, key_tiles)
        return jax.tree.map(jnp.add, sums, of_tiles), d_q

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), key_tiles[:2])
    tiles = _tiles(queries, BEFORE), _tiles(of_queries, 0)
    (d_k, d_v), d_q = jax.lax.scan(add_tile, zeros, tiles)
    length = keys.k.shape[1]
    return Gradients(
        _join_tiles(d_q, queries.q.shape[1]), _join_tiles(d_k, length), _join_tiles(d_v, length)
    )


def _keep_in_loop(queries: QueryPart) -> QueryPart:
    """Make masks depend on the queries, so that they stay inside of a loop over layers."""
    # Differentiation of `lax.scan` over layers hoists values that do not depend on the layer, here
    # the masks of all tiles at once. The barrier makes masks depend on the layer's queries, so that
    # they are computed inside of the loop, one tile at a time.
    return jax.lax.optimization_barrier(queries)


_flash_forward = on_first_use("flash", "forward")
_flash_backward = on_first_use("flash", "backward")


def _attend_by_flash(
    queries: QueryPart, keys: KeyPart, scoring: Scoring, window: Window
) -> PartialResult:
    o, lse = _flash_forward(
        queries.q, keys.k, keys.v, queries.at, keys.at, window, scoring, dtype=jnp.float32
    )  # fmt: skip
    return PartialResult(o, lse.swapaxes(1, 2))


def _gradients_by_flash(
    queries: QueryPart, of_queries: BackwardInputs, keys: KeyPart, scoring: Scoring, window: Window
) -> Gradients:
    lse, delta = (x.swapaxes(1, 2) for x in (of_queries.lse, of_queries.delta))
    grads = _flash_backward(
        queries.q, keys.k, keys.v, queries.at, keys.at, lse, delta, of_queries.d_o, window, scoring,
        dtype=jnp.float32,
    )  # fmt: skip
    return Gradients(*grads)


class PartialKernel(NamedTuple):
    """Functions like `attend_to_part` and `gradients_of_part`."""

    attend: Callable[[QueryPart, KeyPart, Scoring, Window], PartialResult]
    gradients: Callable[[QueryPart, BackwardInputs, KeyPart, Scoring, Window], Gradients]


PARTIAL_KERNELS = {
    "tiles": PartialKernel(attend_to_part, gradients_of_part),
    "triton": PartialKernel(_attend_by_flash, _gradients_by_flash),
}
"""Kernels by name: "tiles" in plain XLA, anywhere; "triton" on GPUs (`flash.py`)."""

Tree = TypeVar("Tree")


def _tiles(of_tokens: Tree, padding: int) -> Tree:
    """Cut arrays [b, s, ...] into tiles [n, b, t, ...]; integers are padded with `padding`."""
    length = jax.tree.leaves(of_tokens)[0].shape[1]
    size = min(length, TILE)
    n = -(-length // size)

    def cut(x: Array) -> Array:
        fill = padding if jnp.issubdtype(x.dtype, jnp.integer) else 0
        widths = ((0, 0), (0, n * size - length), *((0, 0),) * (x.ndim - 2))
        x = jnp.pad(x, widths, constant_values=fill)
        return x.reshape(x.shape[0], n, size, *x.shape[2:]).swapaxes(0, 1)

    return jax.tree.map(cut, of_tokens)


def _join_tiles(tiles: Tree, length: int) -> Tree:
    """Join the tiles of `_tiles`, without padding."""

    def join(x: Array) -> Array:
        x = x.swapaxes(0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]

    return jax.tree.map(join, tiles)


def _may_see(queries: QueryPart, keys: KeyPart, window: Window) -> Bool[Array, ""]:
    """Return whether any query may see any key, from the extreme positions of each row."""
    q_tokens, k_tokens = queries.at, keys.at
    (first_q, last_q), (first_k, last_k) = _range(q_tokens.positions), _range(k_tokens.positions)
    # Conservative interval tests on each row: False only if nothing is visible. Disjoint ranges of
    # document ids share no document.
    is_visible = first_k <= last_q
    if window is not None:
        is_visible &= first_q - last_k < window
    if q_tokens.documents is not None and k_tokens.documents is not None:
        first_q, last_q = _range(q_tokens.documents)
        first_k, last_k = _range(k_tokens.documents)
        is_visible &= (first_k <= last_q) & (first_q <= last_k)
    return jnp.any(is_visible)


def _range(x_BS: Int[Array, "b s"]) -> tuple[Int[Array, "b"], Int[Array, "b"]]:
    return jnp.min(x_BS, axis=1), jnp.max(x_BS, axis=1)


def attention_scores(
    queries: QueryPart, keys: KeyPart, scoring: Scoring, window: Window
) -> tuple[Float[Array, "b kv g s t"], Float[Array, "b s kv g h"]]:
    """Return scores, -inf for invisible pairs, and the queries grouped by key heads."""
    batch, length, _, h = queries.q.shape
    q = queries.q.reshape(batch, length, keys.k.shape[2], -1, h)
    products = product("bskgh,btkh->bkgst", q, keys.k)
    capped = scoring.capped(products * scoring.scale_of(h))
    seen = masking.visible(queries.at.positions[:, :, None], keys.at.positions[:, None], window)
    if queries.at.documents is not None and keys.at.documents is not None:
        seen &= queries.at.documents[:, :, None] == keys.at.documents[:, None]
    return jnp.where(seen[:, None, None], capped, -jnp.inf), q


def _gradients_of_tile(
    queries: QueryPart, of_queries: BackwardInputs, keys: KeyPart, scoring: Scoring, window: Window
) -> Gradients:
    scores, q = attention_scores(queries, keys, scoring, window)
    lse, delta = (
        x.swapaxes(1, 2).reshape(len(x), keys.k.shape[2], -1, x.shape[1])
        for x in (of_queries.lse, of_queries.delta)
    )
    # FlashAttention's backward pass (arXiv:2205.14135, algorithm 4):
    #
    #   P = exp(S - lse)      dV = Pᵀ dO      dP = dO Vᵀ
    #   dS = P (dP - δ)       dQ = dS K       dK = dSᵀ Q
    #
    # Operands are cast to the input dtype before each product; sums are float32.
    weights = jnp.exp(scores - _finite(lse)[..., None])
    d_o = of_queries.d_o.reshape(*q.shape[:-1], -1).astype(keys.v.dtype)
    d_weights = product("bskgh,btkh->bkgst", d_o, keys.v)
    d_scores = scoring.score_gradients(scores, weights, d_weights, delta[..., None], q.shape[-1])
    d_scores, weights = d_scores.astype(q.dtype), weights.astype(q.dtype)
    return Gradients(
        product("bkgst,btkh->bskgh", d_scores, keys.k).reshape(queries.q.shape),
        product("bkgst,bskgh->btkh", d_scores, q),
        product("bkgst,bskgh->btkh", weights, d_o),
    )


def _finite(lse: Array) -> Array:
    """Replace -inf by 0, so that exp(-inf - lse) is 0 instead of NaN if nothing is visible."""
    return jnp.where(jnp.isneginf(lse), 0.0, lse)
