"""Gated delta rule (arXiv:2412.06464): a linear attention that overwrites the values of its keys.

The state S [d, v] of a head maps keys to values. A token decays it by exp(g), replaces a share β of
the value that the state has for its key, and reads the new state (equation 10 of the paper):

    S_t = exp(g_t) S_{t-1} + k_t w_tᵀ,    w_t = β_t (v_t - (exp(g_t) S_{t-1})ᵀ k_t)
    y_t = S_tᵀ q_t

g is one number per head, or one per key channel, which decays a row of S (Kimi Delta Attention,
arXiv:2510.26692).

In training a sequence is cut into chunks of C tokens. With G the sum of g from the start of the
chunk and S_0 the state before the chunk, the corrections w of a chunk solve one triangular system
(the WY representation, section 3.2), so that everything inside of a chunk is a matrix product:

    D_cu = exp(G_c - G_u) for u ≤ c, else 0
    A_cu = β_c D_cu (k_c · k_u) for u < c        T = (I + A)⁻¹
    w    = T diag(β) V - T diag(β exp(G)) K S_0
    y    = diag(exp(G)) Q S_0 + (Q Kᵀ ∘ D) w
    S_C  = exp(G_C) S_0 + (diag(exp(G_C - G)) K)ᵀ w

With a decay per channel, exp(G) S_0 and exp(G) K multiply rows and columns of channels, and sums
over channels contain D: (Q Kᵀ ∘ D)_cu = Σ_d q_cd k_ud exp(G_cd - G_ud) (`delta_chunks.py`).

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
chunk, d key channels, v value channels, e decays of a head (1 or d).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxforge.kernels.delta_chunks import Chunks, split_into_chunks
from jaxforge.kernels.sequence_parts import (
    combine_before,
    from_parts,
    from_previous_part,
    parts_per_device,
    to_parts,
)
from jaxforge.kernels.triangular_inverse import SMALLEST
from jaxforge.parallel import collectives

CHUNK = 64
"""Tokens of a chunk, as in the paper's kernels."""

_EPS = 1e-6  # added to squared lengths of queries and keys, as in transformers


class DeltaTokens(NamedTuple):
    """Inputs of the gated delta rule for each token.

    Attributes:
        q: queries, of any length: they are divided by their norm and by √d.
        k: keys, of any length: they are divided by their norm.
        v: values. Each key head serves an equal number of consecutive value heads; with a decay
            per channel, one.
        log_decay: g ≤ 0, for all channels of a head (e = 1) or for each of them. Tokens with
            g = β = 0 leave the state unchanged.
        beta: β, share of the old value that a token replaces, from 0 to 1.
    """

    q: Float[Array, "b s K d"]
    k: Float[Array, "b s K d"]
    v: Float[Array, "b s H v"]
    log_decay: Float[Array, "b s H e"]
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


def working_values(
    key_heads: int, value_heads: int, d: int, channels: int, *, by_channel: bool = False
) -> int:
    """Return the float32 numbers per token that the backward pass of the rule holds at a time.

    They are the values of all chunks and their gradients: queries and keys of key heads, and for
    each value head u, w and w_state, the state and the map P of each chunk, and four matrices of
    pairs. With a decay per channel, also sums of g, decays, and decayed queries and keys.
    """
    of_value_head = 2 * channels + d + d * (channels + d) // CHUNK + 4 * CHUNK
    of_value_head += 8 * d if by_channel else 0
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
    decayed = state.reshape(*v.shape[:3], d, channels) * jnp.exp(log_decay)[..., None]
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


def _by_chunks(
    chunk: int,
    maps_states: bool,
    tokens: DeltaTokens,
    starts: Bool[Array, "b s"] | None,
    state: DeltaState,
) -> tuple[Array, DeltaState]:
    """Return outputs and last state: a scan over chunks for w and S, then y of all chunks."""
    batch, length, heads, channels = tokens.v.shape
    chunk = min(chunk, max(SMALLEST, 1 << (length - 1).bit_length()))
    x = split_into_chunks(chunk, *_normalized(tokens), starts)
    key_heads, d = tokens.k.shape[2:]
    first = state.reshape(batch, key_heads, heads // key_heads, d, channels)

    s, w, last = (_apply_maps if maps_states else _pass_through)(x, first)
    y = _scaled(jnp.einsum("nbKcd,nbKrdv->nbKrcv", x.q, s), x.decay_in)
    y += jnp.einsum("nbKrcu,nbKruv->nbKrcv", x.scores, w)
    # [n, b, K, r, c, v] -> [b, n, c, K, r, v]
    y = jnp.transpose(y, (1, 0, 4, 2, 3, 5)).reshape(batch, -1, heads, channels)
    return y[:, :length].astype(tokens.v.dtype), last.reshape(state.shape)


def _scaled(x: Array, factors: Array | None) -> Array:
    """Return values of tokens times their factors, if there are any."""
    return x if factors is None else x * factors[..., None]


def _pass_through(x: Chunks, first: Array) -> tuple[Array, Array, Array]:
    """Return the states before chunks, w, and the last state.

    A step of the scan is w = u - w_state S_0 and S_C = exp(G_C) S_0 + (decay_out ∘ K)ᵀ w.
    """

    def step(s: Array, x: tuple[Any, ...]) -> tuple[Array, tuple[Array, Array]]:
        u, w_state, k, decay_out, decay = x
        w = u - jnp.einsum("bKrcd,bKrdv->bKrcv", w_state, s)
        written = jnp.einsum("bKcd,bKrcv->bKrdv", k, _scaled(w, decay_out))
        return s * decay[..., None] + written, (s, w)

    last, (s, w) = jax.lax.scan(step, first, (x.u, x.w_state, x.k, x.decay_out, x.decay))
    return s, w, last


def _apply_maps(x: Chunks, first: Array) -> tuple[Array, Array, Array]:
    """Return the results of `_pass_through`, with one product in each step of the scan."""
    keys = _scaled(x.k[:, :, :, None], x.decay_out)
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
        return s * decay[..., None] - p @ s + b, s

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
        return g * decay[..., None] - p.swapaxes(-1, -2) @ g + d_s, g

    d_s, d_last = gradients
    d_first, g = jax.lax.scan(step, d_last, (p, decay, d_s), reverse=True)
    d_p = -jnp.einsum("...dv,...ev->...de", g, s)
    d_decay = jnp.sum(g * s, axis=-1 if decay.shape[-1] > 1 else (-2, -1))
    return d_p, g, d_decay.reshape(decay.shape), d_first


_states.defvjp(_states_forward, _states_backward)
