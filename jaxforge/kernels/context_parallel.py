"""Context parallelism: attention over sequences that devices share (`distributed.cp`), in two ways.

    ulysses   heads instead of tokens: an all-to-all gives each device all tokens for its share of
              the heads, which the platform's own kernel attends over, and another brings the result
              back (DeepSpeed-Ulysses, arXiv:2309.14509). KeyPart' heads are copied where there are
              fewer of them than devices.
    ring      queries stay; keys and values go round, and what each device makes of them adds up by
              their logsumexp (Ring Attention, arXiv:2310.01889). Any number of heads will do.

What a sequence means does not change: tokens see the same tokens as on one device.

With "ring", causal attention would leave the devices that hold first tokens with little to do. So
a sequence is cut into 2 cp parts; device i has parts i and 2 cp - 1 - i, and all devices have
the same number of pairs of tokens to score (as in Llama 3, arXiv:2407.21783, section 3.3.2):

    device    0      1      2      3
    parts    0 7    1 6    2 5    3 4
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree, Shaped

from jaxforge.kernels.attention_backends import SegmentIds, Sinks, attend_with_masks, run_per_device
from jaxforge.kernels.flash_blocks import Tokens
from jaxforge.kernels.masking import Mask, chunk_ids, select_chunk, select_window
from jaxforge.kernels.partial_attention import (
    PARTIAL_KERNELS,
    BackwardInputs,
    Gradients,
    KeyPart,
    PartialResult,
    QueryPart,
    Window,
)
from jaxforge.kernels.scoring import Scoring, sink_gradients
from jaxforge.parallel import collectives
from jaxforge.parallel.sharding import axes_size, mesh_axes

_AXIS = "context"


def context_size() -> int:
    """Return the number of devices of the current mesh that share a sequence."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else axes_size(mesh_axes(_AXIS))


def part_order(strategy: str, devices: int) -> np.ndarray:
    """The parts into which sequences are cut, device by device: equally many of each.

    Args:
        strategy: "ulysses" or "ring".
        devices: that share a sequence.
    """
    if strategy == "ulysses" or devices == 1:
        return np.arange(devices)
    first = np.arange(devices)
    return np.stack([first, 2 * devices - 1 - first], axis=1).reshape(-1)


def to_device_order(x: Shaped[Array, "*b s"], strategy: str, devices: int) -> Shaped[Array, "*b s"]:
    """Tokens in the order in which devices hold them: the first has the first s / devices."""
    return _reordered(x, part_order(strategy, devices))


def to_sequence_order(
    x: Shaped[Array, "*b s"], strategy: str, devices: int
) -> Shaped[Array, "*b s"]:
    """Tokens in their own order again."""
    return _reordered(x, np.argsort(part_order(strategy, devices)))


def _reordered(x: Array, parts: np.ndarray) -> Array:
    if np.array_equal(parts, np.arange(len(parts))):
        return x
    by_part = x.reshape(*x.shape[:-1], len(parts), -1)
    return by_part[..., parts, :].reshape(x.shape)


def attend_across_devices(
    strategy: str,
    name: str,
    masks: Sequence[Mask],
    mask_index: int | Int[Array, ""],
    q: Array,
    k: Array,
    v: Array,
    segment_ids: SegmentIds,
    positions: Int[Array, "b s"],
    scoring: Scoring,
    sinks: Sinks,
) -> Array:
    """`attend_with_masks` of tokens that devices share, as `spread` has laid them out.

    Args:
        strategy: "ulysses" or "ring".
        name: the kernel: for "ulysses" of all tokens, for "ring" of each turn.
        masks: the masks of a `LayerPlan`.
        mask_index: index of the mask to apply.
        q: queries.
        k: keys.
        v: values.
        segment_ids: identifiers of packed documents.
        positions: positions of tokens in their row.
        scoring: transformation of the products of queries and keys.
        sinks: logit of each head that joins its scores; None: no sinks.
    """
    is_known = isinstance(mask_index, int)
    scalars = () if is_known else (mask_index,)

    def local(
        q: Array, k: Array, v: Array, of_tokens: PyTree, sinks: Sinks, *scalars: Array
    ) -> Array:
        first, (segment_ids, positions) = mask_index if is_known else scalars[0], of_tokens
        if strategy == "ulysses":
            attend = functools.partial(attend_with_masks, name, masks, first, scoring=scoring)
            return _ulysses(attend, q, k, v, segment_ids, sinks)
        window = select_window(masks, first)
        if (chunk := select_chunk(masks, first)) is not None:
            segment_ids = _chunks(chunk, segment_ids, *positions.shape)
        at = Tokens(positions, segment_ids)
        return _ring((name, scoring), q, k, v, at, window, sinks).astype(q.dtype)

    return run_per_device(local, q, k, v, (segment_ids, positions), sinks, *scalars)


def _ulysses(
    attend: Callable[..., Array],
    q: Array,
    k: Array,
    v: Array,
    segment_ids: SegmentIds,
    sinks: Sinks,
) -> Array:
    devices = collectives.axis_size(_AXIS)
    # Each device needs a whole number of key heads: kv = 2 heads on 4 devices are copied twice.
    #
    # before  q [B, S/N, H, h]   all tokens of a part, all heads
    # after   q [B, S, H/N, h]   all tokens, a part of the heads
    copies = devices // math.gcd(k.shape[2], devices)
    if copies > 1:
        k, v = (jnp.repeat(x, copies, axis=2) for x in (k, v))
    of_heads = functools.partial(collectives.all_to_all, axis=_AXIS, split=2, join=1)
    if segment_ids is not None:
        segment_ids = collectives.all_gather(segment_ids, _AXIS, 1)
    if sinks is not None:
        share = q.shape[2] // devices
        first = collectives.first_index(_AXIS, share)
        sinks = jax.lax.dynamic_slice_in_dim(sinks, first, share)
    y = attend(of_heads(q), of_heads(k), of_heads(v), segment_ids, sinks=sinks)
    return collectives.all_to_all(y, _AXIS, split=1, join=2)


