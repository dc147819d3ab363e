"""State-space layer of Mamba-2 by chunks: the SSD algorithm (arXiv:2405.21060, section 6).

Each head has a state S [P, N] that a scalar decays (P: head width, N: state size):

    S_t = exp(Δ_t A) S_{t-1} + Δ_t x_t B_tᵀ          y_t = S_t C_t + D x_t

B and C are shared by the heads of a group. A sequence is cut into chunks of Q tokens. With
a_t = Δ_t A and its sum c_t from the start of the chunk, the output of a token has two parts:

    y_t = Σ_{u ≤ t} exp(c_t - c_u) Δ_u (C_t · B_u) x_u   of its chunk: products with Q x Q matrices
        + exp(c_t) S C_t                                 of the state S in front of the chunk

    chunk      0              1              2
    tokens     [x x x x]      [x x x x]      [x x x x]
    inside      Q x Q          Q x Q          Q x Q         independent of each other
    state    S0 --------> S1 --------> S2 --------> S3      the only sequential part

The work is linear in the length of the sequence, and no array has a token x token shape of whole
sequences. Blocks of several chunks run one after another, and the backward pass computes the
Q x Q matrices of a block again, so that only one block of them exists at a time.

Decays, sums and states are float32 (or wider). Products have operands in the dtype of x and
float32 results.

Documents of a packed row start with an empty state, anywhere in a chunk, and c_t restarts there. A
state is described by the document of its last token: it reaches tokens of this document only.
"""

import functools
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

State = Float[Array, "b heads p n"]
"""Float32 states of all heads: head width x state size."""


class Inputs(NamedTuple):
    """Inputs of the recurrence, one row for each sequence or part of a sequence.

    Attributes:
        x: values of the heads.
        dt: time steps Δ ≥ 0 in float32 (`time_steps`); 0 leaves the state unchanged.
        a: decay rates A < 0 of the heads in float32.
        b: input projections of the groups. Head i belongs to group i // (heads / groups).
        c: output projections of the groups.
    """

    x: Float[Array, "b s heads p"]
    dt: Float[Array, "b s heads"]
    a: Float[Array, "heads"]
    b: Float[Array, "b s groups n"]
    c: Float[Array, "b s groups n"]


def time_steps(
    dt: Float[Array, "b s heads"],
    bias: Float[Array, "heads"],
    limits: tuple[float, float],
    is_padding: Array | None = None,
) -> Float[Array, "b s heads"]:
    """Return time steps softplus(dt + bias), clamped, in float32; 0 for padding.

    Args:
        dt: projected inputs.
        bias: bias of each head.
        limits: smallest and largest time step.
        is_padding: tokens [b, s] that must not change the state; None: there are none.
    """
    # At least float32: a decay is exp of a sum of time steps over a whole chunk.
    dtype = jnp.promote_types(dt.dtype, jnp.float32)
    steps = jax.nn.softplus(dt.astype(dtype) + bias.astype(dtype))
    # The default limits cut nothing, and no operation is added for them.
    steps = jnp.clip(steps, *limits) if limits != (0.0, float("inf")) else steps
    return steps if is_padding is None else jnp.where(is_padding[..., None], 0, steps)


def state_space(
    inputs: Inputs,
    skip: Float[Array, "heads"],
    segment_ids: Int[Array, "b s"] | None = None,
    state: State | None = None,
    chunk_size: int = 256,
    block: int = 1 << 15,
    strategy: str = "ulysses",
) -> tuple[Float[Array, "b s heads p"], State]:
    """Run the recurrence over sequences by chunks.

    Inside `shard_map`, devices that share sequences exchange one state per part: each computes its
    part from an empty state, and then adds the output of the state in front of it.

    Args:
        inputs: inputs of the recurrence; of a device, its tokens in the order of
            `context_parallel.to_device_order`.
        skip: factor D of x in the output.
        segment_ids: document of each token, for packed rows; equal ids are contiguous.
        state: state before the first token, which belongs to its document; None: zeros. Devices
            that share sequences have none.
        chunk_size: tokens of a chunk, Q; affects results only by rounding.
        block: elements of Q x Q matrices that exist at a time; at least those of one chunk do.
        strategy: "ulysses" or "ring": how devices share sequences (`distributed.cp_strategy`).

    Returns:
        The outputs in the dtype of x, and the float32 state after the last token of each row (of
        the device's last part from an empty state, if devices share sequences).
    """
    parts = Inputs(*(x if x is inputs.a else to_parts(x, strategy) for x in inputs))
    ids = None if segment_ids is None else to_parts(segment_ids, strategy)
    shape = (*parts.x.shape[::2], parts.x.shape[3], parts.b.shape[3])  # [p, heads, P, N]
    if state is None:
        # The carry of a scan must vary over the same devices as what is added to it.
        axes = collectives.varying_axes((inputs, segment_ids))
        state = collectives.varying(jnp.zeros(shape, parts.dt.dtype), axes)
    y, after = _by_blocks(parts, ids, state, min(chunk_size, parts.x.shape[1]), block)
    if collectives.axis_size("context") > 1:
        y = y + _output_of_earlier_parts(parts, ids, after, strategy)
    skipped = skip.astype(y.dtype)[:, None] * parts.x.astype(y.dtype)
    y = from_parts((y + skipped).astype(inputs.x.dtype), strategy)
    # A device may hold several parts of a row: the state of the last one is that of the row.
    per_row = len(after) // len(inputs.x)
    return y, after[per_row - 1 :: per_row]


