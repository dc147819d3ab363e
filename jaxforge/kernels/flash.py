"""Flash attention for GPUs, in Pallas (Triton), which skips invisible blocks of keys.

Visibility is computed from positions and documents of queries and keys, without an S x S mask: a
query sees the keys at or before it, of its document, among the last `window`. The least and
greatest position and document of each block determine, before the kernel runs, which blocks it
visits and which of them need no mask. So causality, windows and packed documents all save
computation, in gradients too.

Queries and keys may belong to different parts of a sequence. `forward` returns the logsumexp, by
which results over several parts of the keys are merged. `backward` takes the merged logsumexp.

    forward, for a block of queries        P = exp(S - m)     O = Σ P V / Σ P
    backward, for a block of queries       dS = P ∘ (dO Vᵀ - δ)    dQ = Σ dS K / √h
    backward, for a block of keys          dK = Σ dSᵀ Q / √h       dV = Σ Pᵀ dO

δ = rowsum(dO ∘ O). Sums are float32 (Dao 2023, FlashAttention-2, arXiv:2307.08691). Query heads
that share a key head read the same keys.
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
from jaxforge.kernels.flash_kernels import KernelConfig, Tiles, TokenBlock
from jaxforge.kernels.masking import chunk_ids
from jaxforge.kernels.scoring import PLAIN, Scoring, sink_gradients

MAX_HEAD = 256
"""Maximal width of heads: tiles of wider heads do not fit into shared memory."""

_INTERPRET = False  # tests set it, to run the kernels without a GPU
_MIN_ROWS = 16  # of a tile, for tensor cores
_MIN_PROGRAMS = 132  # streaming multiprocessors of an H100

Queries = Float[Array, "b s heads h"]
Keys = Float[Array, "b t kv h"]
PerQuery = Float[Array, "b heads s"]
Sinks = Float[Array, "heads"] | None
Window = int | Int[Array, ""] | None


def flash_attention(
    q_BSHh: Queries,
    k_BSKh: Keys,
    v_BSKh: Keys,
    segment_ids: Int[Array, "b s"] | None,
    window: int | None = None,
    chunk: int | None = None,
    scoring: Scoring = PLAIN,
    sinks: Sinks = None,
) -> Queries:
    """Compute softmax(q kᵀ / √h) v over visible keys: earlier, same document, window and chunk.

    `sinks` holds a logit of each head that joins the scores and has no value. Heads are at most
    `MAX_HEAD` wide.
    """
    batch, length = q_BSHh.shape[:2]
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    if chunk is not None:
        segment_ids = chunk_ids(batch, length, chunk, segment_ids, positions)
    # A chunk acts like a document of its own: chunk ids replace document ids.
    tokens = TokenPositions(positions, segment_ids)
    return _attention(window, scoring, (q_BSHh, k_BSKh, v_BSKh, tokens, sinks))


_Inputs = tuple[Array, Array, Array, TokenPositions, Sinks]
"""Queries, keys, values, positions and documents of the tokens, and sinks."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(window: int | None, scoring: Scoring, inputs: _Inputs) -> Array:
    return _attend(window, scoring, inputs)[0]


def _attend(window: int | None, scoring: Scoring, inputs: _Inputs) -> tuple[Array, tuple]:
    q, k, v, tokens, sinks = inputs
    output, lse = forward(q, k, v, tokens, tokens, window, scoring, sinks)
    return output, (inputs, output, lse)


def _differentiate(
    window: int | None, scoring: Scoring, saved: tuple, d_output: Array
) -> tuple[tuple[Array, Array, Array, None, Sinks]]:
    (q, k, v, tokens, sinks), output, lse = saved
    delta = compute_delta(output, d_output)
    gradients = backward(q, k, v, tokens, tokens, lse, delta, d_output, window, scoring)
    return ((*gradients, None, sink_gradients(sinks, lse, delta)),)


_attention.defvjp(_attend, _differentiate)


def compute_delta(output: Queries, d_output: Queries) -> PerQuery:
    """Compute δ = rowsum(dO ∘ O) in float32."""
    product = d_output.astype(jnp.float32) * output.astype(jnp.float32)
    return jnp.sum(product, axis=-1).swapaxes(1, 2)


