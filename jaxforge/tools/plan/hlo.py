"""Parser of optimized HLO text: operations, their shapes, and the trip counts of loops."""

import functools
import math
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)")
_COLLECTIVE = re.compile(r"(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_MOST_TRIPS = 1_000_000
_RULES: dict[str, Callable[..., int]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "minimum": min,
    "maximum": max, "and": operator.and_, "or": operator.or_, "LT": operator.lt,
    "LE": operator.le, "GT": operator.gt, "GE": operator.ge, "EQ": operator.eq, "NE": operator.ne,
    **dict.fromkeys(("copy", "bitcast", "convert", "reshape"), int),
}  # fmt: skip


@dataclass(frozen=True)
class Operation:
    """One HLO instruction.

    Attributes:
        name: name of its result.
        kind: opcode, such as "fusion".
        shape: text of the result's shape.
        line: text of the instruction.
    """

    name: str
    kind: str
    shape: str
    line: str

    @property
    def bytes(self) -> int:
        """Bytes of the result, over all arrays."""
        return int(sum(math.prod(dims) * size for dims, size in parse_arrays(self.shape)))

    @property
    def elements(self) -> int:
        """Number of elements of the result, over all arrays."""
        return sum(math.prod(dims) for dims, _ in parse_arrays(self.shape))

    def text(self, name: str) -> str:
        """Return the value of an attribute `name="..."`; empty if absent."""
        match = re.search(rf'\b{name}="([^"]*)"', self.line)
        return match[1] if match else ""

    @property
    def collective(self) -> str | None:
        """Kind without `-start` if this is a collective or the first half of one, else None."""
        kind = self.kind.removesuffix("-start")
        return kind if _COLLECTIVE.fullmatch(kind) else None

    @property
    def cycles(self) -> int:
        """Cycles that the compiler estimates; 0 without an estimate."""
        match = re.search(r'"estimated_cycles":"(\d+)"', self.line)
        return int(match[1]) if match else 0

    def attribute(self, name: str) -> str:
        """Return the value of an attribute `name=...`, such as the name of a called computation."""
        match = re.search(rf"\b{name}=%?([\w.\-]+)", self.line)
        assert match, self.line[:200]
        return match[1]

    @property
    def arguments(self) -> str:
        """Text between the parentheses."""
        start = self.line.index(f" {self.kind}(") + len(self.kind) + 2
        depth = 1
        for end in range(start, len(self.line)):
            depth += {"(": 1, ")": -1}.get(self.line[end], 0)
            if not depth:
                return self.line[start:end]
        raise ValueError(f"open parenthesis: {self.line[:80]}")

    @property
    def branches(self) -> list[str]:
        """Names of the computations that a conditional chooses from."""
        if listed := re.search(r"branch_computations=\{([^}]*)\}", self.line):
            return [name.strip().lstrip("%") for name in listed[1].split(",")]
        return [self.attribute("true_computation"), self.attribute("false_computation")]

    @functools.cached_property
    def operands(self) -> list[str]:
        """Names of the operations whose results this operation reads."""
        return re.findall(r"%([\w.\-]+)", self.arguments)


Computation = dict[str, Operation]
"""Operations by name, in execution order."""


class HloProgram:
    """An optimized program.

    Args:
        text: the program's text, from `compiled.as_text()`.
        devices: number of devices that it runs on.
    """

    def __init__(self, text: str, devices: int) -> None:
        self.devices = devices
        self.computations, self.entry = _parse(text)
        self._matmuls: dict[str, bool] = {}

    def category(self, operation: Operation) -> str:
        """Return "matmul", "fusion" (without a matmul inside), "copy" or "other"."""
        if operation.kind in ("dot", "convolution"):
            return "matmul"
        if operation.kind == "fusion":
            name = operation.attribute("calls")
            if name not in self._matmuls:
                inner = self.computations[name].values()
                self._matmuls[name] = any(self.category(op) == "matmul" for op in inner)
            return "matmul" if self._matmuls[name] else "fusion"
        return "copy" if operation.kind.startswith("copy") else "other"

    def trips(self, loop: Operation, name: str) -> int:
        """Return the number of iterations of a loop in computation `name`.

        The compiler's annotation is used if there is one. Otherwise the integer scalars of the
        loop's carry are evaluated until its condition is false.
        """
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.line):
            return int(known[1])
        body, condition = (self.computations[loop.attribute(r)] for r in ("body", "condition"))
        # The initial carry is a tuple; only its integer scalars are followed.
        start = self.computations[name][loop.operands[0]]
        state = self._integers(self.computations[name], start.operands, {})
        # Counters of scans do not depend on data, so the loop is run on its integers alone.
        for trips in range(_MOST_TRIPS):
            if not self._integer(condition, root_of(condition), state):
                return trips
            state = self._integers(body, root_of(body).operands, state)
        raise ValueError(f"the loop does not end: {loop.line[:80]}")

    def _integers(
        self, operations: Computation, names: list[str], state: dict[int, int]
    ) -> dict[int, int]:
        """Evaluate the integer scalars among the elements of a tuple, by index."""
        values = {
            index: self._integer(operations, operations[name], state)
            for index, name in enumerate(names)
            # [] is the shape of a scalar.
            if re.match(r"(pred|[su]\d+)\[\]", operations[name].shape)
        }
        return {index: value for index, value in values.items() if value is not None}

    def _integer(
        self, operations: Computation, operation: Operation, state: dict[int, int]
    ) -> int | None:
        """Evaluate an integer scalar for a loop carry `state`; None if it depends on data."""
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
            inner = self.computations[operation.attribute("calls")]
            known = {i: value for i, value in enumerate(values) if value is not None}
            return self._integer(inner, root_of(inner), known)
        kind = operation.kind
        rule = _RULES.get(operation.attribute("direction") if kind == "compare" else kind)
        return None if rule is None or None in values else int(rule(*values))


