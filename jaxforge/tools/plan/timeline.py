"""Timeline of a step: operations in sequence, collectives in parallel with them.

A device computes in the order that the compiler has scheduled. A collective in two halves runs
next to what stands between them, after those over the same axes that began earlier; where its
second half comes too early, the device waits. A loop takes as long as its body as many times, and
what its iterations begin they are taken to end.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from jaxforge.tools.plan.cost import Collective
from jaxforge.tools.plan.hlo import Computation, HloProgram, Operation


class Rates(Protocol):
    """Durations of operations on a device."""

    def seconds(self, operation: Operation, within: Computation) -> tuple[str, float]:
        """Its kind, and seconds by itself."""


class Links(Protocol):
    """Durations of collectives."""

    def collective(self, operation: Operation, within: Computation) -> Collective:
        """Return the isolated duration of a collective, or of its first half."""


class CollectiveKey(NamedTuple):
    """Collectives that are told of together."""

    kind: str
    axes: tuple[str, ...]
    in_loop: bool
    overlapped: bool


@dataclass
class Traffic:
    """Sum of all collectives of a step with one key, on one device.

    Attributes:
        count: executions.
        bytes: sent.
        seconds: that they take by themselves.
        waited: seconds that the device does nothing else.
    """

    count: float = 0
    bytes: float = 0
    seconds: float = 0
    waited: float = 0


class Span(NamedTuple):
    """A piece of the picture of a step; of a loop, of its first iteration.

    Attributes:
        name: of the operation.
        kind: of the work, or of the collective.
        lane: "device", or the axes of a collective.
        start: seconds since the beginning of the computation that it stands in.
        seconds: that it takes; of a loop, all iterations.
        times: iterations of a loop.
        inside: of a loop's body.
    """

    name: str
    kind: str
    lane: str
    start: float
    seconds: float
    times: int = 1
    inside: tuple["Span", ...] = ()


@dataclass
class Timeline:
    """Timeline of a computation.

    Attributes:
        seconds: from its beginning to its end.
        busy: seconds of the device by kind of work.
        traffic: of its collectives.
        spans: in the order in which they begin.
    """

    seconds: float = 0
    busy: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    traffic: dict[CollectiveKey, Traffic] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)

    @property
    def waited(self) -> float:
        """Seconds that the device waits for collectives."""
        return sum(traffic.waited for traffic in self.traffic.values())

    def add(self, other: "Timeline", times: int = 1) -> None:
        """Add the sums of a repeated timeline; time and picture do not change."""
        for kind, seconds in other.busy.items():
            self.busy[kind] += seconds * times
        for key, theirs in other.traffic.items():
            mine = self.traffic.setdefault(key, Traffic())
            mine.count += theirs.count * times
            mine.bytes += theirs.bytes * times
            mine.seconds += theirs.seconds * times
            mine.waited += theirs.waited * times


class Simulation:
    """Runs a program in time.

    Args:
        program: optimized and scheduled.
        rates: of the device.
        network: between devices.
        longest: whether of the branches of a condition the longest is taken, as in stages of a
            pipeline that all have work, or the shortest, as an even load of experts does.
    """

    def __init__(
        self, program: HloProgram, rates: Rates, network: Links, *, longest: bool = False
    ) -> None:
        self._program, self._rates, self._network = program, rates, network
        self._longest = longest

    def run(self) -> Timeline:
        """The whole program, once."""
        return self._run(self._program.entry, in_loop=False)

    def _run(self, name: str, *, in_loop: bool) -> Timeline:
        clock, within = _Clock(in_loop), self._program.computations[name]
        for operation in within.values():
            if nested := self._nested(operation, name, in_loop=in_loop):
                clock.nest(operation, *nested)
            elif done := self._ended_by(operation):
                clock.end(done)
            elif operation.kind == "async-update":
                clock.rename(operation.operands[0], operation.name)
            elif begun := self._begun_by(operation, within):
                clock.begin(operation, *begun)
            elif operation.collective:
                collective = self._network.collective(operation, within)
                if collective.axes:  # else every device is alone
                    clock.exchange(operation, collective)
            else:
                clock.run(operation, *self._rates.seconds(operation, within))
        return clock.stop()

    def _nested(
        self, operation: Operation, name: str, *, in_loop: bool
    ) -> tuple[Timeline, int] | None:
        """Return the computation of a loop, condition or call, and its number of iterations."""
        match operation.kind:
            case "while":
                body = self._run(operation.attribute("body"), in_loop=True)
                return body, self._program.trips(operation, name)
            case "conditional":
                branches = [self._run(branch, in_loop=in_loop) for branch in _branches(operation)]
                pick = max if self._longest else min
                return pick(branches, key=lambda branch: branch.seconds), 1
            case "call":
                return self._run(operation.attribute("to_apply"), in_loop=in_loop), 1
        return None

    def _begun_by(self, operation: Operation, within: Computation) -> tuple[str, Collective] | None:
        """A collective that begins here and ends elsewhere, by what its end will name."""
        if operation.collective and operation.kind.endswith("-start"):
            return operation.name, self._network.collective(operation, within)
        if operation.kind in ("async-start", "fusion"):
            inner = self._program.computations[operation.attribute("calls")]
            marked = operation.kind == "async-start" or _has(inner, "AsyncCollectiveStart")
            for inner_op in inner.values() if marked else ():
                if inner_op.collective:
                    key = _channel(inner_op) if operation.kind == "fusion" else operation.name
                    return key, self._network.collective(inner_op, inner)
        return None

    def _ended_by(self, operation: Operation) -> str | None:
        if operation.kind.endswith("-done"):
            return operation.operands[0]
        if operation.kind == "fusion":
            inner = self._program.computations[operation.attribute("calls")]
            if _has(inner, "AsyncCollectiveDone"):
                return next(
                    (_channel(inner_op) for inner_op in inner.values() if inner_op.collective), None
                )
        return None


class _Clock:
    """Time while a computation runs, and what it is spent on."""

    def __init__(self, in_loop: bool) -> None:
        self._in_loop = in_loop
        self._line = Timeline()
        self._free: dict[tuple[str, ...], float] = {}
        self._running: dict[str, tuple[float, CollectiveKey]] = {}

    def stop(self) -> Timeline:
        """Waits for what still runs."""
        for name in list(self._running):
            self.end(name)
        return self._line

    def run(self, operation: Operation, kind: str, seconds: float) -> None:
        """The device computes."""
        if seconds:
            self._picture(operation.name, kind, "device", seconds)
            self._line.busy[kind] += seconds
            self._line.seconds += seconds

    def nest(self, operation: Operation, inner: Timeline, times: int) -> None:
        """Append a loop of this many iterations, or a call."""
        line, seconds = self._line, inner.seconds * times
        if seconds:
            span = Span(operation.name, operation.kind, "device", line.seconds, seconds)
            line.spans.append(span._replace(times=times, inside=tuple(inner.spans)))
        line.add(inner, times)
        line.seconds += seconds

    def exchange(self, operation: Operation, collective: Collective) -> None:
        """Append a collective that overlaps with nothing."""
        self._picture(operation.name, collective.kind, _lane(collective), collective.seconds)
        self._count(collective, overlapped=False).waited += collective.seconds
        self._line.seconds += collective.seconds

    def begin(self, operation: Operation, name: str, collective: Collective) -> None:
        """A collective that `end` will wait for by that name."""
        start = max(self._line.seconds, self._free.get(collective.axes, 0.0))
        self._free[collective.axes] = end = start + collective.seconds
        self._count(collective, overlapped=True)
        self._running[name] = (
            end,
            CollectiveKey(collective.kind, collective.axes, self._in_loop, True),
        )
        self._line.spans.append(
            Span(operation.name, collective.kind, _lane(collective), start, collective.seconds)
        )

    def rename(self, old: str, new: str) -> None:
        """Rename a pending operation."""
        if old in self._running:
            self._running[new] = self._running.pop(old)

    def end(self, name: str) -> None:
        """Waits for what was begun by that name; an earlier iteration's has ended."""
        if name in self._running:
            end, key = self._running.pop(name)
            waited = max(0.0, end - self._line.seconds)
            self._line.traffic[key].waited += waited
            self._line.seconds += waited

    def _count(self, collective: Collective, *, overlapped: bool) -> Traffic:
        key = CollectiveKey(collective.kind, collective.axes, self._in_loop, overlapped)
        traffic = self._line.traffic.setdefault(key, Traffic())
        traffic.count += 1
        traffic.bytes += collective.sent
        traffic.seconds += collective.seconds
        return traffic

    def _picture(self, name: str, kind: str, lane: str, seconds: float) -> None:
        self._line.spans.append(Span(name, kind, lane, self._line.seconds, seconds))


def _lane(collective: Collective) -> str:
    return " x ".join(collective.axes) or "alone"


def _has(inner: Computation, target: str) -> bool:
    return any(
        f'"{target}"' in operation.line
        for operation in inner.values()
        if operation.kind == "custom-call"
    )


def _channel(operation: Operation) -> str:
    match = re.search(r"channel_id=(\d+)", operation.line)
    return f"channel {match[1]}" if match else operation.name


def _branches(operation: Operation) -> Iterator[str]:
    if listed := re.search(r"branch_computations=\{([^}]*)\}", operation.line):
        yield from (name.strip().lstrip("%") for name in listed[1].split(","))
    else:
        yield operation.attribute("true_computation")
        yield operation.attribute("false_computation")
