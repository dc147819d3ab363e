"""Parts of sequences that devices share, for recurrences along the tokens (`distributed.cp`).

A recurrence needs the tokens of a sequence in order. Devices hold them in the order of
`context_parallel.to_device_order`, as one part (strategy "ulysses") or two ("ring"):

    device        0      1      2      3
    "ulysses"     0      1      2      3
    "ring"        0 7    1 6    2 5    3 4

The functions here run inside `shard_map`, on arrays of one device. Where no device axis splits the
sequence, each of them holds one part.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from jaxforge.kernels.context_parallel import part_order
from jaxforge.parallel import collectives

_AXIS = "context"

Summary = TypeVar("Summary")
"""Pytree of arrays [b * parts, ...] that summarize the tokens of each part."""


def parts_per_device(strategy: str) -> int:
    """Return the number of parts of a sequence that a device holds.

    Args:
        strategy: "ulysses" or "ring".
    """
    return 2 if strategy == "ring" and collectives.axis_size(_AXIS) > 1 else 1


def to_parts(x: Shaped[Array, "b s *d"], strategy: str) -> Shaped[Array, "p t *d"]:
    """Return the parts of a device's sequences [b, s, ...] as rows [b * parts, s / parts, ...]."""
    parts = parts_per_device(strategy)
    return x.reshape(x.shape[0] * parts, x.shape[1] // parts, *x.shape[2:])


def from_parts(x: Shaped[Array, "p t *d"], strategy: str) -> Shaped[Array, "b s *d"]:
    """Undo `to_parts`."""
    parts = parts_per_device(strategy)
    return x.reshape(x.shape[0] // parts, x.shape[1] * parts, *x.shape[2:])


def from_previous_part(x: Shaped[Array, "p *d"], strategy: str) -> Shaped[Array, "p *d"]:
    """Return for each part the value of the part before it in its sequence; 0 for the first part.

    Args:
        x: a value of each part, rows as in `to_parts`.
        strategy: "ulysses" or "ring".
    """
    names = collectives.split_over(_AXIS)
    if not names:
        return jnp.zeros_like(x)
    devices = jax.lax.axis_size(names)
    onward = [(i, i + 1) for i in range(devices - 1)]  # no entry for device 0: it receives zeros
    if parts_per_device(strategy) == 1:
        return jax.lax.ppermute(x, names, onward)
    # Early parts come from the device before, and late parts from the device after. The first late
    # part follows the last early one, on the same device:
    #
    #     early  0 -> 1 -> 2 -> 3
    #                           |
    #     late   7 <- 6 <- 5 <- 4
    early, late = x[0::2], x[1::2]
    backward = [(i + 1, i) for i in range(devices - 1)]
    is_last = jax.lax.axis_index(names) == devices - 1
    before_late = jnp.where(is_last, early, jax.lax.ppermute(late, names, backward))
    before = jnp.stack([jax.lax.ppermute(early, names, onward), before_late], axis=1)
    return before.reshape(x.shape)


def combine_before(
    combine: Callable[[Summary, Summary], Summary], summary: Summary, first: Summary, strategy: str
) -> Summary:
    """Combine the summaries of all parts before each part, in the order of the sequence.

    All devices gather all summaries, which are small in comparison with the activations.

    Args:
        combine: (earlier, later) -> summary of both, associative.
        summary: summary of each part, float32 arrays with rows as in `to_parts`.
        first: summary in front of the first part of each sequence, arrays [b, ...].
        strategy: "ulysses" or "ring".
    """
    names = collectives.split_over(_AXIS)
    if not names:
        return first
    devices, parts = jax.lax.axis_size(names), parts_per_device(strategy)
    order = part_order(strategy, devices)  # position of each device's parts in the sequence
    indices = jnp.asarray(order.reshape(devices, parts))[jax.lax.axis_index(names)]

    def in_sequence_order(x: Array) -> Array:
        gathered = jax.lax.all_gather(x.reshape(-1, parts, *x.shape[1:]), names)  # [N, b, parts, …]
        by_part = jnp.moveaxis(gathered, 2, 1).reshape(devices * parts, -1, *x.shape[1:])
        return by_part[np.argsort(order)]

    ordered = jax.tree.map(in_sequence_order, summary)

    def step(before: Summary, part: Summary) -> tuple[Summary, Summary]:
        return combine(before, part), before

    _, before = jax.lax.scan(step, first, ordered)  # [N parts, b, ...]

    def at_device_parts(x: Array) -> Array:
        return jnp.moveaxis(x[indices], 0, 1).reshape(-1, *x.shape[2:])

    return jax.tree.map(at_device_parts, before)