def _chunks(chunk: Array, segment_ids: SegmentIds, batch: int, length: int) -> Array:
    """The chunks of this device's tokens, as documents: counted where a row is whole."""
    # Chunks are counted from the start of a row or document, which another device may hold. So ids
    # are computed for whole rows, reordered as the ring holds them, and sliced.
    devices = collectives.axis_size(_AXIS)
    if segment_ids is not None:
        whole = collectives.all_gather(segment_ids, _AXIS, 1)
        segment_ids = to_sequence_order(whole, "ring", devices)
    ids = chunk_ids(batch, length * devices, chunk, segment_ids)
    first = collectives.first_index(_AXIS, length)
    return jax.lax.dynamic_slice_in_dim(
        to_device_order(ids, "ring", devices), first, length, axis=1
    )


_RingSettings = tuple[str, Scoring]
"""The kernel of each turn, a key of `PARTIAL_KERNELS`, and what becomes of products."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(
    strategy: _RingSettings, q: Array, k: Array, v: Array, at: Tokens, window: Window, sinks: Sinks
) -> Array:
    return _ring_saving(strategy, q, k, v, at, window, sinks)[0]


def _go_round(
    strategy: _RingSettings, q: Array, k: Array, v: Array, at: Tokens, window: Window, sinks: Sinks
) -> PartialResult:
    """Attend with this device's queries to the keys of all devices, and to sinks."""
    queries, own = QueryPart(q, at), KeyPart(k, v, at)
    name, scoring = strategy

    def attend(keys: KeyPart) -> PartialResult:
        return PARTIAL_KERNELS[name].attend(queries, keys, scoring, window)

    def turn(
        carry: tuple[PartialResult, KeyPart], _: None
    ) -> tuple[tuple[PartialResult, KeyPart], None]:
        part, keys = carry
        arriving = _ring_shift(keys)  # while these are attended to
        return (part.merged(attend(keys)), arriving), None

    # Turn t attends to the keys of device i - t. The transfer for the next turn is issued before
    # the attention of this one, so that the compiler can overlap them:
    #
    # turn      0          1              2         ...     N - 1
    # attend    own        keys of i-1    i-2               i+1
    # send      own        keys of i-1    i-2               (nothing)
    carry = attend(own), _ring_shift(own)
    (part, last), _ = jax.lax.scan(turn, carry, length=collectives.axis_size(_AXIS) - 2)
    part = part.merged(attend(last))
    if sinks is None:
        return part
    # A sink is a logit without a value: it only enlarges the denominator.
    lse = jnp.logaddexp(part.lse, sinks)
    return PartialResult(part.scaled_to(lse), lse)


def _ring_shift(x: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: collectives.ring_shift(leaf, _AXIS), x)


def _ring_saving(
    strategy: _RingSettings, q: Array, k: Array, v: Array, at: Tokens, window: Window, sinks: Sinks
) -> tuple[Array, tuple[Any, ...]]:
    part = _go_round(strategy, q, k, v, at, window, sinks)
    return part.o, (q, k, v, at, window, sinks, part)


def _ring_back(strategy: _RingSettings, saved: tuple[Any, ...], d_o: Array) -> tuple[Any, ...]:
    """KeyPart go round again, and with them, a turn behind, what becomes their gradients."""
    q, k, v, at, window, sinks, whole = saved
    # δ and lse are those of the whole row, so gradients of single parts add up without corrections.
    delta = jnp.sum(whole.o * d_o, axis=-1)
    queries, of_queries = QueryPart(q, at), BackwardInputs(d_o, whole.lse, delta)
    name, scoring = strategy

    def back(keys: KeyPart) -> Gradients:
        return PARTIAL_KERNELS[name].gradients(queries, of_queries, keys, scoring, window)

    def turn(carry: Any, _: None) -> Any:  # noqa: ANN401
        d_q, d_keys, keys = carry
        # Gradients of keys travel with their keys: each device adds its share, and after N turns
        # the sums are back where the keys live.
        arriving, d_arriving = _ring_shift(keys), _ring_shift(d_keys)
        got = back(keys)
        d_keys = jax.tree.map(jnp.add, d_arriving, (got.k, got.v))
        return (d_q + got.q, d_keys, arriving), None

    got, own = back(KeyPart(k, v, at)), KeyPart(k, v, at)
    carry = got.q, (got.k, got.v), _ring_shift(own)
    length = collectives.axis_size(_AXIS) - 1
    (d_q, d_keys, _), _ = jax.lax.scan(turn, carry, length=length)
    d_k, d_v = _ring_shift(d_keys)  # home
    d_sinks = sink_gradients(sinks, whole.lse.swapaxes(1, 2), delta.swapaxes(1, 2))
    return (*(d.astype(x.dtype) for d, x in ((d_q, q), (d_k, k), (d_v, v))), None, None, d_sinks)


_ring.defvjp(_ring_saving, _ring_back)
