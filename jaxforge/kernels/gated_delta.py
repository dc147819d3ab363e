"""Gated delta rule (arXiv:2412.06464): a linear attention that overwrites the values of its keys.

The state S [d, v] of a head maps keys to values. A token decays it by exp(g), replaces a share β of
the value that the state has for its key, and reads the new state (equation 10 of the paper):

    S_t = exp(g_t) S_{t-1} + k_t w_tᵀ,    w_t = β_t (v_t - exp(g_t) S_{t-1}ᵀ k_t)
    y_t = S_tᵀ q_t

In training a sequence is cut into chunks of C tokens. With G the sum of g from the start of the
chunk and S_0 the state before the chunk, the corrections w of a chunk solve one triangular system
(the WY representation, section 3.2), so that everything inside of a chunk is a matrix product:

    D_cu = exp(G_c - G_u) for u ≤ c, else 0
    A_cu = β_c D_cu (k_c · k_u) for u < c        T = (I + A)⁻¹
    w    = T diag(β) V - T diag(β exp(G)) K S_0
    y    = diag(exp(G)) Q S_0 + (Q Kᵀ ∘ D) w
    S_C  = exp(G_C) S_0 + (diag(exp(G_C - G)) K)ᵀ w

A scan over chunks computes w and S_C, and the states between chunks. y follows for all chunks at
once. Nothing has the size of the sequence squared. On GPUs, where each operation of a scan is a
kernel, the scan only applies the maps of chunks, which are computed at once as well:

    S_C = exp(G_C) S_0 - P S_0 + B    P = Eᵀ T diag(β exp(G)) K    E = diag(exp(G_C - G)) K
                                      B = Eᵀ T diag(β) V

The first token of a packed document sees an empty state. Within a chunk, D is 0 between tokens of
different documents, and the state before the chunk reaches only the tokens before the first start.
G restarts with each document:

    token        0   1   2   3   4   5          u →
    starts               x           x      D   x                 c ↓
    reads S_0    x   x                          x x
    is in S_C                        x              x
                                                    x x
                                                    x x x
                                                          x

Shape letters: n chunks, b batch, K key heads, r value heads of each key head, c and u tokens of a
chunk, d key channels, v value channels.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxforge.kernels.sequence_parts import (
    combine_before,
    from_parts,
    from_previous_part,
    parts_per_device,
    to_parts,
)
from jaxforge.parallel import collectives

CHUNK = 64
"""Tokens of a chunk, as in the paper's kernels."""

_BASE = 16  # size of the diagonal blocks that `_invert_block` inverts
_EPS = 1e-6  # added to squared lengths of queries and keys, as in transformers
_EXACT = jax.lax.Precision.HIGHEST


class DeltaTokens(NamedTuple):
    """Inputs of the gated delta rule for each token.

    Attributes:
        q: queries, of any length: they are divided by their norm and by √d.
        k: keys, of any length: they are divided by their norm.
        v: values. Each key head serves an equal number of consecutive value heads.
        log_decay: g ≤ 0. Tokens with g = β = 0 leave the state unchanged.
        beta: β, share of the old value that a token replaces, from 0 to 1.
    """

    q: Float[Array, "b s K d"]
    k: Float[Array, "b s K d"]
    v: Float[Array, "b s H v"]
    log_decay: Float[Array, "b s H"]
    beta: Float[Array, "b s H"]


DeltaState = Float[Array, "b H d v"]
"""State of each value head, in float32 (float64 for inputs in float64)."""


def gated_delta_rule(
    tokens: DeltaTokens,
    segment_ids: Int[Array, "b s"] | None = None,
    state: DeltaState | None = None,
    strategy: str = "ulysses",
    chunk: int = CHUNK,
    *,
    maps_states: bool = False,
) -> tuple[Float[Array, "b s H v"], DeltaState]:
    """Apply the gated delta rule to sequences, by chunks.

    Products accumulate in float32. The backward pass keeps only the inputs and computes the chunks
    again, because their intermediate values are several times larger.

    Inside `shard_map`, devices that share sequences exchange the effect of their parts on the
    state.

    Args:
        tokens: inputs; of a device, its tokens in the order of `context_parallel.to_device_order`.
        segment_ids: document of each token, for packed rows; None: each row is one document.
        state: state before the first token, which belongs to its document; None: empty. Devices
            that share sequences have none.
        strategy: "ulysses" or "ring": how devices share sequences (`distributed.cp_strategy`).
        chunk: tokens of a chunk, a power of two of at least 16.
        maps_states: whether the scan over chunks only applies their maps to the state.

    Returns:
        Outputs of the tokens in the dtype of the values, and the state after the last token of each
        row (of the device's last part, if devices share sequences).
    """
    # A barrier against sharing values with the forward pass would cost memory and time in a loop.
    by_chunks = functools.partial(_by_chunks, chunk, maps_states)
    run = jax.checkpoint(by_chunks, prevent_cse=False)
    if collectives.axis_size("context") > 1:
        return _across_devices(run, tokens, segment_ids, strategy)
    starts = None if segment_ids is None else _document_starts(segment_ids, segment_ids[:, :1])
    return run(tokens, starts, _empty_state(tokens) if state is None else state)


