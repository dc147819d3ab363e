"""Chunks of the gated delta rule: all products that do not depend on the state.

`gated_delta.py` has the equations and the shape letters. With a decay per channel, the products of
queries or keys with earlier keys are sums

    P_cu = Σ_d l_cd k_ud exp(G_cd - G_ud)        u ≤ c

in which exp(G) and exp(-G) alone could overflow. So the chunk is halved again and again. Tokens of
the second half meet those of the first half over R, the sum up to the end of the first half, and
both exponents are at most 0:

    ⎡ P 0 ⎤    L = (l ∘ exp(G - R)) (k ∘ exp(R - G))ᵀ
    ⎣ L Q ⎦    P and Q are halved again, down to blocks of a few tokens, which are summed directly

Everything but these blocks is a product of matrices, as with one decay per head. The triangle has
half of the multiply-adds of the square.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxforge.kernels.triangular_inverse import invert_unit_lower

_BLOCK = 8  # tokens whose products are summed over channels without a product of matrices
_EXACT = jax.lax.Precision.HIGHEST


class Chunks(NamedTuple):
    """Values of all chunks that do not depend on the state.

    With a decay per channel, `q` and `k` contain their decays, and `decay_in` and `decay_out` are
    None.

    Attributes:
        u: T diag(β) V.
        w_state: T diag(β) (exp(G) ∘ K), factor of the state in w.
        k: keys.
        q: queries.
        scores: Q Kᵀ ∘ D.
        decay_in: exp(G), decay from the start of the chunk to a token.
        decay_out: exp(G_C - G), decay from a token to the end of the chunk.
        decay: exp(G_C), decay over the whole chunk, for each channel or for all of them.
    """

    u: Float[Array, "n b K r c v"]
    w_state: Float[Array, "n b K r c d"]
    k: Float[Array, "n b K c d"]
    q: Float[Array, "n b K c d"]
    scores: Float[Array, "n b K r c u"]
    decay_in: Float[Array, "n b K r c"] | None
    decay_out: Float[Array, "n b K r c"] | None
    decay: Float[Array, "n b K r e"]


class _Sums(NamedTuple):
    """Sums of g within chunks and documents, and what they decay.

    Attributes:
        total: G.
        decay_in: exp(G) of tokens that read the state before the chunk, 0 of others.
        decay_out: exp(G_C - G) of tokens that are in the state after the chunk, 0 of others.
        document: number of each token's document in its chunk; None: each row is one document.
    """

    total: Float[Array, "n b K r c *e"]
    decay_in: Float[Array, "n b K r c *e"]
    decay_out: Float[Array, "n b K r c *e"]
    document: Int[Array, "n b c"] | None


def split_into_chunks(
    chunk: int,
    q: Float[Array, "b s K d"],
    k: Float[Array, "b s K d"],
    v: Float[Array, "b s H v"],
    log_decay: Float[Array, "b s H e"],
    beta: Float[Array, "b s H"],
    starts: Bool[Array, "b s"] | None,
) -> Chunks:
    """Solve the triangular systems of all chunks, which do not depend on the state.

    Args:
        chunk: tokens of a chunk, a power of two.
        q: queries of their final length.
        k: keys of length 1.
        v: values.
        log_decay: g, for all channels (e = 1) or for each of them, which needs as many key heads as
            value heads.
        beta: β.
        starts: which tokens are the first of their document; None: each row is one document.
    """
    groups = v.shape[2] // k.shape[2]
    split = functools.partial(_chunked, chunk)
    is_start = None if starts is None else split(starts, None)  # [n, b, c]
    # Tokens of padding have g = β = 0, so that they do not change the state.
    q, k = (split(x, ()) for x in (q, k))  # [n, b, K, c, d]
    v, beta = (split(x, (groups,)) for x in (v, beta))  # [n, b, K, r, c, ...]
    if log_decay.shape[-1] > 1:
        sums = _sums(split(log_decay, (groups,)), is_start)
        return _decayed_by_channel(q, k, v, beta, sums)
    return _decayed_by_head(q, k, v, beta, _sums(split(log_decay[..., 0], (groups,)), is_start))


def _decayed_by_head(q: Array, k: Array, v: Array, beta: Array, sums: _Sums) -> Chunks:
    """Return the values of chunks with one decay per head, which follows products of channels."""
    total, decay_in, decay_out, document = sums
    is_seen = _is_seen(total.shape[-1], document)
    if document is not None:
        is_seen = is_seen[:, :, None, None]
    # The difference is positive for tokens after a query, where exp could overflow.
    pairs = jnp.exp(jnp.where(is_seen, total[..., :, None] - total[..., None, :], -jnp.inf))
    system = jnp.einsum("nbKcd,nbKud->nbKcu", k, k)[:, :, :, None] * pairs * beta[..., None]
    inverse = _inverse(system)
    u = jnp.einsum("nbKrcu,nbKruv->nbKrcv", inverse * beta[..., None, :], v)
    w_state = jnp.einsum("nbKrcu,nbKud->nbKrcd", inverse * (beta * decay_in)[..., None, :], k)
    scores = jnp.einsum("nbKcd,nbKud->nbKcu", q, k)[:, :, :, None] * pairs
    return Chunks(u, w_state, k, q, scores, decay_in, decay_out, decay_in[..., -1:])


def _decayed_by_channel(q: Array, k: Array, v: Array, beta: Array, sums: _Sums) -> Chunks:
    """Return the values of chunks with a decay per channel, which products of channels contain."""
    total, decay_in, decay_out = (x[:, :, :, 0] for x in sums[:3])  # [n, b, K, c, d]
    document = None if sums.document is None else sums.document[:, :, None]  # [n, b, 1, c]
    system, scores = (
        _decayed_products(x, k, total, document)[:, :, :, None] for x in (k, q)
    )  # [n, b, K, 1, c, u]
    inverse = _inverse(system * beta[..., None]) * beta[..., None, :]
    u = jnp.einsum("nbKrcu,nbKruv->nbKrcv", inverse, v)
    w_state = jnp.einsum("nbKrcu,nbKud->nbKrcd", inverse, k * decay_in)
    decay = decay_in[:, :, :, None, -1]
    return Chunks(u, w_state, k * decay_out, q * decay_in, scores, None, None, decay)


def _inverse(system: Array) -> Array:
    """Return (I + A)⁻¹ for the elements A of a system below its diagonal."""
    return invert_unit_lower(system * np.tril(np.ones(system.shape[-2:], bool), -1))


def _sums(log_decay: Array, is_start: Array | None) -> _Sums:
    """Return sums of g [n, b, K, r, c, ...] and decays."""
    if is_start is None:
        total = jnp.cumsum(log_decay, axis=4)
        return _Sums(total, jnp.exp(total), jnp.exp(total[:, :, :, :, -1:] - total), None)
    document = jnp.cumsum(is_start, axis=-1, dtype=jnp.int32)
    in_document = jnp.asarray(_is_seen(is_start.shape[-1], document))
    total = _sums_in_documents(log_decay, in_document, is_start)
    number = document.reshape(*document.shape[:2], 1, 1, -1, *(1,) * (total.ndim - 5))
    decay_in = jnp.where(number == 0, jnp.exp(total), 0)
    is_last = number == number[:, :, :, :, -1:]
    decay_out = jnp.exp(jnp.where(is_last, total[:, :, :, :, -1:] - total, -jnp.inf))
    return _Sums(total, decay_in, decay_out, document)


def _is_seen(tokens: int, document: Array | None) -> Array | np.ndarray:
    """Return which tokens u a token c sees: [c, u], or [*, c, u] for documents [*, c]."""
    earlier = np.tril(np.ones((tokens, tokens), bool))
    if document is None:
        return earlier
    return (document[..., :, None] == document[..., None, :]) & earlier


def _sums_in_documents(
    log_decay: Float[Array, "n b K r u *e"], in_document: Bool[Array, "n b c u"], is_start: Array
) -> Float[Array, "n b K r c *e"]:
    """Return sums of g that restart at each document, without g of its first token.

    With a sum over the chunk, later documents would add to the gradient of g of an earlier one what
    is left of their own: zero but for rounding. The first token of a document decays no state.
    """
    is_added = (in_document & ~is_start[:, :, None]).astype(log_decay.dtype)
    return jnp.einsum("nbcu,nbKru...->nbKrc...", is_added, log_decay, precision=_EXACT)


def _chunked(chunk: int, x: Array, groups: tuple[int, ...] | None) -> Array:
    """Return chunks of tokens [b, s, heads, ...] as [n, b, K, *groups, c, ...].

    Args:
        chunk: tokens of a chunk; the last one is filled with zeros.
        x: values of the tokens.
        groups: number of value heads of each key head; () for values of key heads, None for values
            without heads.
    """
    batch, length = x.shape[:2]
    x = jnp.pad(x, ((0, 0), (0, -length % chunk), *((0, 0),) * (x.ndim - 2)))
    x = x.reshape(batch, -1, chunk, *x.shape[2:])
    if groups is None:
        return x.swapaxes(0, 1)
    if groups:
        x = x.reshape(*x.shape[:3], -1, *groups, *x.shape[4:])
    # [b, n, c, K, *groups, ...] -> [n, b, K, *groups, c, ...]
    heads = range(3, 4 + len(groups))
    return jnp.transpose(x, (1, 0, *heads, 2, *range(4 + len(groups), x.ndim)))


def _decayed_products(
    left: Float[Array, "n *b c d"],
    right: Float[Array, "n *b c d"],
    total: Float[Array, "n *b c d"],
    document: Int[Array, "n *b c"] | None,
) -> Float[Array, "n *b c u"]:
    """Return Σ_d left_cd right_ud exp(G_cd - G_ud) for u ≤ c of the same document, else 0.

    Args:
        left: queries or keys of a chunk.
        right: keys.
        total: G, sums of g ≤ 0 in each document.
        document: number of each token's document, broadcast to the other arrays.
    """
    tokens = left.shape[-2]
    if tokens <= _BLOCK:
        return _products_of_block(left, right, total, document)
    half = tokens // 2
    boundary = total[..., half - 1 : half, :]
    earlier, later = boundary - total[..., :half, :], total[..., half:, :] - boundary
    if document is not None:
        reaches = (document == document[..., half - 1 : half])[..., None]
        earlier = jnp.where(reaches[..., :half, :], earlier, -jnp.inf)
        later = jnp.where(reaches[..., half:, :], later, -jnp.inf)
    queries = left[..., half:, :] * jnp.exp(later)
    keys = right[..., :half, :] * jnp.exp(earlier)
    below = jnp.einsum("...cd,...ud->...cu", queries, keys)
    inside = _decayed_products(
        _halves(left, -2), _halves(right, -2), _halves(total, -2),
        None if document is None else _halves(document, -1),
    )  # fmt: skip
    upper, lower = jnp.split(inside, 2)
    above = jnp.zeros_like(below)
    rows = [jnp.concatenate(row, axis=-1) for row in ([upper, above], [below, lower])]
    return jnp.concatenate(rows, axis=-2)


def _halves(x: Array, axis: int) -> Array:
    """Return the halves of chunks as chunks; more dimensions crash XLA:CPU (docs/upstream.md)."""
    return jnp.concatenate(jnp.split(x, 2, axis))


@jax.custom_vjp
def _products_of_block(
    left: Array, right: Array, total: Array, document: Array | None
) -> Float[Array, "*n c u"]:
    """Return `_decayed_products` of few tokens, without an array of their pairs and channels.

    The gradient is explicit. XLA would keep the exponentials of all pairs for JAX's own.
    """
    keys = right[..., None, :, :] * _factors(total, document)  # [*, c, u, d]
    return jnp.sum(left[..., :, None, :] * keys, axis=-1)


def _factors(total: Array, document: Array | None) -> Float[Array, "*n c u d"]:
    """Return exp(G_c - G_u) of each channel for u ≤ c of the same document, else 0."""
    is_seen = _is_seen(total.shape[-2], document)[..., None]
    difference = total[..., :, None, :] - total[..., None, :, :]
    return jnp.exp(jnp.where(is_seen, difference, -jnp.inf))


def _block_forward(
    left: Array, right: Array, total: Array, document: Array | None
) -> tuple[Array, tuple[Array, Array, Array, Array | None]]:
    return _products_of_block(left, right, total, document), (left, right, total, document)


def _block_backward(
    saved: tuple[Array, Array, Array, Array | None], gradient: Array
) -> tuple[Array, Array, Array, None]:
    """Return the gradients; that of G_c is what l_c adds to the loss, less what k_c adds."""
    left, right, total, document = saved
    weighted = gradient[..., None] * _factors(total, document)
    d_left = jnp.sum(weighted * right[..., None, :, :], axis=-2)
    d_right = jnp.sum(weighted * left[..., :, None, :], axis=-3)
    return d_left, d_right, left * d_left - right * d_right, None


_products_of_block.defvjp(_block_forward, _block_backward)
