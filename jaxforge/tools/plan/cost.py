"""Cost model: durations of operations and collectives on a chip.

On TPU, an operation takes the compiler's cycles. On GPU, a roofline (Williams et al., 2009) gives
the time: the longer of FLOPs / peak FLOP/s and bytes / memory bandwidth, with both rates multiplied
by the fraction that kernels reach (`EFFICIENCY`). docs/plan.md compares the sums with published
runs. A collective takes the time in which its bytes pass the links that it uses.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from jaxforge.parallel.hardware import Chip
from jaxforge.parallel.rates import EFFICIENCY, link_rate
from jaxforge.tools.plan.hlo import (
    Computation,
    HloProgram,
    Operation,
    first_replica_group,
    sent_bytes,
)
from jaxforge.tools.plan.workload import Workload


class Roofline:
    """Rates of a device whose compiler writes no times into its programs.

    Args:
        workload: costs of the program's operations.
        chip: the device.
    """

    def __init__(self, workload: Workload, chip: Chip) -> None:
        self._workload, self._chip, self._efficiency = workload, chip, EFFICIENCY[chip.platform]

    def seconds(self, operation: Operation, within: Computation) -> tuple[str, float]:
        """Return an operation's kind and seconds."""
        cost = self._workload.of(operation, within)
        if cost.kind == "nothing":
            return cost.kind, 0
        products = 0.0
        if cost.flops:
            fraction = self._efficiency.by_kind[cost.by or cost.kind]
            fp8 = self._chip.fp8_flops if cost.by == "fp8" else 0
            products = cost.flops / ((fp8 or self._chip.peak_flops) * fraction)
        transfers = cost.bytes / (self._chip.bandwidth * self._efficiency.memory)
        return cost.kind, max(products, transfers) + self._efficiency.launch


class Cycles:
    """Rates of a TPU, by the compiler's cycles; Pallas kernels have none and use the roofline.

    The compiler's estimate for a memory-bound operation is two to ten times the time that the
    memory needs. Operations without products therefore take the shorter of both estimates.

    Args:
        program: program of the operations.
        workload: costs of its operations.
        chip: the device.
    """

    def __init__(self, program: HloProgram, workload: Workload, chip: Chip) -> None:
        self._program, self._chip = program, chip
        self._roofline = Roofline(workload, chip)

    def seconds(self, operation: Operation, within: Computation) -> tuple[str, float]:
        """Return an operation's kind and seconds."""
        if operation.kind == "custom-call":
            return self._roofline.seconds(operation, within)
        if not operation.cycles:
            return "nothing", 0
        seconds = operation.cycles / self._chip.cycles_per_second
        if self._program.category(operation) == "matmul":
            return "products", seconds
        return "memory", min(seconds, self._roofline.seconds(operation, within)[1] or seconds)


class UnknownRates:
    """Rates of an unknown device."""

    def seconds(self, operation: Operation, within: Computation) -> tuple[str, float]:
        """Return kind "nothing" and 0 seconds."""
        return "nothing", 0


def rates_of(
    program: HloProgram, chip: Chip | None, visible: float, length: int
) -> UnknownRates | Cycles | Roofline:
    """Return the rates of a program's operations on a chip.

    Args:
        program: the program.
        chip: the device; None if it is unknown.
        visible: fraction of visible pairs of attention, as in `Workload`.
        length: tokens of a sequence.
    """
    if chip is None:
        return UnknownRates()
    workload = Workload(program, visible, length)
    return Cycles(program, workload, chip) if chip.platform == "tpu" else Roofline(workload, chip)


class Collective(NamedTuple):
    """One execution of a collective.

    Attributes:
        kind: XLA's name, such as "all-gather".
        axes: mesh axes of its groups.
        sent: bytes that a device sends.
        seconds: duration without overlap.
    """

    kind: str
    axes: tuple[str, ...]
    sent: float
    seconds: float


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
        sent = sent_bytes(kind, size, len(group))
        return Collective(kind, self._axes(group), sent, self._seconds(kind, group, sent))

    def _axes(self, group: Sequence[int]) -> tuple[str, ...]:
        """Return the axes along which the members of a group differ."""
        coordinates = np.unravel_index(group, self._mesh.devices.shape)
        pairs = zip(self._mesh.axis_names, coordinates, strict=True)
        return tuple(str(name) for name, coordinate in pairs if len(set(coordinate.tolist())) > 1)

    def _seconds(self, kind: str, group: Sequence[int], sent: float) -> float:
        if self._chip is None or len(group) == 1:
            return 0
        rate = link_rate(self._chip, kind, [self._devices[i] for i in group], self._devices)
        return EFFICIENCY[self._chip.platform].latency + sent / rate