def state_space_step(
    inputs: Inputs, skip: Float[Array, "heads"], state: State
) -> tuple[Float[Array, "b 1 heads p"], State]:
    """Run one token of each sequence, as in decoding. Arguments and results as of `state_space`."""
    x, dt, a, b, c = (x if x is inputs.a else x[:, 0] for x in inputs)
    # Heads of a group share B and C, as grouped queries share keys.
    per_group = x.shape[1] // b.shape[1]
    b, c = (jnp.repeat(g.astype(dt.dtype), per_group, axis=1) for g in (b, c))  # [b, heads, N]
    x32 = x.astype(dt.dtype)
    new = (dt[..., None] * x32)[..., None] * b[:, :, None]
    state = jnp.exp(dt * a)[..., None, None] * state + new
    y = jnp.sum(state * c[:, :, None], axis=-1) + skip.astype(dt.dtype)[:, None] * x32
    return y[:, None].astype(x.dtype), state


class _Chunks(NamedTuple):
    """Inputs of consecutive chunks; heads are [groups, heads per group].

    Attributes:
        x: values [b, chunks, Q, g, r, P].
        dt: time steps [b, chunks, Q, g, r].
        log_decay: a_t = Δ_t A [b, chunks, Q, g, r].
        b: [b, chunks, Q, g, N].
        c: [b, chunks, Q, g, N].
        ids: documents [b, chunks, Q]; None: one.
    """

    x: Array
    dt: Array
    log_decay: Array
    b: Array
    c: Array
    ids: Array | None


class _Carry(NamedTuple):
    """State after some tokens.

    Attributes:
        state: [b, g, r, P, N].
        document: document of the state [b]; None: one.
    """

    state: Array
    document: Array | None


