"""Cycles and synchronous collectives of a program, from XLA's compiler for TPU.

The compiler annotates most operations with an estimate of cycles. The estimates rank programs, but
are not times: matrix products are accurate, memory-bound operations are overestimated, and
collectives and Pallas kernels have no estimate. Collectives are counted instead, with the bytes
that a ring sends.
"""

import math
from collections import Counter
from dataclasses import dataclass, field

from jaxforge.tools.plan.hlo import HloProgram, first_replica_group, parse_arrays, sent_bytes


@dataclass
class Cost:
    """Total costs of one device and step.

    Attributes:
        cycles: estimated cycles by kind of operation: matmul, fusion, copy, other.
        synchronous: collectives that overlap with nothing, by kind.
        sent: bytes that one device sends in them, by kind.
    """

    cycles: Counter[str] = field(default_factory=Counter)
    synchronous: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)

    @property
    def synchronous_bytes(self) -> float:
        """Return the bytes that one device sends in synchronous collectives."""
        return sum(self.sent.values())

    def add(self, other: "Cost", times: int = 1) -> None:
        """Add `times` executions of another program."""
        for name in ("cycles", "synchronous", "sent"):
            for kind, value in getattr(other, name).items():
                getattr(self, name)[kind] += value * times


def cost_of(program: HloProgram, name: str = "") -> Cost:
    """Return the cost of one execution of a computation, by default of the whole program."""
    cost, name = Cost(), name or program.entry
    within = program.computations[name]
    for operation in within.values():
        if operation.kind == "while":
            body = cost_of(program, operation.attribute("body"))
            cost.add(body, program.trips(operation, name))
        elif operation.kind == "call" and not operation.cycles:
            cost.add(cost_of(program, operation.attribute("to_apply")))
        else:
            cost.cycles[program.category(operation)] += operation.cycles
            if operation.collective == operation.kind:  # one in two halves may overlap
                cost.synchronous[operation.kind] += 1
                size = sum(within[other].bytes for other in operation.operands)
                group = len(first_replica_group(operation.line, program.devices))
                cost.sent[operation.kind] += round(sent_bytes(operation.kind, size, group))
    return cost


def gathered(program: HloProgram) -> list[tuple[int, ...]]:
    """Return the dimensions of the result of each all-gather in all computations."""
    every = (op for ops in program.computations.values() for op in ops.values())
    return [
        max((dims for dims, _ in parse_arrays(op.shape)), key=math.prod)
        for op in every
        if op.kind.startswith("all-gather")
    ]
