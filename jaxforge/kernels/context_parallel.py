"""Context parallelism: attention over sequences that devices share (`distributed.cp`).

There are two strategies:

    ulysses   An all-to-all exchanges tokens for heads: each device gets all tokens for its share of
              the heads, and runs the platform's own kernel. A second all-to-all restores the layout
              of the result (DeepSpeed-Ulysses, arXiv:2309.14509). Key heads are copied if there are
              fewer of them than devices.
    ring      Queries stay on their device; keys and values travel around a ring. Partial results
              are merged by their logsumexp (Ring Attention, arXiv:2310.01889). Any number of heads
              is possible.

Results do not depend on the strategy: tokens see the same tokens as on one device.

With "ring" and consecutive parts, causal attention would leave the devices of the first tokens
mostly idle. So a sequence is cut into 2 cp parts, and device i holds parts i and 2 cp - 1 - i. All
devices then score the same number of token pairs (as in Llama 3, arXiv:2407.21783, section 3.3.2):

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
    """Return the index of each part of a sequence, in the order of the devices that hold the parts.

    Args:
        strategy: "ulysses" or "ring".
        devices: number of devices that share a sequence.
    """
    if strategy == "ulysses" or devices == 1:
        return np.arange(devices)
    first = np.arange(devices)
    return np.stack([first, 2 * devices - 1 - first], axis=1).reshape(-1)


def to_device_order(x: Shaped[Array, "*b s"], strategy: str, devices: int) -> Shaped[Array, "*b s"]:
    """Reorder tokens for their devices: device i holds the i-th part of s / devices tokens."""
    return _reorder(x, part_order(strategy, devices))


def to_sequence_order(
    x: Shaped[Array, "*b s"], strategy: str, devices: int
) -> Shaped[Array, "*b s"]:
    """Undo `to_device_order`."""
    return _reorder(x, np.argsort(part_order(strategy, devices)))


def _reorder(x: Array, parts: np.ndarray) -> Array:
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
    """Compute `attend_with_masks` for sequences that several devices share.

    Tokens are laid out by `to_device_order`.

    Args:
        strategy: "ulysses" or "ring".
        name: key of `BACKENDS` for "ulysses", key of `PARTIAL_KERNELS` for "ring".
        masks: distinct masks of the model's layers (`LayerPlan.masks`).
        mask_index: index of the mask to apply; a traced array in pipelines.
        q: queries [b, s, heads, h].
        k: keys [b, s, kv, h].
        v: values [b, s, kv, h].
        segment_ids: document id of each token; None: one document per row.
        positions: position of each token in its row.
        scoring: transformation of the products of queries and keys.
        sinks: logit of each head that joins its scores; None: no sinks.
    """
    # A traced index is an explicit input of the `shard_map` in `run_per_device`.
    is_static = isinstance(mask_index, int)
    scalars = () if is_static else (mask_index,)

    def attend_on_device(
        q: Array, k: Array, v: Array, token_arrays: PyTree, sinks: Sinks, *scalars: Array
    ) -> Array:
        index, (segment_ids, positions) = mask_index if is_static else scalars[0], token_arrays
        if strategy == "ulysses":
            attend = functools.partial(attend_with_masks, name, masks, index, scoring=scoring)
            return _ulysses(attend, q, k, v, segment_ids, sinks)
        window = select_window(masks, index)
        if (chunk := select_chunk(masks, index)) is not None:
            segment_ids = _local_chunk_ids(chunk, segment_ids, *positions.shape)
        tokens = TokenPositions(positions, segment_ids)
        return _ring((name, scoring), q, k, v, tokens, window, sinks).astype(q.dtype)

    return run_per_device(attend_on_device, q, k, v, (segment_ids, positions), sinks, *scalars)


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
    split_heads = functools.partial(collectives.all_to_all, axis=_AXIS, split=2, join=1)
    if segment_ids is not None:
        segment_ids = collectives.all_gather(segment_ids, _AXIS, 1)
    if sinks is not None:
        share = q.shape[2] // devices
        first = collectives.first_index(_AXIS, share)
        sinks = jax.lax.dynamic_slice_in_dim(sinks, first, share)
    y = attend(split_heads(q), split_heads(k), split_heads(v), segment_ids, sinks=sinks)
    return collectives.all_to_all(y, _AXIS, split=1, join=2)


def _local_chunk_ids(chunk: Array, segment_ids: SegmentIds, batch: int, length: int) -> Array:
    """Return the chunk ids [b, s] of this device's tokens, which replace their document ids."""
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
"""Key of `PARTIAL_KERNELS`, and transformation of the products of queries and keys."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(
    settings: _RingSettings,
    q: Array,
    k: Array,
    v: Array,
    tokens: TokenPositions,
    window: Window,
    sinks: Sinks,
) -> Array:
    return _ring_forward(settings, q, k, v, tokens, window, sinks)[0]


def _ring_forward(
    settings: _RingSettings,
    q: Array,
    k: Array,
    v: Array,
    tokens: TokenPositions,
    window: Window,
    sinks: Sinks,
) -> tuple[Array, tuple[Any, ...]]:
    """Attend with this device's queries to the keys of all devices, and to sinks."""
    queries, own = QueryPart(q, tokens), KeyPart(k, v, tokens)
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
    carry = attend(own), _ring_shift(own)
    (part, last), _ = jax.lax.scan(turn, carry, length=collectives.axis_size(_AXIS) - 2)
    part = part.merged(attend(last))
    if sinks is not None:
        # A sink is a logit without a value: it only enlarges the denominator.
        lse = jnp.logaddexp(part.lse, sinks)
        part = PartialResult(part.scaled_to(lse), lse)
    return part.o, (q, k, v, tokens, window, sinks, part)


