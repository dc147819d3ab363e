"""Attention of some queries over some of the keys, told in such a way that parts add up.

A part gives its own softmax-weighted mean o and the logsumexp of its scores. Of two parts,

    lse = log(e^lse_1 + e^lse_2)        o = e^(lse_1 - lse) o_1 + e^(lse_2 - lse) o_2

(FlashAttention, arXiv:2205.14135, section 3.1). The gradient of a part needs, of the whole, lse and
the row sums δ = Σ o · d_o alone; so gradients of parts just add up, too.

Scores exist for a tile of queries and a tile of keys at a time. A tile is skipped where nothing in
it is visible: whatever says so, causality, a window, or packed documents.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxforge.kernels import masking
from jaxforge.kernels.flash_blocks import AFTER, BEFORE, Tokens
from jaxforge.kernels.on_first_use import on_first_use
from jaxforge.kernels.scoring import Scoring, product

_TILE = 512  # tokens of queries, and of keys, whose scores exist at a time


class QueryPart(NamedTuple):
    """Some tokens that look.

    Attributes:
        q: their queries.
        at: where they are.
    """

    q: Float[Array, "b s heads h"]
    at: Tokens


class KeyPart(NamedTuple):
    """Some tokens that are looked at.

    Attributes:
        k: their keys.
        v: their values.
        at: where they are.
    """

    k: Float[Array, "b t kv h"]
    v: Float[Array, "b t kv h"]
    at: Tokens


class PartialResult(NamedTuple):
    """Partial attention result over some of the keys, float32.

    Attributes:
        o: the mean of values, by their weights among these keys; 0 where none is visible.
        lse: logsumexp of the scores; -inf where none is visible.
    """

    o: Float[Array, "b s heads h"]
    lse: Float[Array, "b s heads"]

    def merged(self, other: "PartialResult") -> "PartialResult":
        """Merge two partial results into the result over the keys of both."""
        lse = jnp.logaddexp(self.lse, other.lse)
        return PartialResult(self.scaled_to(lse) + other.scaled_to(lse), lse)

    def scaled_to(self, lse: Float[Array, "b s heads"]) -> Float[Array, "b s heads h"]:
        """Its share of the mean over more keys, whose logsumexp is given."""
        return self.o * jnp.exp(self.lse - _finite(lse))[..., None]


class Gradients(NamedTuple):
    """Gradients of a partial result, float32."""

    q: Float[Array, "b s heads h"]
    k: Float[Array, "b t kv h"]
    v: Float[Array, "b t kv h"]


class BackwardInputs(NamedTuple):
    """Per-query inputs of the backward pass over all keys, float32.

    Attributes:
        d_o: the gradient of what they got.
        lse: logsumexp of their scores.
        delta: Σ o · d_o over each head.
    """

    d_o: Float[Array, "b s heads h"]
    lse: Float[Array, "b s heads"]
    delta: Float[Array, "b s heads"]


Window = Int[Array, ""] | None
"""Number of last tokens that a query sees, itself included; None: all."""


def attend_to_part(
    queries: QueryPart, keys: KeyPart, scoring: Scoring, window: Window
) -> PartialResult:
    """Attend to a part of the keys: those at or before each query, in its document.

    Args:
        queries: who looks.
        keys: what is looked at.
        scoring: what becomes of products of queries and keys.
        window: how far they see.
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
    queries = _in_place(queries)
    key_tiles = _tiles(keys, AFTER)

    def of_queries(tile: QueryPart) -> PartialResult:
        def of_keys(part: PartialResult, keys: KeyPart) -> tuple[PartialResult, None]:
            def merged() -> PartialResult:
                scores, _ = _scores(tile, keys, scoring, window)
                lse = jax.nn.logsumexp(scores, axis=-1)
                # Rows without a visible key have lse = -inf; subtracting 0 instead keeps exp(-inf)
                # = 0.
                weights = jnp.exp(scores - _finite(lse)[..., None])
                o = product("bkgst,btkh->bskgh", weights.astype(keys.v.dtype), keys.v)
                o = o.reshape(tile.q.shape)
                lse = lse.reshape(lse.shape[0], -1, lse.shape[-1]).swapaxes(1, 2)
                return part.merged(PartialResult(o, lse))

            return jax.lax.cond(_may_see(tile, keys, window), merged, lambda: part), None

        # The neutral element of `PartialResult.merged`: weight e^-inf = 0.
        o = jnp.zeros(tile.q.shape, jnp.float32)
        return jax.lax.scan(of_keys, PartialResult(o, o[..., 0] - jnp.inf), key_tiles)[0]

    parts = jax.lax.map(of_queries, _tiles(queries, BEFORE))
    return _joined(parts, queries.q.shape[1])


