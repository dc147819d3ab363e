"""Context parallelism: attention over sequences that devices share (`distributed.cp`).

    ulysses   An all-to-all gives each device all tokens for a share of the heads. The platform's
              kernel attends, and a second all-to-all restores the shares of tokens
              (DeepSpeed-Ulysses, arXiv:2309.14509). Key heads are repeated if there are fewer than
              devices.
    ring      Queries stay on their device, and keys and values travel around a ring. Partial
              results are merged by their logsumexp (Ring Attention, arXiv:2310.01889). Any number
              of heads is supported.

Each token sees the same tokens as on a single device.

With "ring", causal attention would give little work to the devices with the first tokens. So a
sequence is cut into 2 cp parts, and device i holds parts i and 2 cp - 1 - i. All devices then score
the same number of token pairs (as in Llama 3, arXiv:2407.21783, section 3.3.2):

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

from jaxforge.kernels.attention_backends import attend_with_masks, run_per_device
from jaxforge.kernels.dot_product_attention import SegmentIds, Sinks
from jaxforge.kernels.flash_blocks import TokenPositions
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
    """Return the parts of a sequence in the order of devices; each device has the same number.

    Args:
        strategy: "ulysses" or "ring".
        devices: number of devices that share a sequence.
    """
    if strategy == "ulysses" or devices == 1:
        return np.arange(devices)
    first = np.arange(devices)
    return np.stack([first, 2 * devices - 1 - first], axis=1).reshape(-1)


def to_device_order(
    x: Shaped[Array, "..."], strategy: str, devices: int, axis: int = -1
) -> Shaped[Array, "..."]:
    """Reorder tokens for the devices: device i gets the i-th of `devices` equal slices.

    Args:
        x: values of tokens.
        strategy: "ulysses" or "ring".
        devices: number of devices that share a sequence.
        axis: dimension of the tokens.
    """
    return _reordered(x, part_order(strategy, devices), axis)


def to_sequence_order(
    x: Shaped[Array, "..."], strategy: str, devices: int, axis: int = -1
) -> Shaped[Array, "..."]:
    """Restore the original order of tokens that `to_device_order` has reordered."""
    return _reordered(x, np.argsort(part_order(strategy, devices)), axis)


def _reordered(x: Array, parts: np.ndarray, axis: int) -> Array:
    if np.array_equal(parts, np.arange(len(parts))):
        return x
    axis %= x.ndim
    size = x.shape[axis] // len(parts)
    # Slices, as XLA's partitioner fails on a gather in a partly manual program (docs/upstream.md).
    before = (slice(None),) * axis
    slices = [x[(*before, slice(i * size, (i + 1) * size))] for i in parts.tolist()]
    join: Any = np if isinstance(x, np.ndarray) else jnp  # arrays of the host in any precision
    result: Array = join.concatenate(slices, axis)
    return result


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
    """Attend over sequences that devices share, in the order of `to_device_order`.

    Args:
        strategy: "ulysses" or "ring".
        name: kernel; with "ulysses" for all tokens, with "ring" for each turn.
        masks: masks of the layers (`LayerPlan.masks`).
        mask_index: index of the layer's mask in `masks`.
        q: queries.
        k: keys.
        v: values.
        segment_ids: documents of packed rows.
        positions: positions of tokens in their row.
        scoring: scale and soft cap of the scores.
        sinks: an extra logit per head that joins the scores; None: there are none.
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
            segment_ids = local_chunk_ids(chunk, segment_ids, positions.shape, strategy)
        at = TokenPositions(positions, segment_ids)
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
    to_heads = functools.partial(collectives.all_to_all, axis=_AXIS, split=2, join=1)
    if segment_ids is not None:
        segment_ids = collectives.all_gather(segment_ids, _AXIS, 1)
    if sinks is not None:
        share = q.shape[2] // devices
        first = collectives.first_index(_AXIS, share)
        sinks = jax.lax.dynamic_slice_in_dim(sinks, first, share)
    y = attend(to_heads(q), to_heads(k), to_heads(v), segment_ids, sinks=sinks)
    return collectives.all_to_all(y, _AXIS, split=1, join=2)


def local_chunk_ids(
    chunk: int | Int[Array, ""], segment_ids: SegmentIds, shape: tuple[int, ...], strategy: str
) -> Int[Array, "b s"]:
    """Return ids of the chunks of this device's tokens, which act as document ids.

    Args:
        chunk: number of tokens of a chunk.
        segment_ids: documents of this device's tokens; None: each row is one document.
        shape: number of rows, and of this device's tokens in a row.
        strategy: "ulysses" or "ring".
    """
    batch, length = shape
    # Chunks are counted from the start of a row or document, which another device may hold. So ids
    # are computed for whole rows, reordered as the devices hold them, and sliced.
    devices = collectives.axis_size(_AXIS)
    if segment_ids is not None:
        whole = collectives.all_gather(segment_ids, _AXIS, 1)
        segment_ids = to_sequence_order(whole, strategy, devices)
    ids = chunk_ids(batch, length * devices, chunk, segment_ids)
    first = collectives.first_index(_AXIS, length)
    return jax.lax.dynamic_slice_in_dim(
        to_device_order(ids, strategy, devices), first, length, axis=1
    )