def working_values(key_heads: int, value_heads: int, d: int, channels: int) -> int:
    """Return the float32 numbers per token that the backward pass of the rule holds at a time.

    They are the values of all chunks and their gradients: queries and keys of key heads, and for
    each value head u, w and w_state, the state and the map P of each chunk, and four matrices of
    pairs.
    """
    of_value_head = 2 * channels + d + d * (channels + d) // CHUNK + 4 * CHUNK
    return 2 * (2 * key_heads * d + value_heads * of_value_head)


def gated_delta_step(
    tokens: DeltaTokens, state: DeltaState
) -> tuple[Float[Array, "b 1 H v"], DeltaState]:
    """Apply the gated delta rule to one token of each sequence, for decoding.

    Returns:
        Outputs in the dtype of the values, and the new state.
    """
    q, k, v, log_decay, beta = _normalized(tokens)
    batch, heads, d, channels = state.shape
    # [b, 1, K, d] -> [b, K, d], and value heads by key head: [b, 1, H, ...] -> [b, K, r, ...].
    q, k = q[:, 0], k[:, 0]
    v, log_decay, beta = (
        x.reshape(batch, k.shape[1], -1, *x.shape[3:]) for x in (v, log_decay, beta)
    )
    decayed = state.reshape(*v.shape[:3], d, channels) * jnp.exp(log_decay)[..., None, None]
    w = beta[..., None] * (v - jnp.einsum("bKd,bKrdv->bKrv", k, decayed))
    new = decayed + k[:, :, None, :, None] * w[..., None, :]
    y = jnp.einsum("bKd,bKrdv->bKrv", q, new)
    return y.reshape(batch, 1, heads, channels).astype(tokens.v.dtype), new.reshape(state.shape)


def _empty_state(tokens: DeltaTokens) -> DeltaState:
    batch, _, heads, channels = tokens.v.shape
    shape = (batch, heads, tokens.k.shape[-1], channels)
    zeros = jnp.zeros(shape, jnp.promote_types(tokens.v.dtype, jnp.float32))
    # A carry of a scan must vary over the same mesh axes from its start.
    return collectives.varying(zeros, collectives.varying_axes(tokens))


def _document_starts(
    segment_ids: Int[Array, "b s"], previous: Int[Array, "b 1"]
) -> Bool[Array, "b s"]:
    """Return which tokens are the first of their document.

    Args:
        segment_ids: document of each token.
        previous: document of the token before the first.
    """
    return segment_ids != jnp.concatenate([previous, segment_ids[:, :-1]], axis=1)


class _Effect(NamedTuple):
    """Effect of consecutive tokens on the state: S becomes A S + B."""

    a: Float[Array, "b H d d"]
    b: Float[Array, "b H d v"]

    def then(self, later: "_Effect") -> "_Effect":
        """Return the effect of these and later tokens."""
        return _Effect(later.a @ self.a, later.a @ self.b + later.b)


