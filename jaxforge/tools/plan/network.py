"""Durations of collectives on the links between the devices of a mesh."""

import functools
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from jaxforge.parallel.hardware import Chip
from jaxforge.parallel.rates import EFFICIENCY, link_rate, shape_of_torus, slices_of
from jaxforge.tools.plan.hlo import (
    Computation,
    Operation,
    first_replica_group,
    sent_bytes,
    source_target_pairs,
)

Coordinates = tuple[int, ...]
"""Position of a chip in its slice."""


class Collective(NamedTuple):
    """One execution of a collective.

    Attributes:
        kind: XLA's name, such as "all-gather".
        axes: mesh axes of its groups.
        sent: bytes that a device sends.
        seconds: duration without overlap.
        links: links that it occupies. Collectives that share one run one after another.
    """

    kind: str
    axes: tuple[str, ...]
    sent: float
    seconds: float
    links: frozenset[Hashable]


class Network:
    """Links between the devices of a mesh.

    Args:
        mesh: mesh of the devices, which may be compile-only.
        chip: their kind; None if the links are unknown, as between CPU devices.
    """

    def __init__(self, mesh: Mesh, chip: Chip | None) -> None:
        self._mesh, self._chip = mesh, chip
        self._devices = list(mesh.devices.flat)

    def collective(self, operation: Operation, within: Computation) -> Collective:
        """Return the cost of a collective, or of the first half (`-start`) of one."""
        kind = operation.collective or operation.kind
        group = first_replica_group(operation.line, len(self._devices))
        size = sum(within[name].bytes for name in operation.operands)
        sent, axes = sent_bytes(kind, size, len(group)), self._axes(group)
        seconds, links = 0.0, frozenset[Hashable]()
        if self._chip is not None and len(group) > 1:  # a group of one exchanges nothing
            rate, links = self._rate(self._chip, kind, tuple(group), operation.line)
            seconds = EFFICIENCY[self._chip.platform].latency + sent / rate
        return Collective(kind, axes, sent, seconds, links or frozenset({axes}))

    def _axes(self, group: Sequence[int]) -> tuple[str, ...]:
        """Return the axes along which the members of a group differ."""
        # [axes][members]: an axis along which coordinates differ belongs to the group.
        coordinates = np.unravel_index(group, self._mesh.devices.shape)
        pairs = zip(self._mesh.axis_names, coordinates, strict=True)
        return tuple(str(name) for name, coordinate in pairs if len(set(coordinate.tolist())) > 1)

    def _rate(
        self, chip: Chip, kind: str, group: tuple[int, ...], line: str
    ) -> tuple[float, frozenset[Hashable]]:
        """Return the bytes/s that each device sends, and the links of a torus that are in use."""
        if chip.platform == "tpu" and len(slices_of(self._devices)) == 1:
            if kind != "collective-permute":
                return self._rate_in_group(kind, group), self._links_within(group)
            if load := self._load(tuple(source_target_pairs(line))):
                rate = chip.link * chip.per_chip / max(load.values())
                return EFFICIENCY[chip.platform].links * rate, frozenset(load)
        return self._rate_in_group(kind, group), frozenset()

    @functools.cache  # noqa: B019  a network lives as long as a plan
    def _rate_in_group(self, kind: str, group: tuple[int, ...]) -> float:
        assert self._chip is not None
        return link_rate(self._chip, kind, [self._devices[i] for i in group], self._devices)

    @functools.cache  # noqa: B019
    def _load(self, pairs: tuple[tuple[int, int], ...]) -> Counter[Hashable]:
        """Return the number of messages that pass each link; empty between cores of a chip."""
        return Counter(
            link
            for source, target in pairs
            for link in self._route(self._chip_of(source), self._chip_of(target))
        )

    @functools.cache  # noqa: B019
    def _links_within(self, group: tuple[int, ...]) -> frozenset[Hashable]:
        """Return the links, in both directions, between neighbours of a group."""
        chips = {self._chip_of(device) for device in group}
        return frozenset(
            (chip, neighbour)
            for chip in chips
            for axis in range(len(chip))
            for step in (-1, 1)
            if (neighbour := self._moved(chip, axis, step)) in chips - {chip}
        )

    @functools.cached_property
    def _torus(self) -> Coordinates:
        return shape_of_torus(self._devices)

    def _chip_of(self, device: int) -> Coordinates:
        return tuple(self._devices[device].coords)

    def _route(
        self, source: Coordinates, target: Coordinates
    ) -> Iterator[tuple[Coordinates, Coordinates]]:
        """Yield the links, (from, to), of a message: one side after another, the shorter way."""
        assert self._chip is not None
        at = source
        for axis, size in enumerate(self._torus):
            distance = target[axis] - at[axis]
            if self._chip.is_ring(size) and abs(distance) > size / 2:
                distance -= int(math.copysign(size, distance))
            for _ in range(abs(distance)):
                before, at = at, self._moved(at, axis, 1 if distance > 0 else -1)
                yield before, at

    def _moved(self, chip: Coordinates, axis: int, step: int) -> Coordinates:
        """Return the next chip on a side; beyond the end of a line, coordinates of no chip."""
        assert self._chip is not None
        size, at = self._torus[axis], chip[axis] + step
        at = at % size if self._chip.is_ring(size) else at
        return (*chip[:axis], at, *chip[axis + 1 :])