def root_of(operations: Computation) -> Operation:
    """Return the operation whose result is that of its computation."""
    return next(op for op in operations.values() if op.line.lstrip().startswith("ROOT "))


def _parse(text: str) -> tuple[dict[str, Computation], str]:
    computations: dict[str, Computation] = {}
    current: Computation = {}
    entry = ""
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            current = computations.setdefault(head[2], {})
            entry = head[2] if head[1] else entry
        elif instruction := _INSTRUCTION.match(line):
            shape, kind = _split(instruction[2])
            current[instruction[1]] = Operation(instruction[1], kind, shape, line)
    return computations, entry


def _split(text: str) -> tuple[str, str]:
    """Return shape and opcode of `f32[2]{0} add(...)` or `(f32[2], s32[]) while(...)`."""
    depth = 0
    for i, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        # The shape of a tuple has blanks within its parentheses.
        if character == " " and not depth:
            return text[:i], text[i + 1 :].split("(")[0]
    raise ValueError(f"no instruction: {text[:80]}")


def parse_arrays(shape: str) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield dimensions and bytes per element of each array in the text of a shape."""
    for name, bits, dims in _ARRAY.findall(shape):
        yield tuple(map(int, filter(None, dims.split(",")))), 1 if name == "pred" else int(bits) / 8


def sent_bytes(kind: str, size: float, group: int) -> float:
    """Return the bytes that a device sends in a ring collective.

    Args:
        kind: kind of collective.
        size: bytes of its operands on each device.
        group: devices of a group.
    """
    # Of a ring of n devices, each holding `size` bytes:
    #   all-gather       passes on every shard but one:    size * (n - 1)
    #   reduce-scatter   passes on n - 1 of n parts:       size * (n - 1) / n    (also all-to-all)
    #   all-reduce       is a reduce-scatter and an all-gather of the parts: twice that
    share = {"all-gather": group - 1, "all-reduce": 2 * (group - 1) / group,
             "collective-permute": 1}  # fmt: skip
    return size * share.get(kind, (group - 1) / group)


def first_replica_group(line: str, devices: int) -> list[int]:
    """Return the positions in the mesh of the devices of a collective's first group.

    XLA writes groups in four forms: pairs of source and target, lists, a transposed iota
    (`[4,2]<=[2,4]T(1,0)`), or axes of a mesh.
    """
    if pairs := re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", line):
        return [int(pairs[1]), int(pairs[2])]
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return [int(n) for n in listed[1].split(",")]
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", line):
        return _device_order(iota[2])[: int(iota[1])]
    if mesh := re.search(r"replica_groups=mesh\[(.*?)\](, device_ids=.*?)? \{(.*?)\}", line):
        # Groups run over the named axes; the first group has coordinate 0 on all other axes.
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        over, order = set(re.findall(r"'(\w+)'", mesh[3])), _device_order(mesh[2] or "")
        grid = np.arange(math.prod(sizes.values())).reshape(*sizes.values())
        members = grid[tuple(slice(None) if axis in over else 0 for axis in sizes)].ravel().tolist()
        return [order[member] for member in members] if order else members
    return list(range(devices))


def source_target_pairs(line: str) -> list[tuple[int, int]]:
    """Return the positions in the mesh of the source and target of each message of a permute."""
    listed = re.search(r"source_target_pairs=\{(.*?)\}\}", line)
    pairs = re.findall(r"(\d+),(\d+)", listed[1]) if listed else []
    return [(int(source), int(target)) for source, target in pairs]


def _device_order(text: str) -> list[int]:
    """Return the devices of `[2,4]T(1,0)`, a transposed iota, or of a list `(1,0,3,2)`."""
    if iota := re.search(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        dims, order = (list(map(int, filter(None, (x or "").split(",")))) for x in iota.groups())
        devices = np.arange(math.prod(dims)).reshape(dims)
        return devices.transpose(order or None).ravel().tolist()
    return [int(n) for n in text.partition("(")[2].rstrip(")").split(",") if n]
