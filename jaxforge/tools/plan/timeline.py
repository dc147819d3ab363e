"""Timeline of a step: operations in sequence, collectives in parallel with them.

A device computes in the order that the compiler has scheduled. An asynchronous collective overlaps
with the operations between its two halves. It starts after earlier collectives over the same axes.
The device waits if the second half is reached before the collective ends:

    device     | op 1 | op 2 | wait | op 3 |
    dp_shard          | all-gather  |
                      ^ -start      ^ -done

A loop takes its body's time in each iteration. Every iteration is assumed to end the collectives
that it starts.
"""

import re
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from jaxforge.tools.plan.hlo import Computation, HloProgram, Operation
from jaxforge.tools.plan.network import Collective


class Rates(Protocol):
    """Durations of operations on a device."""

    def seconds(self, operation: Operation, within: Computation) -> tuple[str, float]:
        """Return the kind of an operation and its seconds without overlap."""


class Links(Protocol):
    """Durations of collectives."""

    def collective(self, operation: Operation, within: Computation) -> Collective:
        """Return the cost of a collective, or of the first half of one."""


class CollectiveKey(NamedTuple):
    """Group of collectives that are reported together."""

    kind: str
    axes: tuple[str, ...]
    in_loop: bool
    overlapped: bool


@dataclass
class Traffic:
    """Sums over all collectives of a step with one key, on one device.

    Attributes:
        count: number of executions.
        bytes: bytes sent.
        seconds: duration without overlap.
        waited: seconds in which the device is idle.
    """

    count: float = 0
    bytes: float = 0
    seconds: float = 0
    waited: float = 0


@dataclass
class Timeline:
    """Timeline of a computation.

    Attributes:
        seconds: total duration.
        busy: seconds of the device by kind of work.
        traffic: sums of its collectives.
    """

    seconds: float = 0
    busy: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    traffic: dict[CollectiveKey, Traffic] = field(default_factory=dict)

    @property
    def waited(self) -> float:
        """Seconds that the device waits for collectives."""
        return sum(traffic.waited for traffic in self.traffic.values())

    def add(self, other: "Timeline", times: int = 1) -> None:
        """Add the sums of a repeated timeline, but not its duration."""
        for kind, seconds in other.busy.items():
            self.busy[kind] += seconds * times
        for key, added in other.traffic.items():
            traffic = self.traffic.setdefault(key, Traffic())
            traffic.count += added.count * times
            traffic.bytes += added.bytes * times
            traffic.seconds += added.seconds * times
            traffic.waited += added.waited * times


