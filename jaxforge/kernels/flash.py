"""Flash attention for GPUs in Pallas (Triton), which skips blocks of keys that no query sees.

Visibility follows from the positions and documents of queries and keys, without an S x S mask: a
query sees the keys at or before it, of its document, among the last `window` tokens. Minimum and
maximum of both in each block determine, before the kernel runs, the blocks that are visited and
those that need no mask. Causality, windows and packed documents skip blocks, in gradients as well.

Queries and keys may be different parts of a sequence. `forward` returns the logsumexp, by which
results over several parts of the keys are merged, and `backward` takes the logsumexp of all parts.

    forward, for a block of queries        P = exp(S - m)     O = Σ P V / Σ P
    backward, for a block of queries       dS = P ∘ (dO Vᵀ - δ)    dQ = Σ dS K / √h
    backward, for a block of keys          dK = Σ dSᵀ Q / √h       dV = Σ Pᵀ dO

δ = rowsum(dO ∘ O). Sums are float32 (Dao 2023, FlashAttention-2, arXiv:2307.08691). Query heads
that share a key head read the same keys in memory.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from jaxforge.kernels import flash_kernels
from jaxforge.kernels.flash_blocks import (
    AFTER,
    BEFORE,
    TokenPositions,
    block_ranges,
    block_visibility,
    pad_to_blocks,
    pad_tokens,
)
from jaxforge.kernels.flash_kernels import KernelConfig, Tiles, TokenBlock, in_memory
from jaxforge.kernels.masking import chunk_ids
from jaxforge.kernels.scoring import PLAIN, Scoring, sink_gradients

MAX_HEAD = 256
"""Maximum width of queries and of values: tiles of wider heads do not fit into shared memory."""

INTERPRET = False  # tests set it, to run the kernels without a GPU
_SMALLEST = 16  # minimum rows of a tensor core product
PROGRAMS = 132  # multiprocessors of an H100

Queries = Float[Array, "b s heads h"]
Keys = Float[Array, "b t kv h"]
Values = Float[Array, "b t kv hv"]
Output = Float[Array, "b s heads hv"]
Rows = Float[Array, "b heads s"]
Sinks = Float[Array, "heads"] | None
Window = int | Int[Array, ""] | None


def flash_attention(
    q_BSHh: Queries,
    k_BSKh: Keys,
    v_BSKh: Values,
    segment_ids: Int[Array, "b s"] | None,
    window: int | None = None,
    chunk: int | None = None,
    scoring: Scoring = PLAIN,
    sinks: Sinks = None,
) -> Output:
    """Compute softmax(q kᵀ / √h) v over visible keys: earlier, same document, window and chunk.

    `sinks` are extra logits that join the scores of each query and take a part of the weight. Heads
    are at most `MAX_HEAD` wide.
    """
    batch, length = q_BSHh.shape[:2]
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    if chunk is not None:
        segment_ids = chunk_ids(batch, length, chunk, segment_ids, positions)
    # A chunk is a document as far as visibility goes: chunk ids replace document ids.
    at = TokenPositions(positions, segment_ids)
    return _attention(window, scoring, (q_BSHh, k_BSKh, v_BSKh, at, sinks))


_Inputs = tuple[Array, Array, Array, TokenPositions, Sinks]
"""Queries, keys, values, tokens of both, and sinks."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(window: int | None, scoring: Scoring, inputs: _Inputs) -> Array:
    return _attend(window, scoring, inputs)[0]


def _attend(window: int | None, scoring: Scoring, inputs: _Inputs) -> tuple[Array, tuple]:
    q, k, v, at, sinks = inputs
    output, lse = forward(q, k, v, at, at, window, scoring, sinks)
    return output, (inputs, output, lse)


def _differentiate(
    window: int | None, scoring: Scoring, saved: tuple, d_output: Array
) -> tuple[tuple[Array, Array, Array, None, Sinks]]:
    (q, k, v, at, sinks), output, lse = saved
    delta = compute_delta(output, d_output)
    gradients = backward(q, k, v, at, at, lse, delta, d_output, window, scoring)
    return ((*gradients, None, sink_gradients(sinks, lse, delta)),)


_attention.defvjp(_attend, _differentiate)


def compute_delta(output: Output, d_output: Output) -> Rows:
    """Compute rowsum(dO ∘ O) in float32, [b, heads, s]."""
    product = d_output.astype(jnp.float32) * output.astype(jnp.float32)
    return jnp.sum(product, axis=-1).swapaxes(1, 2)