def _across_devices(
    run: Callable[..., tuple[Array, DeltaState]],
    tokens: DeltaTokens,
    segment_ids: Int[Array, "b s"] | None,
    strategy: str,
) -> tuple[Array, DeltaState]:
    """Apply the rule to each part of the device as if it were first, then add earlier parts.

    Outputs and state are linear in the state S before a part. So the columns of the values get d
    more columns, which begin with a state of I and values of 0, and compute the factors of S:

        state    [ 0 | I ]  ->  [ B | A ]        S after the part = A S + B
        outputs  [ y | Y ]                       outputs of the part = y + Y S
    """
    tokens = DeltaTokens(*(to_parts(x, strategy) for x in tokens))
    parts, length, heads, channels = tokens.v.shape
    starts = None
    if segment_ids is not None:
        ids = to_parts(segment_ids, strategy)
        starts = _document_starts(ids, from_previous_part(ids[:, -1:], strategy))
    d = tokens.k.shape[-1]
    zeros = _empty_state(tokens)
    identity = jnp.broadcast_to(jnp.eye(d, dtype=zeros.dtype), (parts, heads, d, d))
    no_values = jnp.zeros((parts, length, heads, d), tokens.v.dtype)
    # In the dtype of the state, because outputs and factors of S are not yet final.
    wide = jnp.concatenate([tokens.v, no_values], axis=-1).astype(zeros.dtype)
    first = jnp.concatenate([zeros, identity], axis=-1)
    y, last = run(tokens._replace(v=wide), starts, first)
    effect = _Effect(last[..., channels:], last[..., :channels])
    batch = parts // parts_per_device(strategy)
    nothing = _Effect(identity[:batch], zeros[:batch])
    before = combine_before(_Effect.then, effect, nothing, strategy).b
    y = y[..., :channels] + jnp.einsum("bshd,bhdv->bshv", y[..., channels:], before)
    after = _Effect(identity, before).then(effect).b
    return (
        from_parts(y.astype(tokens.v.dtype), strategy),
        after[parts // batch - 1 :: parts // batch],
    )


def _normalized(tokens: DeltaTokens) -> DeltaTokens:
    """Return the inputs in the dtype of the state, with queries and keys of their final length."""
    dtype = jnp.promote_types(tokens.v.dtype, jnp.float32)
    q, k, v, log_decay, beta = (x.astype(dtype) for x in tokens)
    return DeltaTokens(_unit(q) * q.shape[-1] ** -0.5, _unit(k), v, log_decay, beta)


def _unit(x: Float[Array, "... d"]) -> Float[Array, "... d"]:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _EPS)


class _Chunks(NamedTuple):
    """Values of all chunks that do not depend on the state.

    Attributes:
        u: T diag(β) V.
        w_state: T diag(β exp(G)) K, factor of the state in w.
        k: keys.
        q: queries.
        scores: Q Kᵀ ∘ D.
        decay_in: exp(G), decay from the start of the chunk to a token.
        decay_out: exp(G_C - G), decay from a token to the end of the chunk.
        decay: exp(G_C), decay over the whole chunk.
    """

    u: Float[Array, "n b K r c v"]
    w_state: Float[Array, "n b K r c d"]
    k: Float[Array, "n b K c d"]
    q: Float[Array, "n b K c d"]
    scores: Float[Array, "n b K r c u"]
    decay_in: Float[Array, "n b K r c"]
    decay_out: Float[Array, "n b K r c"]
    decay: Float[Array, "n b K r"]


