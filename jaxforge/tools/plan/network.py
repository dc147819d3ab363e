"""How long collectives take between chips, by the bytes they send and the links they use."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxforge.tools.plan.chips import Chip
from jaxforge.tools.plan.hlo import Computation, Operation, first_group, sent_by_ring

EFFICIENCY = 0.8
"""Of a link's data sheet, what large collectives reach (0.75 to 0.9 in the makers' own tests)."""
LATENCY = {"tpu": 2e-6, "gpu": 12e-6}
"""Seconds until the first byte has gone around."""


class Collective(NamedTuple):
    """One execution.

    Attributes:
        kind: as XLA names it.
        axes: the axes of the mesh that it goes over.
        sent: bytes that a device sends.
        seconds: that it takes by itself.
    """

    kind: str
    axes: tuple[str, ...]
    sent: float
    seconds: float


class Network:
    """Of the devices of a mesh.

    Args:
        mesh: of devices that need not be here.
        chip: what they are; None where links are not known, as between CPU devices.
    """

    def __init__(self, mesh: Mesh, chip: Chip | None) -> None:
        self._mesh, self._chip = mesh, chip
        self._devices = list(mesh.devices.flat)

    def collective(self, operation: Operation, within: Computation) -> Collective:
        """What a collective, or the first half of one, will take."""
        kind = operation.collective or operation.kind
        group = first_group(operation.line, len(self._devices))
        size = sum(within[name].bytes for name in operation.operands)
        sent = sent_by_ring(kind, size, len(group))
        return Collective(kind, self._axes(group), sent, self._seconds(kind, group, sent))

    def _axes(self, group: Sequence[int]) -> tuple[str, ...]:
        """The axes along which the members differ."""
        places = np.unravel_index(group, self._mesh.devices.shape)
        pairs = zip(self._mesh.axis_names, places, strict=True)
        return tuple(str(name) for name, place in pairs if len(set(place.tolist())) > 1)

    def _seconds(self, kind: str, group: Sequence[int], sent: float) -> float:
        if self._chip is None or len(group) == 1:
            return 0
        rate = _rate(self._chip, kind, [self._devices[i] for i in group], self._devices)
        return LATENCY[self._chip.platform] + sent / rate


@functools.cache
def rate_along(mesh: Mesh, axes: tuple[str, ...], chip: Chip) -> float:
    """Bytes/s that a device sends to the others along some axes of a mesh."""
    along = tuple(slice(None) if name in axes else 0 for name in mesh.axis_names)
    members = np.atleast_1d(mesh.devices[along]).flat
    return _rate(chip, "all-gather", list(members), list(mesh.devices.flat))


def _rate(
    chip: Chip, kind: str, members: Sequence[jax.Device], everyone: Sequence[jax.Device]
) -> float:
    """Bytes/s that each of the members sends."""
    if chip.platform == "gpu":
        return EFFICIENCY * _between_gpus(chip, members)
    return EFFICIENCY * _between_tpus(chip, kind, members, everyone)


def _between_gpus(chip: Chip, members: Sequence[jax.Device]) -> float:
    """Bytes/s of a device: all adapters of a node serve a ring that goes through all its GPUs."""
    nodes = {_node(device) for device in members}
    if len(nodes) == 1:
        return chip.link
    return min(chip.link, chip.network * len(members) / len(nodes))


def _between_tpus(
    chip: Chip, kind: str, members: Sequence[jax.Device], everyone: Sequence[jax.Device]
) -> float:
    """Bytes/s of a device: links in each direction of the torus that the group extends in."""
    slices = {getattr(device, "slice_index", 0) or 0 for device in members}
    if len(slices) > 1:
        return chip.network * len(members) / len(slices)
    rates = []
    for axis in range(3):
        side = len({device.coords[axis] for device in members})
        whole = len({device.coords[axis] for device in everyone})
        if side > 1:
            closed = side == whole and whole % chip.torus_side == 0
            both_ways = 2 if closed or side > 2 else 1
            rates.append(chip.link * _share(kind, side, closed) * both_ways)
    return sum(rates) or chip.link


def _share(kind: str, side: int, closed: bool) -> float:
    """Of both links of a direction: a line has one neighbour at its ends, and all-to-all goes far.

    The busiest link of a ring of n carries n / 8 of what each device sends to all others, that of a
    line n / 4; rings that pass on pieces keep every link as busy as any other.
    """
    if kind == "all-to-all" and side > 2:
        return min(1.0, (4 if closed else 2) / side)
    return 1.0 if closed or side == 2 else 0.5


def _node(device: jax.Device) -> object:
    # Described GPUs have the node before their own number; of others, a process is one.
    coords = getattr(device, "coords", None)
    return tuple(coords[:2]) if coords is not None else device.process_index
