"""Attention kernels of `flash.py` for GPUs, in Pallas with Triton lowering.

Each program holds one block of queries (or keys) and loops over blocks of keys (or queries): first
over those that are visible as a whole, then over those that need a mask. Exponentials are powers of
two, which GPUs compute natively: exp(s) = 2^(s log2 e).

Q: queries of a block; T: keys of a block; H: width of a head in memory, a power of two.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Int

from jaxforge.kernels.masking import visible
from jaxforge.kernels.scoring import soft_cap_slope

LOG2E = math.log2(math.e)

Ref = Any  # reference to global memory
Carry = Any  # loop carry
TokenArrays = tuple[Int[Array, "n"], Int[Array, "n"] | None]  # positions and documents


class Tiles(NamedTuple):
    """Block sizes and compiler options of a kernel.

    Attributes:
        queries: number of queries of a block.
        keys: number of keys of a block.
        warps: number of warps of a program.
        stages: number of stages of Triton's software pipeline.
    """

    queries: int
    keys: int
    warps: int
    stages: int


class KernelConfig(NamedTuple):
    """Compile-time constants of a kernel.

    Attributes:
        tiles: block sizes and compiler options.
        head: width of heads, padded in memory to the next power of two.
        group: number of query heads that a program of `flash_dkv` sums over.
        scale: factor of the products of queries and keys.
        softcap: cap of the scores; None: no cap.
    """

    tiles: Tiles
    head: int
    group: int
    scale: float
    softcap: float | None

    @property
    def in_memory(self) -> int:
        """Width of a head in memory, H."""
        return pl.next_power_of_2(self.head)

    @property
    def factor(self) -> float:
        """Factor that turns `scores` into exponents of two."""
        return LOG2E * (self.scale if self.softcap is None else 1)

    def scores(self, products: Array) -> Array:
        """Return the capped scores of products; without a cap, `factor` includes the scale."""
        if self.softcap is None:
            return products
        x = products * (self.scale / self.softcap)
        # tanh(x) in a form that does not overflow to NaN: 1 - 2 / (1 + inf) = 1.
        return self.softcap * (1 - 2 / (1 + jnp.exp2(2 * LOG2E * x)))


# Visibility comes from positions and documents only, never from an S x S mask in memory. Each block
# has `block_ranges` (first, whole, whole_end, end) of blocks to visit:
#
# first     whole          whole_end      end
# |  masked  |  no mask     |   masked     |      blocks outside of [first, end) are not visited
class TokenBlock(NamedTuple):
    """References to the positions and documents of queries or keys."""

    positions: Ref
    documents: Ref | None

    def load(self, rows: Any) -> TokenArrays:  # noqa: ANN401
        """Load the positions and documents of some rows."""
        return self.positions[rows], None if self.documents is None else self.documents[rows]


def _visibility(
    queries: TokenArrays, keys: TokenArrays, window: Ref | None, *, transposed: bool = False
) -> Bool[Array, "Q T"]:
    """Return whether each query sees each key, as [Q, T], or as [T, Q] if transposed."""

    def pairs(by_query: Array, by_key: Array) -> tuple[Array, Array]:
        if transposed:
            return by_query[None], by_key[:, None]
        return by_query[:, None], by_key[None]

    is_visible = visible(*pairs(queries[0], keys[0]), None if window is None else window[0])
    if queries[1] is None or keys[1] is None:
        return is_visible
    return is_visible & jnp.equal(*pairs(queries[1], keys[1]))


def flash_forward(
    config: KernelConfig,
    block_ranges: Ref,
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    queries: TokenBlock,
    keys: TokenBlock,
    window: Ref | None,
    sinks: Ref | None,
    o_ref: Ref,
    lse_ref: Ref,
) -> None:
    """Compute output [Q, H] and logsumexp [Q] of a block of queries of one head."""
    # Online softmax in base 2: acc = Σ 2^(s - top) v, total = Σ 2^(s - top), top = running maximum
    # of s = score * factor. One exp2 per score, and no division until the end.
    q_QH = _load(config, q_ref)
    query_tokens = queries.load(...)

    def step(block: Array, carry: Carry, *, masked: bool) -> Carry:
        acc_QH, top_Q, total_Q = carry
        rows = pl.ds(block * config.tiles.keys, config.tiles.keys)
        scores_QT = config.scores(triton.dot(q_QH, _load(config, k_ref.at[rows, :]).T))
        if masked:
            is_visible_QT = _visibility(query_tokens, keys.load(rows), window)
            scores_QT = jnp.where(is_visible_QT, scores_QT, -jnp.inf)
        new_Q = jnp.maximum(top_Q, jnp.max(scores_QT, axis=1) * config.factor)
        # A row that has seen nothing has top = -inf; -inf - -inf would be NaN, so its base is 0.
        base_Q = jnp.where(new_Q == -jnp.inf, 0.0, new_Q) if masked else new_Q
        weights_QT = jnp.exp2(scores_QT * config.factor - base_Q[:, None])
        rescale_Q = jnp.exp2(top_Q - base_Q)  # of earlier blocks, to the new maximum
        values_TH = _load(config, v_ref.at[rows, :])
        weighted_QH = triton.dot(weights_QT.astype(values_TH.dtype), values_TH)
        total_Q = total_Q * rescale_Q + jnp.sum(weights_QT, axis=1)
        return acc_QH * rescale_Q[:, None] + weighted_QH, new_Q, total_Q

    n = config.tiles.queries
    # A sink starts as a score of weight 1 without a value.
    top, total = -jnp.inf, 0.0
    if sinks is not None:
        top, total = sinks[pl.program_id(1)].astype(jnp.float32) * LOG2E, 1.0
    carry = zeros((n, config.in_memory)), jnp.full((n,), top, jnp.float32), jnp.full((n,), total)
    acc_QH, top_Q, total_Q = _loop_over_blocks(block_ranges, step, carry)
    # Back to base e: the logsumexp is merged with parts from other kernels.
    lse_ref[...] = top_Q / LOG2E + jnp.log(total_Q)
    # Rows that see nothing have acc = total = 0: their output is 0, not 0 / 0.
    _store(config, o_ref, acc_QH / jnp.where(total_Q == 0, 1.0, total_Q)[:, None])


def flash_dq(
    config: KernelConfig,
    block_ranges: Ref,
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    queries: TokenBlock,
    keys: TokenBlock,
    window: Ref | None,
    do_ref: Ref,
    lse_ref: Ref,
    delta_ref: Ref,
    dq_ref: Ref,
) -> None:
    """Compute the gradient [Q, H] of a block of queries of one head."""
    q_QH, do_QH = _load(config, q_ref), _load(config, do_ref)
    query_tokens = queries.load(...)
    lse_Q, delta_Q = lse_ref[...] * LOG2E, delta_ref[...]

    def step(block: Array, dq_QH: Carry, *, masked: bool) -> Carry:
        rows = pl.ds(block * config.tiles.keys, config.tiles.keys)
        k_TH, v_TH = _load(config, k_ref.at[rows, :]), _load(config, v_ref.at[rows, :])
        scores_QT = config.scores(triton.dot(q_QH, k_TH.T))
        weights_QT = jnp.exp2(scores_QT * config.factor - lse_Q[:, None])
        if masked:
            is_visible_QT = _visibility(query_tokens, keys.load(rows), window)
            weights_QT = jnp.where(is_visible_QT, weights_QT, 0.0)
        # dS = P (dP - δ), with P recomputed from the saved logsumexp: the forward pass stores
        # nothing per pair of tokens.
        ds_QT = weights_QT * (triton.dot(do_QH, v_TH.T) - delta_Q[:, None])
        if config.softcap is not None:
            ds_QT *= soft_cap_slope(scores_QT, config.softcap)
        return dq_QH + triton.dot(ds_QT.astype(k_TH.dtype), k_TH)

    dq_QH = _loop_over_blocks(block_ranges, step, zeros((config.tiles.queries, config.in_memory)))
    _store(config, dq_ref, dq_QH * config.scale)  # S = scale * Q Kᵀ


def flash_dkv(
    config: KernelConfig,
    block_ranges: Ref,
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    queries: TokenBlock,
    keys: TokenBlock,
    window: Ref | None,
    do_ref: Ref,
    lse_ref: Ref,
    delta_ref: Ref,
    dk_ref: Ref,
    dv_ref: Ref,
) -> None:
    """Compute gradients [T, H] of a block of keys and values, summed over `group` query heads.

    Scores are transposed, [T, Q], so that the left operands of the products for dK and dV are
    already in registers.
    """
    # One program owns a block of keys and sums over all queries that see it, without atomics. A
    # loop runs over the query heads of the program.
    k_TH, v_TH = _load(config, k_ref), _load(config, v_ref)
    key_tokens = keys.load(...)

    def add_head(head: Array, carry: Carry) -> Carry:
        def step(block: Array, carry: Carry, *, masked: bool) -> Carry:
            dk_TH, dv_TH = carry
            rows = pl.ds(block * config.tiles.queries, config.tiles.queries)
            q_QH = _load(config, q_ref.at[rows, head, :])
            do_QH = _load(config, do_ref.at[rows, head, :])
            scores_TQ = config.scores(triton.dot(k_TH, q_QH.T))
            weights_TQ = jnp.exp2(scores_TQ * config.factor - (lse_ref[head, rows] * LOG2E)[None])
            if masked:
                tokens = queries.load(rows)
                is_visible_TQ = _visibility(tokens, key_tokens, window, transposed=True)
                weights_TQ = jnp.where(is_visible_TQ, weights_TQ, 0.0)
            dv_TH += triton.dot(weights_TQ.astype(do_QH.dtype), do_QH)
            ds_TQ = weights_TQ * (triton.dot(v_TH, do_QH.T) - delta_ref[head, rows][None])
            if config.softcap is not None:
                ds_TQ *= soft_cap_slope(scores_TQ, config.softcap)
            return dk_TH + triton.dot(ds_TQ.astype(q_QH.dtype), q_QH), dv_TH

        return _loop_over_blocks(block_ranges, step, carry)

    carry = (
        zeros((config.tiles.keys, config.in_memory)),
        zeros((config.tiles.keys, config.in_memory)),
    )
    if config.group == 1:
        dk_TH, dv_TH = add_head(jnp.int32(0), carry)
    else:
        dk_TH, dv_TH = jax.lax.fori_loop(0, config.group, add_head, carry)
    _store(config, dk_ref, dk_TH * config.scale)
    _store(config, dv_ref, dv_TH)


def _loop_over_blocks(block_ranges: Ref, step: Callable[..., Carry], carry: Carry) -> Carry:
    """Run `step` over [whole, whole_end) without a mask, then over the other blocks with one."""
    # Two loops instead of a branch in one: unmasked blocks, the majority, need no comparisons.
    first, whole, whole_end, end = (block_ranges[i] for i in range(4))
    n_whole = whole_end - whole
    carry = jax.lax.fori_loop(
        whole, whole_end, lambda block, carry: step(block, carry, masked=False), carry
    )

    def masked_step(i: Array, carry: Carry) -> Carry:
        block = first + i
        return step(jnp.where(block < whole, block, block + n_whole), carry, masked=True)

    return jax.lax.fori_loop(0, end - first - n_whole, masked_step, carry)


def zeros(shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Return the initial value of accumulators."""
    return jnp.zeros(shape, jnp.float32)


def _load(config: KernelConfig, ref: Ref) -> Float[Array, "rows H"]:
    """Load rows of a head, padded with zeros to its width in memory."""
    if config.head == config.in_memory:
        return triton.load(ref)
    return triton.load(ref, mask=_in_head(config), other=0.0)


def _store(config: KernelConfig, ref: Ref, value: Float[Array, "rows H"]) -> None:
    mask = None if config.head == config.in_memory else _in_head(config)
    triton.store(ref, value.astype(ref.dtype), mask=mask)


def _in_head(config: KernelConfig) -> Bool[Array, "1 H"]:
    return (jnp.arange(config.in_memory) < config.head)[None]