def forward(
    q_BSHh: Queries,
    k_BTKh: Keys,
    v_BTKh: Keys,
    queries: TokenPositions,
    keys: TokenPositions,
    window: Window = None,
    scoring: Scoring = PLAIN,
    sinks: Sinks = None,
    dtype: jnp.dtype | None = None,
) -> tuple[Queries, PerQuery]:
    """Compute the attention of queries over keys, without a derivative rule.

    Args:
        q_BSHh: queries.
        k_BTKh: keys. Each key head serves heads / kv consecutive query heads.
        v_BTKh: values.
        queries: positions and documents of the queries.
        keys: positions and documents of the keys.
        window: number of last positions that a query sees, its own included, as an integer or an
            array; None: all.
        scoring: transformation of the products of queries and keys.
        sinks: sink logit of each head; None: no sinks.
        dtype: dtype of the result; None: dtype of q.

    Returns:
        The result, and the logsumexp of the scores and sinks in float32. For queries without a
        visible key, the result is 0 and the logsumexp is the sink, or -inf.
    """
    inputs = _PaddedInputs.pad("forward", q_BSHh, k_BTKh, v_BTKh, queries, keys, window, scoring)
    layout, (batch, length, heads, _) = _layout_by_queries(inputs), inputs.q.shape
    out_shape = jax.ShapeDtypeStruct(inputs.q.shape, dtype or inputs.q.dtype)
    lse_shape = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
    o, lse = _call_kernel(
        flash_kernels.flash_forward, inputs.config, layout.grid,
        [*layout.arguments, _whole(sinks)],
        [(layout.outputs, out_shape), (layout.per_query, lse_shape)],
    )  # fmt: skip
    n = q_BSHh.shape[1]
    return o[:, :n], lse[..., :n]


def backward(
    q_BSHh: Queries,
    k_BTKh: Keys,
    v_BTKh: Keys,
    queries: TokenPositions,
    keys: TokenPositions,
    lse: PerQuery,
    delta: PerQuery,
    d_output: Queries,
    window: Window = None,
    scoring: Scoring = PLAIN,
    dtype: jnp.dtype | None = None,
) -> tuple[Queries, Keys, Keys]:
    """Compute the gradients of queries, and the queries' contribution to those of keys and values.

    Args:
        q_BSHh: queries.
        k_BTKh: keys.
        v_BTKh: values.
        queries: positions and documents of the queries.
        keys: positions and documents of the keys.
        lse: logsumexp over all keys that the queries see, which may be more than `keys`.
        delta: `compute_delta` of the result over all these keys.
        d_output: gradient of the result.
        window: number of last positions that a query sees, its own included; None: all.
        scoring: transformation of the products of queries and keys.
        dtype: dtype of the gradients, such as float32 if they are summed further; None: dtype of q.

    Returns:
        dq, dk and dv.
    """
    dtype = dtype or q_BSHh.dtype
    arrays = q_BSHh, k_BTKh, v_BTKh, queries, keys
    per_query = d_output.astype(q_BSHh.dtype), lse, delta
    inputs = _PaddedInputs.pad("dq", *arrays, window, scoring)
    layout, (d_padded, lse_padded, delta_padded) = (
        _layout_by_queries(inputs),
        inputs.pad_per_query(*per_query),
    )
    (dq,) = _call_kernel(
        flash_kernels.flash_dq, inputs.config, layout.grid,
        [
            *layout.arguments, (layout.queries, d_padded), (layout.per_query, lse_padded),
            (layout.per_query, delta_padded),
        ],
        [(layout.outputs, jax.ShapeDtypeStruct(inputs.q.shape, dtype))],
    )  # fmt: skip
    # The kernels dq and dkv have tiles of different sizes, so that inputs are padded again.
    inputs = _PaddedInputs.pad("dkv", *arrays, window, scoring)
    dk, dv = _gradients_of_keys(inputs, *inputs.pad_per_query(*per_query), dtype)
    t = k_BTKh.shape[1]
    return dq[:, : q_BSHh.shape[1]], dk[:, :t], dv[:, :t]