def forward(
    q_BSHh: Queries,
    k_BTKh: Keys,
    v_BTKh: Values,
    queries: TokenPositions,
    keys: TokenPositions,
    window: Window = None,
    scoring: Scoring = PLAIN,
    sinks: Sinks = None,
    dtype: jnp.dtype | None = None,
) -> tuple[Output, Rows]:
    """Attend with queries over a part of the keys; no gradient is defined.

    Args:
        q_BSHh: queries.
        k_BTKh: keys; each of their heads serves a group of consecutive query heads.
        v_BTKh: values.
        queries: positions and documents of the queries.
        keys: positions and documents of the keys.
        window: number of positions that a query sees, including its own; may be an array. None:
            all up to its own.
        scoring: scale and soft cap of the scores.
        sinks: an extra logit per head that joins the scores.
        dtype: dtype of the result; None: the dtype of q.

    Returns:
        The result, and the logsumexp of the scores including sinks, in float32. For a query without
        visible keys they are 0 and -inf, or the sink.
    """
    padded = _PaddedInputs.of("forward", q_BSHh, k_BTKh, v_BTKh, queries, keys, window, scoring)
    at, (batch, length, heads, _) = _query_layout(padded), padded.q.shape
    result = jax.ShapeDtypeStruct((batch, length, heads, v_BTKh.shape[3]), dtype or padded.q.dtype)
    of_rows = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
    o, lse = _run(
        flash_kernels.flash_forward, padded.config, at.grid,
        [*at.arguments, _whole_vector(sinks)], [(at.values, result), (at.rows, of_rows)],
    )  # fmt: skip
    n = q_BSHh.shape[1]
    return o[:, :n], lse[..., :n]


def backward(
    q_BSHh: Queries,
    k_BTKh: Keys,
    v_BTKh: Values,
    queries: TokenPositions,
    keys: TokenPositions,
    lse: Rows,
    delta: Rows,
    d_output: Output,
    window: Window = None,
    scoring: Scoring = PLAIN,
    dtype: jnp.dtype | None = None,
) -> tuple[Queries, Keys, Values]:
    """Compute the gradients of queries, keys and values for a part of the keys.

    Args:
        q_BSHh: queries.
        k_BTKh: keys.
        v_BTKh: values.
        queries: positions and documents of the queries.
        keys: positions and documents of the keys.
        lse: logsumexp over all visible keys, including keys of other parts.
        delta: `compute_delta` of the result over all visible keys.
        d_output: gradient of the result.
        window: number of positions that a query sees.
        scoring: scale and soft cap of the scores.
        dtype: dtype of the gradients, which callers may sum over parts; None: the dtype of q.

    Returns:
        Gradients of q, k and v.
    """
    dtype = dtype or q_BSHh.dtype
    arrays = q_BSHh, k_BTKh, v_BTKh, queries, keys
    # Tensor cores multiply dO with K, Q and V in their dtype; lse and δ stay in float32.
    of_rows = d_output.astype(q_BSHh.dtype), lse, delta
    padded = _PaddedInputs.of("dq", *arrays, window, scoring)
    at = _query_layout(padded)
    d_filled, lse_filled, delta_filled = padded.pad_backward_inputs(*of_rows)
    (dq,) = _run(
        flash_kernels.flash_dq, padded.config, at.grid,
        [*at.arguments, (at.values, d_filled), (at.rows, lse_filled), (at.rows, delta_filled)],
        [(at.heads, jax.ShapeDtypeStruct(padded.q.shape, dtype))],
    )  # fmt: skip
    # dq and dkv have different tiles, so queries and keys are padded again.
    padded = _PaddedInputs.of("dkv", *arrays, window, scoring)
    dk, dv = _gradients_of_keys(padded, *padded.pad_backward_inputs(*of_rows), dtype)
    t = k_BTKh.shape[1]
    return dq[:, : q_BSHh.shape[1]], dk[:, :t], dv[:, :t]