def _ring_shift(x: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: collectives.ring_shift(leaf, _AXIS), x)


def _ring_backward(settings: _RingSettings, saved: tuple[Any, ...], d_o: Array) -> tuple[Any, ...]:
    """Compute gradients by a second turn of the keys, followed by their partial gradients."""
    q, k, v, tokens, window, sinks, whole = saved
    # δ and lse belong to all keys, so that the gradients of parts add up without corrections.
    delta = jnp.sum(whole.o * d_o, axis=-1)
    queries, backward_inputs = QueryPart(q, tokens), BackwardInputs(d_o, whole.lse, delta)
    name, scoring = settings

    def gradients(keys: KeyPart) -> Gradients:
        return PARTIAL_KERNELS[name].gradients(queries, backward_inputs, keys, scoring, window)

    def turn(carry: Any, _: None) -> Any:  # noqa: ANN401
        d_q, d_keys, keys = carry
        # Partial gradients follow their keys, one turn behind. Each device adds its share, and
        # after N shifts the sums are back on the device of the keys.
        arriving, d_arriving = _ring_shift(keys), _ring_shift(d_keys)
        grads = gradients(keys)
        d_keys = jax.tree.map(jnp.add, d_arriving, (grads.k, grads.v))
        return (d_q + grads.q, d_keys, arriving), None

    grads, own = gradients(KeyPart(k, v, tokens)), KeyPart(k, v, tokens)
    carry = grads.q, (grads.k, grads.v), _ring_shift(own)
    length = collectives.axis_size(_AXIS) - 1
    (d_q, d_keys, _), _ = jax.lax.scan(turn, carry, length=length)
    d_k, d_v = _ring_shift(d_keys)  # the last shift
    d_sinks = sink_gradients(sinks, whole.lse.swapaxes(1, 2), delta.swapaxes(1, 2))
    return (*(d.astype(x.dtype) for d, x in ((d_q, q), (d_k, k), (d_v, v))), None, None, d_sinks)


_ring.defvjp(_ring_forward, _ring_backward)