def _gradients_of_keys(
    inputs: "_PaddedInputs", d_output: Array, lse: Array, delta: Array, dtype: jnp.dtype
) -> tuple[Array, Array]:
    (batch, length, kv, head), config = inputs.k.shape, inputs.config
    group = inputs.q.shape[2] // kv
    # If there are enough programs to fill the GPU, one program sums over all query heads of a key
    # head. Otherwise there is one program per query head, and a sum in float32 afterwards.
    if batch * kv * (length // config.tiles.keys) >= _MIN_PROGRAMS:
        config = config._replace(group=group)
    parts = group // config.group
    layout = _layout_by_keys(inputs._replace(config=config), parts)
    sum_dtype = dtype if parts == 1 else jnp.float32
    out = layout.outputs, jax.ShapeDtypeStruct((batch, length, kv * parts, head), sum_dtype)
    dk, dv = _call_kernel(
        flash_kernels.flash_dkv, config, layout.grid,
        [
            *layout.arguments, (layout.queries, d_output), (layout.per_query, lse),
            (layout.per_query, delta),
        ],
        [out, out],
    )  # fmt: skip
    if parts == 1:
        return dk, dv
    by_part = batch, length, kv, parts, head
    dk, dv = (jnp.sum(x.reshape(by_part), axis=3).astype(dtype) for x in (dk, dv))
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
    def pad(
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
        head = q.shape[3]
        tiles = _tiles(kernel, head, q.shape[1], k.shape[1])
        config = KernelConfig(tiles, head, 1, scoring.scale_of(head), scoring.softcap)
        window_1 = None if window is None else jnp.asarray(window, jnp.int32).reshape(1)
        k, v = (pad_to_blocks(x, tiles.keys) for x in (k, v))
        queries = pad_tokens(queries, tiles.queries, BEFORE)
        keys = pad_tokens(keys, tiles.keys, AFTER)
        return cls(config, pad_to_blocks(q, tiles.queries), k, v, queries, keys, window_1)

    def pad_per_query(
        self, d_output: Array, lse: Array, delta: Array
    ) -> tuple[Array, Array, Array]:
        """Pad the additional inputs of the backward kernels to whole blocks of queries."""
        n = self.config.tiles.queries
        return (
            pad_to_blocks(d_output, n),
            pad_to_blocks(lse, n, axis=2),
            pad_to_blocks(delta, n, axis=2),
        )


def _tiles(kernel: str, head: int, queries: int, keys: int) -> Tiles:
    """Return the tiles of a kernel, which registers and 160 KiB of shared memory can hold."""
    # (queries, keys, warps, stages) for heads up to 64, up to 128, and up to `MAX_HEAD` wide.
    narrow, wide, widest = {
        "forward": (Tiles(128, 64, 4, 3), Tiles(128, 64, 8, 3), Tiles(128, 32, 8, 2)),
        "dq": (Tiles(128, 64, 4, 3), Tiles(128, 64, 8, 2), Tiles(64, 32, 8, 2)),
        "dkv": (Tiles(64, 128, 8, 3), Tiles(64, 128, 8, 2), Tiles(32, 64, 8, 2)),
    }[kernel]
    tiles = narrow if head <= 64 else wide if head <= 128 else widest
    # Shorter sequences get smaller tiles: the next power of two, which tensor cores still accept.
    fit = (max(_MIN_ROWS, pl.next_power_of_2(n)) for n in (queries, keys))
    return tiles._replace(queries=min(tiles.queries, next(fit)), keys=min(tiles.keys, next(fit)))


class _Layout(NamedTuple):
    """Grid, inputs and outputs of a kernel.

    Attributes:
        grid: number of programs: blocks, heads, sequences.
        arguments: block specification and array of each common input.
        outputs: specification of the result, or of dk and dv.
        queries: specification of arrays like q.
        per_query: specification of arrays [b, heads, s], such as the logsumexp.
    """

    grid: tuple[int, int, int]
    arguments: list[tuple[Any, Any]]
    outputs: pl.BlockSpec
    queries: pl.BlockSpec
    per_query: pl.BlockSpec


# What one program (i, h, b) of each layout holds, with n queries or keys of a block:
#
#              by queries (forward, dq)          by keys (dkv)
# q, dO        block [n, H] of head h            all queries of `group` heads from h * group on
# k, v         all keys of head h // group       block [n, H] of head h // parts
# lse, δ       block [n] of head h               all queries of these heads
# written      block [n, H] of o or dq           block [n, H] of dk and dv, for part h % parts
def _layout_by_queries(inputs: _PaddedInputs) -> _Layout:
    """Return the layout with a program for each block of queries of each head."""
    config, (batch, length, heads, _), n = (
        inputs.config,
        inputs.q.shape,
        inputs.config.tiles.queries,
    )
    keys, group, last = inputs.k.shape[1], heads // inputs.k.shape[2], length // n - 1
    # Causal: the last blocks of queries visit the most keys. `last - i` starts them first, which
    # balances the tail of the grid.
    some, every = _block_visibility(inputs)
    q_spec = _spec((None, n, None, config.in_memory), lambda i, h, b: (b, last - i, h, 0))
    k_spec = _spec(
        (None, keys, None, config.in_memory), lambda _, h, b: (b, 0, jax.lax.div(h, group), 0)
    )
    arguments = [
        (_spec((None, None, 4), lambda i, _, b: (b, last - i, 0)), block_ranges(some, every)),
        (q_spec, inputs.q), (k_spec, inputs.k), (k_spec, inputs.v),
        _token_blocks(inputs.queries, _spec((None, n), lambda i, _, b: (b, last - i))),
        _token_blocks(inputs.keys, _spec((None, keys), lambda _, h, b: (b, 0))),
        _whole(inputs.window),
    ]  # fmt: skip
    per_query = _spec((None, None, n), lambda i, h, b: (b, h, last - i))
    return _Layout((last + 1, heads, batch), arguments, q_spec, q_spec, per_query)


def _layout_by_keys(inputs: _PaddedInputs, parts: int) -> _Layout:
    """Return the layout with a program for each block of keys of each head.

    Args:
        inputs: inputs, with `config.group` query heads of a program.
        parts: number of programs that share the query heads of a key head.
    """
    config, (batch, length, kv, _) = inputs.config, inputs.k.shape
    n = config.tiles.keys
    queries, group = inputs.q.shape[1], config.group
    some, every = (x.swapaxes(1, 2) for x in _block_visibility(inputs))
    q_spec = _spec((None, queries, group, config.in_memory), lambda _, h, b: (b, 0, h, 0))
    k_spec = _spec(
        (None, n, None, config.in_memory), lambda i, h, b: (b, i, jax.lax.div(h, parts), 0)
    )
    arguments = [
        (_spec((None, None, 4), lambda i, _, b: (b, i, 0)), block_ranges(some, every)),
        (q_spec, inputs.q), (k_spec, inputs.k), (k_spec, inputs.v),
        _token_blocks(inputs.queries, _spec((None, queries), lambda _, h, b: (b, 0))),
        _token_blocks(inputs.keys, _spec((None, n), lambda i, _, b: (b, i))),
        _whole(inputs.window),
    ]  # fmt: skip
    outputs = _spec((None, n, None, config.in_memory), lambda i, h, b: (b, i, h, 0))
    per_query = _spec((None, group, queries), lambda _, h, b: (b, h, 0))
    return _Layout((length // n, kv * parts, batch), arguments, outputs, q_spec, per_query)


def _block_visibility(inputs: _PaddedInputs) -> tuple[Array, Array]:
    window = None if inputs.window is None else inputs.window[0]
    return block_visibility(inputs.queries, inputs.keys, inputs.config.tiles[:2], window)


_spec = pl.BlockSpec


def _token_blocks(tokens: TokenPositions, spec: pl.BlockSpec) -> tuple[TokenBlock, TokenBlock]:
    """Return the block specifications of positions and documents, and the arrays."""
    return TokenBlock(spec, None if tokens.documents is None else spec), TokenBlock(*tokens)


def _whole(x: Array | None) -> tuple[pl.BlockSpec | None, Array | None]:
    """Return the specification of a vector that all programs receive whole, and the vector."""
    return None if x is None else _spec(x.shape, lambda *_: (0,)), x


def _call_kernel(
    kernel: Callable[..., None],
    config: KernelConfig,
    grid: tuple[int, int, int],
    arguments: list[tuple[Any, Any]],
    results: list[tuple[pl.BlockSpec, Any]],
) -> list[Array]:
    """Run a kernel over a grid, given (block specification, array or shape) pairs."""
    return pl.pallas_call(
        functools.partial(kernel, config),
        grid=grid,
        in_specs=[spec for spec, _ in arguments],
        out_specs=[spec for spec, _ in results],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for _, x in results],
        compiler_params=triton.CompilerParams(
            num_warps=config.tiles.warps, num_stages=config.tiles.stages
        ),
        interpret=_INTERPRET,
        name=kernel.__name__,
    )(*(array for _, array in arguments))