def _gradients_of_keys(
    padded: "_PaddedInputs", d_output: Array, lse: Array, delta: Array, dtype: jnp.dtype
) -> tuple[Array, Array]:
    """Compute the gradients of keys and values."""
    (batch, length, kv, _), config = padded.k.shape, padded.config
    group = padded.q.shape[2] // kv
    # Enough programs to fill the GPU: one program sums over all query heads of a key head.
    # Otherwise one program per query head, and a sum in float32 afterwards.
    if batch * kv * (length // config.tiles.keys) >= PROGRAMS:
        config = config._replace(group=group)
    parts = group // config.group
    at = _key_layout(padded._replace(config=config), parts)
    # Sums over parts are rounded once, at the end.
    summed = dtype if parts == 1 else jnp.float32
    of_heads = batch, length, kv * parts
    dk, dv = _run(
        flash_kernels.flash_dkv, config, at.grid,
        [*at.arguments, (at.of_d_output, d_output), (at.rows, lse), (at.rows, delta)],
        [(spec, jax.ShapeDtypeStruct((*of_heads, width), summed))
         for spec, width in ((at.heads, config.head), (at.values, config.value))],
    )  # fmt: skip
    if parts == 1:
        return dk, dv
    of_parts = batch, length, kv, parts, -1
    dk, dv = (jnp.sum(x.reshape(of_parts), axis=3).astype(dtype) for x in (dk, dv))
    return dk, dv


class _PaddedInputs(NamedTuple):
    """Inputs of all kernels, padded to whole blocks."""

    config: KernelConfig
    q: Array
    k: Array
    v: Array
    queries: TokenPositions
    keys: TokenPositions
    window: Int[Array, "1"] | None

    @classmethod
    def of(
        cls,
        kernel: str,
        q: Array,
        k: Array,
        v: Array,
        queries: TokenPositions,
        keys: TokenPositions,
        window: Window,
        scoring: Scoring,
    ) -> "_PaddedInputs":
        head, value = q.shape[3], v.shape[3]
        tiles = tile_sizes(kernel, max(head, value), q.shape[1], k.shape[1])
        config = KernelConfig(tiles, head, value, 1, scoring.scale_of(head), scoring.softcap)
        # The window is an input array of one element, because only the device may know it (pipeline
        # stages with different masks).
        reach = None if window is None else jnp.asarray(window, jnp.int32).reshape(1)
        k, v = (pad_to_blocks(x, tiles.keys) for x in (k, v))
        queries = pad_tokens(queries, tiles.queries, BEFORE)
        keys = pad_tokens(keys, tiles.keys, AFTER)
        return cls(config, pad_to_blocks(q, tiles.queries), k, v, queries, keys, reach)

    def pad_backward_inputs(
        self, d_output: Array, lse: Array, delta: Array
    ) -> tuple[Array, Array, Array]:
        """Pad the per-query inputs of the backward kernels to whole blocks."""
        n = self.config.tiles.queries
        return (
            pad_to_blocks(d_output, n),
            pad_to_blocks(lse, n, axis=2),
            pad_to_blocks(delta, n, axis=2),
        )


def tile_sizes(kernel: str, head: int, queries: int, keys: int) -> Tiles:
    """Return tiles for a width of heads that fit registers and 160 KiB of shared memory."""
    # (queries, keys, warps, stages) for heads up to 64, up to 128, and up to `MAX_HEAD` wide.
    narrow, wide, widest = {
        "forward": (Tiles(128, 64, 4, 3), Tiles(128, 64, 8, 3), Tiles(128, 32, 8, 2)),
        "dq": (Tiles(128, 64, 4, 3), Tiles(128, 64, 8, 2), Tiles(64, 32, 8, 2)),
        "dkv": (Tiles(64, 128, 8, 3), Tiles(64, 128, 8, 2), Tiles(32, 64, 8, 2)),
    }[kernel]
    tiles = narrow if head <= 64 else wide if head <= 128 else widest
    # Short sequences get smaller tiles: a power of two, as Triton requires.
    fit = (max(_SMALLEST, pl.next_power_of_2(n)) for n in (queries, keys))
    return tiles._replace(queries=min(tiles.queries, next(fit)), keys=min(tiles.keys, next(fit)))


class _Layout(NamedTuple):
    """Grid, inputs and block specs of a kernel."""

    grid: tuple[int, int, int]
    arguments: list[tuple[Any, Any]]
    heads: pl.BlockSpec
    values: pl.BlockSpec
    of_d_output: pl.BlockSpec
    rows: pl.BlockSpec


# What one program (i, h, b) of each layout reads and writes, with blocks of n queries or keys; the
# last dimension is H for q, k and their gradients, and V for v, o and theirs:
#
#              by queries (forward, dq)       by keys (dkv)
# q, dO        block [n, ·] of head h         all queries of `group` heads from h * group on
# k, v         all keys of head h // group    block [n, ·] of head h // parts
# lse, δ       block [n] of head h            all queries of these heads
# results      block [n, ·] of o or dq        block [n, ·] of dk and dv, for part h % parts
def _query_layout(padded: _PaddedInputs) -> _Layout:
    """Return the layout with one program per block of queries and head."""
    config = padded.config
    batch, length, heads, _ = padded.q.shape
    n = padded.config.tiles.queries
    keys, group, last = padded.k.shape[1], heads // padded.k.shape[2], length // n - 1
    # Causal: the last blocks of queries visit the most keys. `last - i` starts them first, which
    # balances the tail of the grid.
    ranges = block_ranges(*_block_visibility(padded))
    of_q, of_o = (
        _spec((None, n, None, in_memory(width)), lambda i, h, b: (b, last - i, h, 0))
        for width in (config.head, config.value)
    )
    of_k, of_v = (
        _spec(
            (None, keys, None, in_memory(width)), lambda _, h, b: (b, 0, jax.lax.div(h, group), 0)
        )
        for width in (config.head, config.value)
    )
    arguments = [
        (_spec((None, None, 4), lambda i, _, b: (b, last - i, 0)), ranges),
        (of_q, padded.q), (of_k, padded.k), (of_v, padded.v),
        _token_block(padded.queries, _spec((None, n), lambda i, _, b: (b, last - i))),
        _token_block(padded.keys, _spec((None, keys), lambda _, h, b: (b, 0))),
        _whole_vector(padded.window),
    ]  # fmt: skip
    rows = _spec((None, None, n), lambda i, h, b: (b, h, last - i))
    return _Layout((last + 1, heads, batch), arguments, of_q, of_o, of_o, rows)


def _key_layout(padded: _PaddedInputs, parts: int) -> _Layout:
    """Return the layout with one program per block of keys and part of a key head's query heads."""
    config, (batch, length, kv, _), n = padded.config, padded.k.shape, padded.config.tiles.keys
    queries, group = padded.q.shape[1], config.group
    ranges = block_ranges(*(x.swapaxes(1, 2) for x in _block_visibility(padded)))
    of_q, of_d_output = (
        _spec((None, queries, group, in_memory(width)), lambda _, h, b: (b, 0, h, 0))
        for width in (config.head, config.value)
    )
    of_k, of_v = (
        _spec((None, n, None, in_memory(width)), lambda i, h, b: (b, i, jax.lax.div(h, parts), 0))
        for width in (config.head, config.value)
    )
    arguments = [
        (_spec((None, None, 4), lambda i, _, b: (b, i, 0)), ranges),
        (of_q, padded.q), (of_k, padded.k), (of_v, padded.v),
        _token_block(padded.queries, _spec((None, queries), lambda _, h, b: (b, 0))),
        _token_block(padded.keys, _spec((None, n), lambda i, _, b: (b, i))),
        _whole_vector(padded.window),
    ]  # fmt: skip
    heads, values = (
        _spec((None, n, None, in_memory(width)), lambda i, h, b: (b, i, h, 0))
        for width in (config.head, config.value)
    )
    rows = _spec((None, group, queries), lambda _, h, b: (b, h, 0))
    grid = length // n, kv * parts, batch
    return _Layout(grid, arguments, heads, values, of_d_output, rows)


def _block_visibility(padded: _PaddedInputs) -> tuple[Array, Array]:
    window = None if padded.window is None else padded.window[0]
    return block_visibility(padded.queries, padded.keys, padded.config.tiles[:2], window)


_spec = pl.BlockSpec


def _token_block(tokens: TokenPositions, spec: pl.BlockSpec) -> tuple[TokenBlock, TokenBlock]:
    return TokenBlock(spec, None if tokens.documents is None else spec), TokenBlock(*tokens)


def _whole_vector(x: Array | None) -> tuple[pl.BlockSpec | None, Array | None]:
    """Return the block spec of a vector that every program reads whole."""
    return None if x is None else _spec(x.shape, lambda *_: (0,)), x


def _run(
    kernel: Callable[..., None],
    config: KernelConfig,
    grid: tuple[int, int, int],
    arguments: list[tuple[Any, Any]],
    results: list[tuple[pl.BlockSpec, Any]],
) -> list[Array]:
    """Run a kernel over a grid; `arguments` and `results` are pairs of block spec and array."""
    return pl.pallas_call(
        functools.partial(kernel, config),
        grid=grid,
        in_specs=[spec for spec, _ in arguments],
        out_specs=[spec for spec, _ in results],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for _, x in results],
        compiler_params=triton.CompilerParams(
            num_warps=config.tiles.warps, num_stages=config.tiles.stages
        ),
        interpret=INTERPRET,
        name=kernel.__name__,
    )(*(array for _, array in arguments))