def _by_blocks(
    inputs: Inputs, ids: Array | None, state: State, chunk: int, block: int
) -> tuple[Float[Array, "b s heads p"], State]:
    """Run blocks of chunks one after another; return float32 outputs and the last state."""
    rows, tokens, heads, width = inputs.x.shape
    groups, chunks = inputs.b.shape[2], -(-tokens // chunk)
    # A block holds [rows, heads, Q, Q] scores for each of its chunks. Blocks bound this memory, and
    # are of equal length, so that one program runs all of them.
    largest = block // (rows * heads * chunk * chunk)
    blocks = -(-chunks // max(1, largest))
    per_block = -(-chunks // blocks)
    missing = blocks * per_block * chunk - tokens

    def to_blocks(x: Array, *head_shape: int) -> Array:
        """Return [b, s, ...] as [blocks, b, chunks, Q, *head_shape]."""
        # Tokens with a time step of 0 fill the last chunk: they change no state.
        x = jnp.pad(x, ((0, 0), (0, missing), *((0, 0) for _ in x.shape[2:])))
        x = x.reshape(rows, blocks, per_block, chunk, *head_shape)
        return x.swapaxes(0, 1)

    if ids is not None:  # the filling tokens belong to the last document
        ids = jnp.pad(ids, ((0, 0), (0, missing)), mode="edge")
        ids = ids.reshape(rows, blocks, per_block, chunk).swapaxes(0, 1)
    of_heads = (groups, heads // groups)
    xs = _Chunks(
        to_blocks(inputs.x, *of_heads, width), to_blocks(inputs.dt, *of_heads),
        to_blocks(inputs.dt * inputs.a, *of_heads), to_blocks(inputs.b, groups, -1),
        to_blocks(inputs.c, groups, -1), ids,
    )  # fmt: skip
    carry = _Carry(
        state.reshape(rows, *of_heads, *state.shape[2:]),
        None if ids is None else ids[0, :, 0, 0],  # a state belongs to the first document
    )
    if blocks == 1:
        carry, y = _run_block(carry, jax.tree.map(lambda x: x[0], xs))
        y = y[None]
    else:
        carry, y = jax.lax.scan(_run_block, carry, xs)
    y = y.swapaxes(0, 1).reshape(rows, -1, heads, width)[:, :tokens]
    return y, carry.state.reshape(state.shape)


@functools.partial(jax.checkpoint, prevent_cse=False)
def _run_block(carry: _Carry, chunks: _Chunks) -> tuple[_Carry, Array]:
    """Run a block of chunks; return the state after it and its outputs [b, chunks, Q, g, r, P]."""
    x, dt, log_decay, b, c, ids = chunks
    if ids is None:
        documents = None
        # exp(total) decays a state in front of the chunk to a token, exp(total[-1] - total) a token
        # to the end. Both are at most 1, because A < 0: nothing overflows.
        total = jnp.cumsum(log_decay, axis=2)  # c_t [b, chunks, Q, g, r]
        to_end, from_start = jnp.exp(total[:, :, -1:] - total) * dt, jnp.exp(total)
    else:
        assert carry.document is not None
        last = ids[:, :, -1]  # document of the state after each chunk
        before = jnp.concatenate([carry.document[:, None], last[:, :-1]], axis=1)
        documents = jnp.concatenate([before, last[:, -1:]], axis=1)  # of each state [b, chunks + 1]
        total = _sums_in_documents(log_decay, ids, before)
        # Only tokens of the last document reach the state behind the chunk, and only those of the
        # document in front of the chunk see the state in front of it.
        is_last = _of_heads(ids == last[:, :, None])
        to_end = jnp.exp(jnp.where(is_last, total[:, :, -1:] - total, -jnp.inf)) * dt
        from_start = jnp.where(_of_heads(ids == before[:, :, None]), jnp.exp(total), 0)
    float_ = dt.dtype
    # The product is in the dtype of x, its sum in float32: the states are sums over many chunks.
    weighted = (x.astype(float_) * to_end[..., None]).astype(x.dtype)
    added = jnp.einsum("bzugn,bzugrp->bzgrpn", b, weighted, preferred_element_type=float_)
    states = _pass_on(carry.state, added, total[:, :, -1], documents)
    y = _of_states(c, states[:, :-1].astype(x.dtype), from_start) + _inside(chunks, total)
    return _Carry(states[:, -1], None if documents is None else documents[:, -1]), y


def _sums_in_documents(
    x: Float[Array, "b z u g r"], ids: Int[Array, "b z u"], before: Int[Array, "b z"]
) -> Float[Array, "b z t g r"]:
    """Return sums over the tokens of each chunk that restart behind the first token of a document.

    With a sum over the chunk, later documents would add to the gradient of an earlier one what is
    left of their own: zero but for rounding. The first token of a document decays no state.

    Args:
        x: summands.
        ids: documents of the tokens.
        before: document of the token before each chunk.
    """
    previous = jnp.concatenate([before[:, :, None], ids[:, :, :-1]], axis=2)
    is_added = _is_earlier_in_document(ids) & (ids == previous)[:, :, None]
    return jnp.einsum("bztu,bzugr->bztgr", is_added.astype(x.dtype), x, precision="highest")


def _is_earlier_in_document(ids: Int[Array, "*b t"]) -> Bool[Array, "*b t u"]:
    """Return whether u is in the document of t, and not after it."""
    return jnp.tril(ids[..., :, None] == ids[..., None, :])


def _pass_on(
    state: Array, added: Array, log_decay: Array, documents: Array | None
) -> Float[Array, "b z g r p n"]:
    """Return the states in front of each chunk, and after the last.

    State i is that in front of chunk i. From what chunk j - 1 has added, the decay to it is
    exp(sum of a over chunks j … i - 1):

        from, to     0     1      2         3
        state        1     e0     e0 e1     e0 e1 e2
        chunk 0            1      e1        e1 e2
        chunk 1                   1         e2

    Args:
        state: state in front of the first chunk [b, g, r, P, N].
        added: states that the chunks add [b, z, g, r, P, N].
        log_decay: sum of a over each chunk [b, z, g, r].
        documents: document of each state [b, z + 1]; None: one.
    """
    if documents is None:
        sums = jnp.pad(jnp.cumsum(log_decay, axis=1), ((0, 0), (1, 0), (0, 0), (0, 0)))
        decay = _decays(sums)  # [b, to, from, g, r]
    else:
        of_chunks = jnp.pad(log_decay, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, None]
        sums = _sums_in_documents(of_chunks, documents[:, None], documents[:, :1])[:, 0]
        decay = _decays(sums, _of_heads(_is_earlier_in_document(documents)))
    if added.shape[1] == 1:
        # One chunk: the product below would have two summands.
        after = decay[:, 1, 0, ..., None, None] * state + added[:, 0]
        return jnp.stack([state, after], axis=1)
    states = jnp.concatenate([state[:, None], added], axis=1)
    return jnp.einsum("bijgr,bjgrpn->bigrpn", decay, states, precision="highest")


def _of_states(c: Array, states: Array, decay: Array) -> Array:
    """Return the outputs of states [b, z, g, r, P, N], decayed to each token [b, z, Q, g, r]."""
    y = jnp.einsum("bztgn,bzgrpn->bztgrp", c, states, preferred_element_type=decay.dtype)
    return y * decay[..., None]


def _inside(chunks: _Chunks, total: Array) -> Array:
    """Return the outputs of the tokens of the same chunk."""
    x, dt, _, b, c, ids = chunks
    scores = jnp.einsum("bztgn,bzugn->bzgtu", c, b, preferred_element_type=total.dtype)
    is_seen = None if ids is None else _is_earlier_in_document(ids)[:, :, None, None]
    decay = _decays(total.transpose(0, 1, 3, 4, 2), is_seen, tokens_last=True)  # [b, z, g, r, t, u]
    # [b, z, g, r, t, u]: the largest array of a block. Scores are per group, decays per head.
    weights = scores[:, :, :, None] * decay * dt.transpose(0, 1, 3, 4, 2)[..., None, :]
    return jnp.einsum(
        "bzgrtu,bzugrp->bztgrp", weights.astype(x.dtype), x, preferred_element_type=total.dtype
    )


def _decays(
    total: Array, is_seen: Bool[Array, "..."] | None = None, *, tokens_last: bool = False
) -> Array:
    """Return exp(c_i - c_j) where j is seen by i, by default for j ≤ i, and 0 for others."""
    axis = total.ndim - 1 if tokens_last else 1
    later, earlier = jnp.expand_dims(total, axis + 1), jnp.expand_dims(total, axis)
    length = total.shape[axis]
    shape = (length, length) if tokens_last else (length, length, 1, 1)
    is_before: Array | np.ndarray = np.tri(length, k=-1, dtype=bool).reshape(shape)
    if is_seen is not None:
        is_before = is_seen & is_before
    # Masked before exp: the differences of later tokens are positive and may overflow. That of a
    # token to itself is a constant: its gradients, the largest of all, would cancel but for
    # rounding.
    itself = np.where(np.eye(length), 0, -np.inf).astype(total.dtype).reshape(shape)
    return jnp.exp(jnp.where(is_before, later - earlier, itself))


def _of_heads(x: Array) -> Array:
    return x[..., None, None]


class _Summary(NamedTuple):
    """Effect of a part of a sequence on a state: state -> decay · state + added.

    Attributes:
        decay: [b, heads]; 0 if the part begins or contains another document.
        added: state [b, heads, P, N] from an empty state.
    """

    decay: Array
    added: Array


def _combine(earlier: _Summary, later: _Summary) -> _Summary:
    added = later.decay[..., None, None] * earlier.added + later.added
    return _Summary(later.decay * earlier.decay, added)


def _output_of_earlier_parts(
    inputs: Inputs, ids: Array | None, after: State, strategy: str
) -> Float[Array, "p t heads w"]:
    """Return the outputs of the state in front of each part.

    Args:
        inputs: inputs of the parts.
        ids: documents of the parts' tokens; None: one.
        after: state after each part from an empty state.
        strategy: how devices share sequences.
    """
    total = jnp.cumsum(inputs.dt * inputs.a, axis=1)  # [p, t, heads]
    # A part was computed from an empty state. Its outputs are linear in the state, so the output of
    # the real one is added.
    decay, from_start = jnp.exp(total[:, -1]), jnp.exp(total)
    if ids is not None:
        # A document that began in this part sees no state of earlier parts.
        before = from_previous_part(ids[:, -1], strategy)[:, None]
        from_start = jnp.where((ids == before)[..., None], from_start, 0)
        decay = jnp.where(ids[:, -1:] == before, decay, 0)
    rows = len(after) // parts_per_device(strategy)
    first = _Summary(jnp.ones_like(decay[:rows]), jnp.zeros_like(after[:rows]))
    state = combine_before(_combine, _Summary(decay, after), first, strategy).added
    groups = inputs.b.shape[2]
    grouped = state.reshape(len(state), 1, groups, -1, *state.shape[2:])
    decays = from_start.reshape(*from_start.shape[:2], groups, -1)[:, None]
    y = _of_states(inputs.c[:, None], grouped.astype(inputs.x.dtype), decays)
    return y.reshape(inputs.x.shape)
