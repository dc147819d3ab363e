"""Cycles and synchronous collectives of a program, from XLA's compiler for TPU.

The compiler annotates most operations with an estimate of cycles. The estimates rank programs, but
are not times: matrix products are accurate, memory-bound operations are overestimated, and
collectives and Pallas kernels have no estimate. Collectives are counted instead, with the bytes
that a ring sends.
"""

import math
from collections import Counter
from dataclasses import dataclass, field

from jaxforge.tools.plan.hlo import (
    Computation,
    HloProgram,
    Operation,
    first_replica_group,
    parse_arrays,
    sent_bytes,
)


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
    """Return the cost of one execution of a computation, by default of the whole program.

    Of a conditional, the cycles are the compiler's, and the collectives those of the branch that
    sends most: a loop that passes partial sums around a ring sends under the condition that an
    iteration is not the last one.
    """
    cost, name = Cost(), name or program.entry
    within = program.computations[name]
    begun: dict[str, int] = {}  # first half of a collective -> operations executed before it
    executed = 0
    for operation in within.values():
        # Kernels of Pallas are custom calls, which have no estimate of cycles.
        executed += bool(operation.cycles) or operation.kind in ("while", "call", "custom-call")
        if operation.kind == "while":
            body = cost_of(program, operation.attribute("body"))
            cost.add(body, program.trips(operation, name))
        elif operation.kind == "call" and not operation.cycles:
            cost.add(cost_of(program, operation.attribute("to_apply")))
        else:
            cost.cycles[program.category(operation)] += operation.cycles
            if operation.kind == "conditional":
                branches = (cost_of(program, branch) for branch in operation.branches)
                costliest = max(branches, key=lambda branch: branch.synchronous_bytes)
                cost.add(Cost(synchronous=costliest.synchronous, sent=costliest.sent))
            elif operation.collective == operation.kind:
                _add_collective(cost, operation, within, program)
            elif operation.collective:
                begun[operation.name] = executed
            elif operation.kind.endswith("-done") and begun.get(operation.operands[0]) == executed:
                # Nothing ran between the two halves.
                _add_collective(cost, within[operation.operands[0]], within, program)
    return cost


def _add_collective(
    cost: Cost, operation: Operation, within: Computation, program: HloProgram
) -> None:
    kind = str(operation.collective)
    size = sum(within[other].bytes for other in operation.operands)
    group = len(first_replica_group(operation.line, program.devices))
    cost.synchronous[kind] += 1
    cost.sent[kind] += round(sent_bytes(kind, size, group))


def gathered(program: HloProgram) -> list[tuple[int, ...]]:
    """Return the dimensions of the result of each all-gather in all computations."""
    every = (op for ops in program.computations.values() for op in ops.values())
    return [
        max((dims for dims, _ in parse_arrays(op.shape)), key=math.prod)
        for op in every
        if op.kind.startswith("all-gather")
    ]