def gradients_of_part(
    queries: QueryPart, of_queries: BackwardInputs, keys: KeyPart, scoring: Scoring, window: Window
) -> Gradients:
    """The gradients of a part of attention.

    Args:
        queries: as of `attend_to_part`, and so the rest.
        of_queries: what is known of them.
        keys: the part.
        scoring: the same.
        window: the same.
    """
    queries = _in_place(queries)
    key_tiles = _tiles(keys, AFTER)

    def add_tile(sums: tuple[Array, Array], tile: tuple[QueryPart, BackwardInputs]) -> Any:  # noqa: ANN401
        def of_keys(d_q: Array, keys: KeyPart) -> tuple[Array, tuple[Array, Array]]:
            def tile_gradients() -> Gradients:
                return _gradients_of_tile(*tile, keys, scoring, window)

            def none() -> Gradients:
                zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), keys[:2])
                return Gradients(jnp.zeros_like(d_q), *zeros)

            got = jax.lax.cond(_may_see(tile[0], keys, window), tile_gradients, none)
            return d_q + got.q, (got.k, got.v)

        # Gradients of queries add up over key tiles (carry of the inner scan), those of keys over
        # query tiles (carry of the outer scan).
        d_q, of_tiles = jax.lax.scan(of_keys, jnp.zeros_like(tile[1].d_o), key_tiles)
        return jax.tree.map(jnp.add, sums, of_tiles), d_q

    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), key_tiles[:2])
    tiles = _tiles(queries, BEFORE), _tiles(of_queries, 0)
    (d_k, d_v), d_q = jax.lax.scan(add_tile, nothing, tiles)
    length = keys.k.shape[1]
    return Gradients(_joined(d_q, queries.q.shape[1]), _joined(d_k, length), _joined(d_v, length))


def _in_place(queries: QueryPart) -> QueryPart:
    """Return queries that carry their positions.

    `lax.scan` moves what depends on no layer out of its loop over layers when that is
    differentiated: here, what is visible in all tiles at a time.
    """
    # The barrier makes the masks depend on the loop's data, so they stay inside the loop, a tile at
    # a time, instead of being hoisted for all tiles.
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
"""By name: anywhere, in plain XLA; on GPUs (`flash.py`)."""

T = TypeVar("T")


def _tiles(of_tokens: T, padding: int) -> T:
    """Arrays [b, s, ...] in tiles [n, b, t, ...]; of integers, the last is filled up."""
    length = jax.tree.leaves(of_tokens)[0].shape[1]
    size = min(length, _TILE)
    n = -(-length // size)

    def cut(x: Array) -> Array:
        fill = padding if jnp.issubdtype(x.dtype, jnp.integer) else 0
        widths = ((0, 0), (0, n * size - length), *((0, 0),) * (x.ndim - 2))
        x = jnp.pad(x, widths, constant_values=fill)
        return x.reshape(x.shape[0], n, size, *x.shape[2:]).swapaxes(0, 1)

    return jax.tree.map(cut, of_tokens)


def _joined(tiles: T, length: int) -> T:
    """The arrays that `_tiles` has cut."""

    def join(x: Array) -> Array:
        x = x.swapaxes(0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]

    return jax.tree.map(join, tiles)


def _may_see(queries: QueryPart, keys: KeyPart, window: Window) -> Bool[Array, ""]:
    """Return whether any query may see any key, from the extreme positions of each row."""
    looking, seen = queries.at, keys.at
    (first_q, last_q), (first_k, last_k) = _range(looking.positions), _range(seen.positions)
    # Conservative interval tests on each row: false only if provably nothing is visible. Documents
    # are numbered in ascending order, so disjoint ranges share no document.
    is_visible = first_k <= last_q
    if window is not None:
        is_visible &= first_q - last_k < window
    if looking.documents is not None and seen.documents is not None:
        (first_q, last_q), (first_k, last_k) = _range(looking.documents), _range(seen.documents)
        is_visible &= (first_k <= last_q) & (first_q <= last_k)
    return jnp.any(is_visible)


def _range(x_BS: Int[Array, "b s"]) -> tuple[Int[Array, "b"], Int[Array, "b"]]:
    return jnp.min(x_BS, axis=1), jnp.max(x_BS, axis=1)


def _scores(
    queries: QueryPart, keys: KeyPart, scoring: Scoring, window: Window
) -> tuple[Float[Array, "b kv g s t"], Float[Array, "b s kv g h"]]:
    """Scores, -inf where nothing is visible, and the queries by the heads of the keys."""
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
    scores, q = _scores(queries, keys, scoring, window)
    lse, delta = (
        x.swapaxes(1, 2).reshape(len(x), keys.k.shape[2], -1, x.shape[1])
        for x in (of_queries.lse, of_queries.delta)
    )
    # FlashAttention's backward (arXiv:2205.14135, algorithm 4): P = exp(S - lse), dV = Pᵀ dO, dP =
    # dO Vᵀ, dS = P (dP - δ), dQ = dS K, dK = dSᵀ Q; casts to the input dtype before each product,
    # sums in float32.
    weights = jnp.exp(scores - _finite(lse)[..., None])
    d_o = of_queries.d_o.reshape(q.shape).astype(keys.v.dtype)
    d_weights = product("bskgh,btkh->bkgst", d_o, keys.v)
    d_scores = scoring.score_gradients(scores, weights, d_weights, delta[..., None], q.shape[-1])
    d_scores, weights = d_scores.astype(q.dtype), weights.astype(q.dtype)
    return Gradients(
        product("bkgst,btkh->bskgh", d_scores, keys.k).reshape(queries.q.shape),
        product("bkgst,bskgh->btkh", d_scores, q),
        product("bkgst,bskgh->btkh", weights, d_o),
    )


def _finite(lse: Array) -> Array:
    """0 for -inf: where nothing is visible, scores are less than what is taken from them."""
    return jnp.where(jnp.isneginf(lse), 0.0, lse)