def _by_chunks(
    chunk: int,
    maps_states: bool,
    tokens: DeltaTokens,
    starts: Bool[Array, "b s"] | None,
    state: DeltaState,
) -> tuple[Array, DeltaState]:
    """Return outputs and last state: a scan over chunks for w and S, then y of all chunks."""
    batch, length, heads, channels = tokens.v.shape
    chunk = min(chunk, max(_BASE, 1 << (length - 1).bit_length()))
    x = _split_into_chunks(chunk, _normalized(tokens), starts)
    key_heads, d = tokens.k.shape[2:]
    first = state.reshape(batch, key_heads, heads // key_heads, d, channels)

    s, w, last = (_apply_maps if maps_states else _pass_through)(x, first)
    y = jnp.einsum("nbKcd,nbKrdv->nbKrcv", x.q, s) * x.decay_in[..., None]
    y += jnp.einsum("nbKrcu,nbKruv->nbKrcv", x.scores, w)
    # [n, b, K, r, c, v] -> [b, n, c, K, r, v]
    y = jnp.transpose(y, (1, 0, 4, 2, 3, 5)).reshape(batch, -1, heads, channels)
    return y[:, :length].astype(tokens.v.dtype), last.reshape(state.shape)


def _pass_through(x: _Chunks, first: Array) -> tuple[Array, Array, Array]:
    """Return the states before chunks, w, and the last state.

    A step of the scan is w = u - w_state S_0 and S_C = exp(G_C) S_0 + (decay_out ∘ K)ᵀ w.
    """

    def step(s: Array, x: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        u, w_state, k, decay_out, decay = x
        w = u - jnp.einsum("bKrcd,bKrdv->bKrcv", w_state, s)
        written = jnp.einsum("bKcd,bKrcv->bKrdv", k, w * decay_out[..., None])
        return s * decay[..., None, None] + written, (s, w)

    last, (s, w) = jax.lax.scan(step, first, (x.u, x.w_state, x.k, x.decay_out, x.decay))
    return s, w, last


def _apply_maps(x: _Chunks, first: Array) -> tuple[Array, Array, Array]:
    """Return the results of `_pass_through`, with one product in each step of the scan."""
    keys = x.k[:, :, :, None] * x.decay_out[..., None]
    p = jnp.einsum("nbKrcd,nbKrce->nbKrde", keys, x.w_state)
    b = jnp.einsum("nbKrcd,nbKrcv->nbKrdv", keys, x.u)
    s, last = _states(p, b, x.decay, first)
    return s, x.u - jnp.einsum("nbKrcd,nbKrdv->nbKrcv", x.w_state, s), last


@jax.custom_vjp
def _states(p: Array, b: Array, decay: Array, first: Array) -> tuple[Array, Array]:
    """Return the states before chunks, and the last state.

    The gradient G of the state runs backwards as the state runs forwards. Gradients of maps follow
    for all chunks at once, which autodiff would compute in the scan.
    """

    def step(s: Array, x: tuple[Array, ...]) -> tuple[Array, Array]:
        p, b, decay = x
        return s * decay[..., None, None] - p @ s + b, s

    last, s = jax.lax.scan(step, first, (p, b, decay))
    return s, last


def _states_forward(
    p: Array, b: Array, decay: Array, first: Array
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    s, last = _states(p, b, decay, first)
    return (s, last), (p, decay, s)


def _states_backward(
    saved: tuple[Array, ...], gradients: tuple[Array, Array]
) -> tuple[Array, Array, Array, Array]:
    p, decay, s = saved

    def step(g: Array, x: tuple[Array, ...]) -> tuple[Array, Array]:
        p, decay, d_s = x
        return g * decay[..., None, None] - p.swapaxes(-1, -2) @ g + d_s, g

    d_s, d_last = gradients
    d_first, g = jax.lax.scan(step, d_last, (p, decay, d_s), reverse=True)
    d_p = -jnp.einsum("...dv,...ev->...de", g, s)
    return d_p, g, jnp.sum(g * s, axis=(-2, -1)), d_first


_states.defvjp(_states_forward, _states_backward)


def _split_into_chunks(
    chunk: int, tokens: DeltaTokens, starts: Bool[Array, "b s"] | None
) -> _Chunks:
    """Solve the triangular systems of all chunks, which do not depend on the state."""
    groups = tokens.v.shape[2] // tokens.k.shape[2]
    split = functools.partial(_chunked, chunk)
    # Tokens of padding have g = β = 0, so that they do not change the state.
    q, k = (split(x, ()) for x in (tokens.q, tokens.k))  # [n, b, K, c, d]
    v, log_decay, beta = (split(x, (groups,)) for x in tokens[2:])  # [n, b, K, r, c, ...]
    is_seen: Array | np.ndarray = np.tril(np.ones((chunk, chunk), bool))
    if starts is None:
        total = jnp.cumsum(log_decay, axis=-1)
        decay_in, decay_out = jnp.exp(total), jnp.exp(total[..., -1:] - total)
    else:
        is_start = split(starts, None)  # [n, b, c]
        document = jnp.cumsum(is_start, axis=-1, dtype=jnp.int32)
        in_document = jnp.tril(document[..., :, None] == document[..., None, :])
        total = _sums_in_documents(log_decay, in_document, is_start)
        is_seen, document = in_document[:, :, None, None], document[:, :, None, None]
        decay_in = jnp.where(document == 0, jnp.exp(total), 0)
        is_last = document == document[..., -1:]
        decay_out = jnp.exp(jnp.where(is_last, total[..., -1:] - total, -jnp.inf))
    # The difference is positive for tokens after a query, where exp could overflow.
    pairs = jnp.exp(jnp.where(is_seen, total[..., :, None] - total[..., None, :], -jnp.inf))
    system = jnp.einsum("nbKcd,nbKud->nbKcu", k, k)[:, :, :, None] * pairs * beta[..., None]
    inverse = invert_unit_lower(system * np.tril(np.ones((chunk, chunk), bool), -1))
    u = jnp.einsum("nbKrcu,nbKruv->nbKrcv", inverse * beta[..., None, :], v)
    w_state = jnp.einsum("nbKrcu,nbKud->nbKrcd", inverse * (beta * decay_in)[..., None, :], k)
    scores = jnp.einsum("nbKcd,nbKud->nbKcu", q, k)[:, :, :, None] * pairs
    return _Chunks(u, w_state, k, q, scores, decay_in, decay_out, decay_in[..., -1])


def _sums_in_documents(
    log_decay: Float[Array, "n b K r u"], in_document: Bool[Array, "n b c u"], is_start: Array
) -> Float[Array, "n b K r c"]:
    """Return sums of g that restart at each document, without g of its first token.

    With a sum over the chunk, later documents would add to the gradient of g of an earlier one what
    is left of their own: zero but for rounding. The first token of a document decays no state.
    """
    is_added = (in_document & ~is_start[:, :, None]).astype(log_decay.dtype)
    return jnp.einsum("nbcu,nbKru->nbKrc", is_added, log_decay, precision=_EXACT)


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


@jax.custom_vjp
def invert_unit_lower(strict: Float[Array, "*b c c"]) -> Float[Array, "*b c c"]:
    """Return (I + A)⁻¹ of strictly lower triangular matrices A.

    The inverse is built from blocks of twice the size in each step, which is as stable as forward
    substitution. (The shorter product (I - A)(I + A²)(I + A⁴)… has terms that grow like binomial
    coefficients if keys repeat.) Products are exact, because later products depend on them.

        ⎡ P 0 ⎤⁻¹   ⎡ P⁻¹          0   ⎤
        ⎣ L Q ⎦   = ⎣ -Q⁻¹ L P⁻¹   Q⁻¹ ⎦

    Args:
        strict: the matrices A; c is a power of two of at least 16.
    """
    return _invert(strict)


def _invert(strict: Array) -> Array:
    # XLA:TPU has a kernel for small triangular systems. It compiles exact products of small
    # matrices slowly, and pads them to tiles of 8 x 128 elements.
    return jax.lax.platform_dependent(strict, tpu=invert_by_rows, default=_invert_by_blocks)


def invert_by_rows(strict: Float[Array, "*b c c"]) -> Float[Array, "*b c c"]:
    """Return (I + A)⁻¹ by forward substitution."""
    identity = jnp.broadcast_to(jnp.eye(strict.shape[-1], dtype=strict.dtype), strict.shape)
    return jax.lax.linalg.triangular_solve(
        strict, identity, left_side=True, lower=True, unit_diagonal=True
    )


def _invert_by_blocks(strict: Array) -> Array:
    size = strict.shape[-1]
    if size <= _BASE:
        return _invert_block(strict)
    half = size // 2
    corners = jnp.stack([strict[..., :half, :half], strict[..., half:, half:]])
    upper, lower = _invert_by_blocks(corners)
    below = -_product(lower, _product(strict[..., half:, :half], upper))
    return jnp.concatenate(
        [
            jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1),
            jnp.concatenate([below, lower], axis=-1),
        ],
        axis=-2,
    )


def _invert_block(strict: Array) -> Array:
    """Invert small blocks: the same recursion by masks, without arrays of a few elements."""
    size = strict.shape[-1]
    i = np.arange(size)
    row, column = i[:, None], i
    inverse = jnp.eye(size, dtype=strict.dtype) - strict * (row // 2 == column // 2)
    block = 2
    while block < size:
        is_pair = row // (2 * block) == column // (2 * block)
        below = strict * (is_pair & (row // block != column // block))
        inverse = inverse - _product(inverse, _product(below, inverse))
        block *= 2
    return inverse


def _product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=_EXACT)


def _invert_backward(inverse: Array, gradient: Array) -> tuple[Array]:
    """Return -T⁻ᵀ dT T⁻ᵀ for the inverse T; callers mask elements that are not variables."""
    transposed = inverse.swapaxes(-1, -2)
    return (-_product(transposed, _product(gradient, transposed)),)


invert_unit_lower.defvjp(lambda strict: (_invert(strict),) * 2, _invert_backward)
