"""What the compiler for TPU writes into a program: its estimate of the cycles of each operation.

The estimates are for ranking programs, not times: matrix products are close to what the hardware
does, memory-bound operations are charged too much, and collectives and Pallas kernels have no
estimate at all. Collectives are counted instead, with the bytes that a ring sends.
"""

import math
import operator
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)")
_COLLECTIVE = re.compile(r"(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)")
_MOST_TRIPS = 1_000_000
_RULES: dict[str, Callable[..., int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "minimum": min,
    "maximum": max,
    "and": operator.and_,
    "or": operator.or_,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
    "copy": lambda x: x,
    "bitcast": lambda x: x,
    "convert": lambda x: x,
    "reshape": lambda x: x,
}


@dataclass
class Operation:
    """One instruction: its kind, the text of its result's shape, and the whole line."""

    kind: str
    shape: str
    line: str

    @property
    def cycles(self) -> int:
        """The compiler's estimate; 0 where it has none."""
        found = re.search(r'"estimated_cycles":"(\d+)"', self.line)
        return int(found[1]) if found else 0

    def called(self, role: str) -> str:
        """Name of the computation that it calls as `role`."""
        return self.attribute(role)

    def attribute(self, name: str) -> str:
        """Value of `name=...`."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.line)
        assert found, self.line[:200]
        return found[1]

    @property
    def arguments(self) -> str:
        """What stands in the parentheses."""
        start = self.line.index(f" {self.kind}(") + len(self.kind) + 2
        depth = 1
        for end in range(start, len(self.line)):
            depth += {"(": 1, ")": -1}.get(self.line[end], 0)
            if not depth:
                return self.line[start:end]
        raise ValueError(f"open parenthesis: {self.line[:80]}")

    @property
    def operands(self) -> list[str]:
        """Names of the operations whose results it takes."""
        return re.findall(r"%([\w.\-]+)", self.arguments)


@dataclass
class Cost:
    """Totals of one device and step.

    Attributes:
        cycles: estimated cycles by kind of operation: matmul, fusion, copy, other.
        synchronous: collectives that nothing runs beside, by kind.
        sent: bytes that one device sends in them, by kind.
    """

    cycles: Counter[str] = field(default_factory=Counter)
    synchronous: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)

    @property
    def synchronous_bytes(self) -> float:
        """What one device sends in synchronous collectives."""
        return sum(self.sent.values())

    def add(self, other: "Cost", times: int = 1) -> None:
        """Adds `times` executions of another."""
        for mine, others in (
            (self.cycles, other.cycles),
            (self.synchronous, other.synchronous),
            (self.sent, other.sent),
        ):
            for kind, value in others.items():
                mine[kind] += value * times


class Program:
    """An optimized program, from `compiled.as_text()`.

    Args:
        text: of the program.
        devices: that it runs on.
    """

    def __init__(self, text: str, devices: int) -> None:
        self._devices = devices
        self._computations, self._entry = _parse(text)
        self._matmuls: dict[str, bool] = {}

    def cost(self) -> Cost:
        """Of one execution."""
        return self._cost(self._entry)

    def gathered(self) -> list[tuple[int, ...]]:
        """Dimensions of what each all-gather makes, however it runs, in all computations."""
        every = (op for ops in self._computations.values() for op in ops.values())
        return [_largest(op.shape) for op in every if op.kind.startswith("all-gather")]

    def _cost(self, name: str) -> Cost:
        cost = Cost()
        for operation in self._computations[name].values():
            if operation.kind == "while":
                cost.add(self._cost(operation.called("body")), self._trips(operation, name))
            elif operation.kind == "call" and not operation.cycles:
                cost.add(self._cost(operation.called("to_apply")))
            else:
                cost.cycles[self._category(operation)] += operation.cycles
                self._count_collectives(operation, name, cost)
        return cost

    def _category(self, operation: Operation) -> str:
        if operation.kind in ("dot", "convolution"):
            return "matmul"
        if operation.kind == "fusion":
            return "matmul" if self._has_matmul(operation.called("calls")) else "fusion"
        return "copy" if operation.kind.startswith("copy") else "other"

    def _has_matmul(self, name: str) -> bool:
        if name not in self._matmuls:
            inner = self._computations[name].values()
            self._matmuls[name] = any(self._category(op) == "matmul" for op in inner)
        return self._matmuls[name]

    def _count_collectives(self, operation: Operation, name: str, cost: Cost) -> None:
        """A collective by itself is synchronous; one in two halves or in a fusion may overlap."""
        if not _COLLECTIVE.fullmatch(operation.kind):
            return
        cost.synchronous[operation.kind] += 1
        size = sum(_bytes(self._computations[name][other].shape) for other in operation.operands)
        group = _group_size(operation.line, self._devices)
        share = {"all-gather": group - 1, "all-reduce": 2 * (group - 1) / group}
        sent = size * share.get(operation.kind, (group - 1) / group)
        cost.sent[operation.kind] += round(sent)

    def _trips(self, loop: Operation, name: str) -> int:
        """Iterations of a loop, found by running the integers that it carries."""
        body, condition = (self._computations[loop.called(r)] for r in ("body", "condition"))
        start = self._computations[name][loop.operands[0]]
        state = self._integers(self._computations[name], start.operands, {})
        for trips in range(_MOST_TRIPS):
            if not self._integer(condition, _root(condition), state):
                return trips
            state = self._integers(body, _root(body).operands, state)
        raise ValueError(f"no end of the loop {loop.line[:80]}")

    def _integers(
        self, operations: dict[str, Operation], names: list[str], state: dict[int, int]
    ) -> dict[int, int]:
        """The integer scalars among the elements of a tuple, by index."""
        found = {
            index: self._integer(operations, operations[name], state)
            for index, name in enumerate(names)
            if re.match(r"(pred|[su]\d+)\[\]", operations[name].shape)
        }
        return {index: value for index, value in found.items() if value is not None}

    def _integer(
        self, operations: dict[str, Operation], operation: Operation, state: dict[int, int]
    ) -> int | None:
        """Value of an integer scalar where the loop state is `state`; None if it hangs on data."""
        if operation.kind == "constant":
            literal = operation.arguments
            if re.fullmatch(r"-?\d+", literal):
                return int(literal)
            return {"true": 1, "false": 0}.get(literal)  # arrays are left out of the text
        if operation.kind == "parameter":
            return state.get(int(operation.arguments))
        operands = [operations[name] for name in operation.operands]
        if operation.kind == "get-tuple-element":
            index = int(operation.attribute("index"))
            if operands[0].kind == "parameter":
                return state.get(index)
            if operands[0].kind == "tuple":
                return self._integer(operations, operations[operands[0].operands[index]], state)
            return None
        values = [self._integer(operations, operand, state) for operand in operands]
        if operation.kind == "fusion":
            inner = self._computations[operation.called("calls")]
            known = {i: value for i, value in enumerate(values) if value is not None}
            return self._integer(inner, _root(inner), known)
        kind = operation.kind
        rule = _RULES.get(operation.attribute("direction") if kind == "compare" else kind)
        return None if rule is None or None in values else int(rule(*values))


def _root(operations: dict[str, Operation]) -> Operation:
    return next(op for op in operations.values() if op.line.lstrip().startswith("ROOT "))


def _parse(text: str) -> tuple[dict[str, dict[str, Operation]], str]:
    computations: dict[str, dict[str, Operation]] = {}
    current: dict[str, Operation] = {}
    entry = ""
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            current = computations.setdefault(head[2], {})
            entry = head[2] if head[1] else entry
        elif instruction := _INSTRUCTION.match(line):
            shape, kind = _split(instruction[2])
            current[instruction[1]] = Operation(kind, shape, line)
    return computations, entry


def _split(text: str) -> tuple[str, str]:
    """Shape and kind of `f32[2]{0} add(...)` or `(f32[2], s32[]) while(...)`."""
    depth = 0
    for i, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == " " and not depth:
            return text[:i], text[i + 1 :].split("(")[0]
    raise ValueError(f"no instruction: {text[:80]}")


def _bytes(shape: str) -> int:
    return sum(
        (1 if name == "pred" else int(bits) // 8) * math.prod(int(d) for d in dims.split(",") if d)
        for name, bits, dims in re.findall(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]", shape)
    )


def _largest(shape: str) -> tuple[int, ...]:
    """Dimensions of the largest array of a shape."""
    arrays = re.findall(r"\b[a-z]+\d*\w*\[([\d,]*)\]", shape)
    return max((tuple(int(d) for d in dims.split(",") if d) for dims in arrays), key=math.prod)


def _group_size(line: str, devices: int) -> int:
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return len(listed[1].split(","))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(iota[1])
    if mesh := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh[2]))
    return devices