class Simulation:
    """Simulated execution of a program.

    Args:
        program: an optimized and scheduled program.
        rates: rates of the device.
        network: links between devices.
        longest: take the longest branch of a conditional, as pipeline stages with work do. By
            default the shortest is taken, as with an even load of experts, if no branch sends
            partial sums around a ring.
    """

    def __init__(
        self, program: HloProgram, rates: Rates, network: Links, *, longest: bool = False
    ) -> None:
        self._program, self._rates, self._network = program, rates, network
        self._longest = longest

    def run(self) -> Timeline:
        """Return the timeline of the whole program."""
        return self._run(self._program.entry, in_loop=False)

    def _run(self, name: str, *, in_loop: bool) -> Timeline:
        clock, within = _Clock(in_loop), self._program.computations[name]
        for operation in within.values():
            if nested := self._nested(operation, name, in_loop=in_loop):
                clock.nest(*nested)
            elif done := self._ended_by(operation):
                clock.end(done)
            elif operation.kind == "async-update":
                # The second half refers to the update and not to the start.
                clock.rename(operation.operands[0], operation.name)
            elif begun := self._begun_by(operation, within):
                clock.begin(*begun)
            elif collective := self._synchronous(operation, within):
                if collective.axes:  # otherwise each group has one device
                    clock.exchange(collective)
            else:
                clock.run(*self._rates.seconds(operation, within))
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
                branches = [self._run(branch, in_loop=in_loop) for branch in operation.branches]
                # A ring of partial sums sends in all iterations except the last.
                sends = any(key.kind == "collective-permute" for b in branches for key in b.traffic)
                pick = max if self._longest or sends else min
                return pick(branches, key=lambda branch: branch.seconds), 1
            case "call":
                return self._run(operation.attribute("to_apply"), in_loop=in_loop), 1
        return None

    def _begun_by(self, operation: Operation, within: Computation) -> tuple[str, Collective] | None:
        """Return an asynchronous collective that starts here, and the key of its second half.

        Four forms start one: `all-gather-start`, `async-start`, on TPU a fusion with a custom call
        AsyncCollectiveStart, whose second half has the same channel, and on TPU7x `call-start`,
        whose computation runs on a SparseCore.
        """
        if operation.collective and operation.kind.endswith("-start"):
            return operation.name, self._network.collective(operation, within)
        if operation.kind in ("async-start", "call-start", "fusion"):
            calls = "to_apply" if operation.kind == "call-start" else "calls"
            inner = self._program.computations[operation.attribute(calls)]
            marked = operation.kind != "fusion" or _has(inner, "AsyncCollectiveStart")
            for inner_op in inner.values() if marked else ():
                if inner_op.collective:
                    key = _channel(inner_op) if operation.kind == "fusion" else operation.name
                    return key, self._network.collective(inner_op, inner)
        return None

    def _synchronous(self, operation: Operation, within: Computation) -> Collective | None:
        """Return the collective of an operation that overlaps with nothing.

        XLA:TPU writes a reduce-scatter as a fusion of an all-reduce with the slice of a device.
        """
        if operation.collective:
            return self._network.collective(operation, within)
        if operation.kind == "fusion":
            inner = self._program.computations[operation.attribute("calls")]
            for inner_op in inner.values():
                if inner_op.collective == "all-reduce":
                    line = inner_op.line.replace(" all-reduce(", " reduce-scatter(")
                    scatter = replace(inner_op, kind="reduce-scatter", line=line)
                    return self._network.collective(scatter, inner)
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
    """Clock of a running computation.

    `_free` has the time at which a link is free, `_running` the end of each collective that has
    started.
    """

    def __init__(self, in_loop: bool) -> None:
        self._in_loop = in_loop
        self._line = Timeline()
        self._free: dict[Hashable, float] = {}
        self._running: dict[str, tuple[float, CollectiveKey]] = {}

    def stop(self) -> Timeline:
        """End all running collectives and return the timeline."""
        for name in list(self._running):
            self.end(name)
        return self._line

    def run(self, kind: str, seconds: float) -> None:
        """Append an operation of the device."""
        if seconds:
            self._line.busy[kind] += seconds
            self._line.seconds += seconds

    def nest(self, inner: Timeline, times: int) -> None:
        """Append a loop with this number of iterations, or a call."""
        # Invariant: an iteration ends the collectives that it starts, so iterations are alike.
        self._line.add(inner, times)
        self._line.seconds += inner.seconds * times

    def exchange(self, collective: Collective) -> None:
        """Append a collective that overlaps with nothing."""
        self._count(collective, overlapped=False).waited += collective.seconds
        self._line.seconds += collective.seconds

    def begin(self, name: str, collective: Collective) -> None:
        """Start an asynchronous collective, which `end` waits for by this name."""
        start = max(self._line.seconds, *(self._free.get(link, 0.0) for link in collective.links))
        end = start + collective.seconds
        self._free.update(dict.fromkeys(collective.links, end))
        self._count(collective, overlapped=True)
        self._running[name] = (
            end,
            CollectiveKey(collective.kind, collective.axes, self._in_loop, True),
        )

    def rename(self, old: str, new: str) -> None:
        """Rename a pending operation."""
        if old in self._running:
            self._running[new] = self._running.pop(old)

    def end(self, name: str) -> None:
        """Wait for the collective of this name; without effect if it is not running."""
        if name in self._running:
            end, key = self._running.pop(name)
            # Exposed part only: time that computation has hidden costs nothing.
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


def _has(inner: Computation, target: str) -> bool:
    return any(
        f'"{target}"' in operation.line
        for operation in inner.values()
        if operation.kind == "custom-call"
    )


def _channel(operation: Operation) -> str:
    match = re.search(r"channel_id=(\d+)", operation.line)
    return f"channel {match[1]}" if match else operation.name
