"""Attention kernels of `flash.py` for GPUs, in Pallas with Triton lowering.

Each program has one block of queries or keys, and visits blocks of the other kind: first the wholly
visible blocks, then those that need a mask. Exponentials use base 2 instead of e.

Q: queries of a block; T: keys of a block; H, V: head of queries and of values in memory, powers of
two.
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
Carry = Any  # carry of a loop
TokenInfo = tuple[Int[Array, "n"], Int[Array, "n"] | None]  # positions, documents


class Tiles(NamedTuple):
    """Block sizes and compiler options of a kernel."""

    queries: int
    keys: int
    warps: int
    stages: int


class KernelConfig(NamedTuple):
    """Compile-time constants of a kernel.

    Attributes:
        tiles: block sizes and compiler options.
        head: width of queries and keys, padded in registers to the next power of two.
        value: width of values, padded to the next power of two as well.
        group: number of query heads of a program.
        scale: factor of query-key products.
        softcap: soft cap of scores; None: none.
    """

    tiles: Tiles
    head: int
    value: int
    group: int
    scale: float
    softcap: float | None

    @property
    def factor(self) -> float:
        """Factor that converts `scores` to exponents of base 2."""
        return LOG2E * (self.scale if self.softcap is None else 1)

    def scores(self, products: Array) -> Array:
        """Return the capped scores of products; without a cap, `factor` includes the scale."""
        if self.softcap is None:
            return products
        x = products * (self.scale / self.softcap)
        return self.softcap * (1 - 2 / (1 + jnp.exp2(2 * LOG2E * x)))  # tanh, also of large x


# Visibility comes from positions and documents only, never from an S x S mask in memory. The blocks
# that a block visits, by its `block_ranges` (first, whole, whole_end, end):
#
# first     whole          whole_end      end
# |  masked  |  no mask     |   masked     |      blocks outside of [first, end) are not visited
class TokenBlock(NamedTuple):
    """References to positions and documents (or None) of queries or keys."""

    positions: Ref
    documents: Ref | None

    def rows(self, rows: Any) -> TokenInfo:  # noqa: ANN401
        """Load positions and documents of rows."""
        return self.positions[rows], None if self.documents is None else self.documents[rows]


def _seen(
    queries: TokenInfo, keys: TokenInfo, window: Ref | None, *, transposed: bool = False
) -> Bool[Array, "Q T"]:
    """Return the mask of visible pairs, [Q, T], or [T, Q] if transposed."""

    def pairs(of_queries: Array, of_keys: Array) -> tuple[Array, Array]:
        if transposed:
            return of_queries[None], of_keys[:, None]
        return of_queries[:, None], of_keys[None]

    seen = visible(*pairs(queries[0], keys[0]), None if window is None else window[0])
    if queries[1] is None or keys[1] is None:
        return seen
    return seen & jnp.equal(*pairs(queries[1], keys[1]))


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
    """Compute output [Q, V] and logsumexp [Q] of a block of queries of one head."""
    # Online softmax in base 2: acc = Σ 2^(s - top) v, total = Σ 2^(s - top), top = running maximum
    # of s = score * factor. One exp2 per score, and no division until the end.
    q_QH = _load(config.head, q_ref)
    of_queries = queries.rows(...)

    def step(block: Array, carry: Carry, *, masked: bool) -> Carry:
        acc_QV, top_Q, total_Q = carry
        rows = pl.ds(block * config.tiles.keys, config.tiles.keys)
        scores_QT = config.scores(triton.dot(q_QH, _load(config.head, k_ref.at[rows, :]).T))
        if masked:
            scores_QT = jnp.where(_seen(of_queries, keys.rows(rows), window), scores_QT, -jnp.inf)
        new_Q = jnp.maximum(top_Q, jnp.max(scores_QT, axis=1) * config.factor)
        # A row that has seen nothing has top = -inf; -inf - -inf would be NaN, so its base is 0.
        base_Q = jnp.where(new_Q == -jnp.inf, 0.0, new_Q) if masked else new_Q
        weights_QT = jnp.exp2(scores_QT * config.factor - base_Q[:, None])
        rescale_Q = jnp.exp2(top_Q - base_Q)
        values_TV = _load(config.value, v_ref.at[rows, :])
        values_QV = triton.dot(weights_QT.astype(values_TV.dtype), values_TV)
        total_Q = total_Q * rescale_Q + jnp.sum(weights_QT, axis=1)
        return acc_QV * rescale_Q[:, None] + values_QV, new_Q, total_Q

    n = config.tiles.queries
    # A sink starts as a score of weight 1 without a value.
    top, total = -jnp.inf, 0.0
    if sinks is not None:
        top, total = sinks[pl.program_id(1)].astype(jnp.float32) * LOG2E, 1.0
    acc_QV = zeros((n, in_memory(config.value)))
    first = acc_QV, jnp.full((n,), top, jnp.float32), jnp.full((n,), total)
    acc_QV, top_Q, total_Q = _visit(block_ranges, step, first)
    # Back to base e: the logsumexp is merged with parts from other kernels.
    lse_ref[...] = top_Q / LOG2E + jnp.log(total_Q)
    _store(config.value, o_ref, acc_QV / jnp.where(total_Q == 0, 1.0, total_Q)[:, None])


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
    q_QH, do_QV = _load(config.head, q_ref), _load(config.value, do_ref)
    of_queries = queries.rows(...)
    lse_Q, delta_Q = lse_ref[...] * LOG2E, delta_ref[...]

    def step(block: Array, dq_QH: Carry, *, masked: bool) -> Carry:
        rows = pl.ds(block * config.tiles.keys, config.tiles.keys)
        k_TH = _load(config.head, k_ref.at[rows, :])
        v_TV = _load(config.value, v_ref.at[rows, :])
        scores_QT = config.scores(triton.dot(q_QH, k_TH.T))
        weights_QT = jnp.exp2(scores_QT * config.factor - lse_Q[:, None])
        if masked:
            weights_QT = jnp.where(_seen(of_queries, keys.rows(rows), window), weights_QT, 0.0)
        # dS = P (dP - δ), with P from the saved logsumexp: nothing of the forward pass is stored
        # per pair.
        ds_QT = weights_QT * (triton.dot(do_QV, v_TV.T) - delta_Q[:, None])
        if config.softcap is not None:
            ds_QT *= soft_cap_slope(scores_QT, config.softcap)
        return dq_QH + triton.dot(ds_QT.astype(k_TH.dtype), k_TH)

    dq_QH = _visit(block_ranges, step, zeros((config.tiles.queries, in_memory(config.head))))
    _store(config.head, dq_ref, dq_QH * config.scale)


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
    """Compute gradients [T, H] of keys and [T, V] of values, summed over `group` query heads.

    Scores are transposed, [T, Q], so that the left operand of products with queries is in
    registers.
    """
    # One program owns a block of keys and sums over all queries that see it, without atomics. A
    # loop runs over the query heads that share this key head.
    k_TH, v_TV = _load(config.head, k_ref), _load(config.value, v_ref)
    of_keys = keys.rows(...)

    def of_head(head: Array, carry: Carry) -> Carry:
        def step(block: Array, carry: Carry, *, masked: bool) -> Carry:
            dk_TH, dv_TV = carry
            rows = pl.ds(block * config.tiles.queries, config.tiles.queries)
            q_QH = _load(config.head, q_ref.at[rows, head, :])
            do_QV = _load(config.value, do_ref.at[rows, head, :])
            scores_TQ = config.scores(triton.dot(k_TH, q_QH.T))
            weights_TQ = jnp.exp2(scores_TQ * config.factor - (lse_ref[head, rows] * LOG2E)[None])
            if masked:
                seen = _seen(queries.rows(rows), of_keys, window, transposed=True)
                weights_TQ = jnp.where(seen, weights_TQ, 0.0)
            dv_TV += triton.dot(weights_TQ.astype(do_QV.dtype), do_QV)
            ds_TQ = weights_TQ * (triton.dot(v_TV, do_QV.T) - delta_ref[head, rows][None])
            if config.softcap is not None:
                ds_TQ *= soft_cap_slope(scores_TQ, config.softcap)
            return dk_TH + triton.dot(ds_TQ.astype(q_QH.dtype), q_QH), dv_TV

        return _visit(block_ranges, step, carry)

    carry = (
        zeros((config.tiles.keys, in_memory(config.head))),
        zeros((config.tiles.keys, in_memory(config.value))),
    )
    if config.group == 1:
        dk_TH, dv_TV = of_head(jnp.int32(0), carry)
    else:
        dk_TH, dv_TV = jax.lax.fori_loop(0, config.group, of_head, carry)
    _store(config.head, dk_ref, dk_TH * config.scale)
    _store(config.value, dv_ref, dv_TV)


def _visit(block_ranges: Ref, step: Callable[..., Carry], carry: Carry) -> Carry:
    """Run `step` on the wholly visible blocks, then on the blocks before and after them."""
    # Two loops instead of a branch in one loop: unmasked blocks need no comparisons.
    first, whole, whole_end, end = (block_ranges[i] for i in range(4))
    n_whole = whole_end - whole
    carry = jax.lax.fori_loop(
        whole, whole_end, lambda block, carry: step(block, carry, masked=False), carry
    )

    def at_edge(i: Array, carry: Carry) -> Carry:
        block = first + i
        return step(jnp.where(block < whole, block, block + n_whole), carry, masked=True)

    return jax.lax.fori_loop(0, end - first - n_whole, at_edge, carry)


def zeros(shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Return the initial value of accumulators."""
    return jnp.zeros(shape, jnp.float32)


def in_memory(width: int) -> int:
    """Return the width of tiles for heads of a width: the next power of two."""
    return pl.next_power_of_2(width)


def _load(width: int, ref: Ref) -> Float[Array, "rows H"]:
    """Load rows of heads, with zeros beyond their width."""
    if width == in_memory(width):
        return triton.load(ref)
    return triton.load(ref, mask=_in_head(width), other=0.0)


def _store(width: int, ref: Ref, value: Float[Array, "rows H"]) -> None:
    mask = None if width == in_memory(width) else _in_head(width)
    triton.store(ref, value.astype(ref.dtype), mask=mask)


def _in_head(width: int) -> Bool[Array, "1 H"]:
    return (jnp.arange(in_memory(width)) < width)[None]