_RingSettings = tuple[str, Scoring]
"""Kernel of each turn (a key of `PARTIAL_KERNELS`), and scale and soft cap of the scores."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(
    settings: _RingSettings,
    q: Array,
    k: Array,
    v: Array,
    at: TokenPositions,
    window: Window,
    sinks: Sinks,
) -> Array:
    return _ring_forward(settings, q, k, v, at, window, sinks)[0]


def _attend_around_ring(
    settings: _RingSettings,
    q: Array,
    k: Array,
    v: Array,
    at: TokenPositions,
    window: Window,
    sinks: Sinks,
) -> PartialResult:
    """Attend with this device's queries to the keys of all devices, and to sinks."""
    queries, keys = QueryPart(q, at), KeyPart(k, v, at)
    name, scoring = settings

    def attend(keys: KeyPart) -> PartialResult:
        return PARTIAL_KERNELS[name].attend(queries, keys, scoring, window)

    def turn(
        carry: tuple[PartialResult, KeyPart], _: None
    ) -> tuple[tuple[PartialResult, KeyPart], None]:
        part, keys = carry
        arriving = _ring_shift(keys)  # overlaps with the attention to `keys`
        return (part.merged(attend(keys)), arriving), None

    # Turn t attends to the keys of device i - t. The transfer for the next turn is issued before
    # the attention of this one, so that the compiler can overlap them:
    #
    # turn      0          1              2         ...     N - 1
    # attend    own        keys of i-1    i-2               i+1
    # send      own        keys of i-1    i-2               (nothing)
    carry = attend(keys), _ring_shift(keys)
    (part, last), _ = jax.lax.scan(turn, carry, length=collectives.axis_size(_AXIS) - 2)
    part = part.merged(attend(last))
    if sinks is None:
        return part
    # A sink is a logit without a value: it only increases the denominator.
    lse = jnp.logaddexp(part.lse, sinks)
    return PartialResult(part.scaled_to(lse), lse)


def _ring_shift(x: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: collectives.ring_shift(leaf, _AXIS), x)


def _ring_forward(
    settings: _RingSettings,
    q: Array,
    k: Array,
    v: Array,
    at: TokenPositions,
    window: Window,
    sinks: Sinks,
) -> tuple[Array, tuple[Any, ...]]:
    part = _attend_around_ring(settings, q, k, v, at, window, sinks)
    return part.o, (q, k, v, at, window, sinks, part)


def _ring_backward(settings: _RingSettings, saved: tuple[Any, ...], d_o: Array) -> tuple[Any, ...]:
    """Compute gradients: keys travel around the ring again, and their gradients one turn behind."""
    q, k, v, at, window, sinks, whole = saved
    # δ and lse belong to the whole row, so that gradients of parts add up without corrections.
    delta = jnp.sum(whole.o * d_o, axis=-1)
    queries, backward_inputs = QueryPart(q, at), BackwardInputs(d_o, whole.lse, delta)
    name, scoring = settings

    def part_gradients(keys: KeyPart) -> Gradients:
        return PARTIAL_KERNELS[name].gradients(queries, backward_inputs, keys, scoring, window)

    def turn(carry: Any, _: None) -> Any:  # noqa: ANN401
        d_q, d_keys, keys = carry
        # Gradients of keys travel with their keys: each device adds its share, and after N turns
        # the sums are back where the keys live.
        arriving, d_arriving = _ring_shift(keys), _ring_shift(d_keys)
        grads = part_gradients(keys)
        d_keys = jax.tree.map(jnp.add, d_arriving, (grads.k, grads.v))
        return (d_q + grads.q, d_keys, arriving), None

    grads, keys = part_gradients(KeyPart(k, v, at)), KeyPart(k, v, at)
    carry = grads.q, (grads.k, grads.v), _ring_shift(keys)
    length = collectives.axis_size(_AXIS) - 1
    (d_q, d_keys, _), _ = jax.lax.scan(turn, carry, length=length)
    d_k, d_v = _ring_shift(d_keys)  # the last shift returns them to the device of their keys
    d_sinks = sink_gradients(sinks, whole.lse.swapaxes(1, 2), delta.swapaxes(1, 2))
    return (*(d.astype(x.dtype) for d, x in ((d_q, q), (d_k, k), (d_v, v))), None, None, d_sinks)


_ring.defvjp(_ring_forward, _ring_backward)
