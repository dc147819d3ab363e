"""Autopsy of a hang: state of every process of the job, and the processes that the others wait for.

A process is, by the first row that applies:

    victim    it ends because it lost another process
    failed    it ended with an error
    finished  it ended without an error
    silent    its heartbeat stands still: killed or suspended, or its host or network failed
    unknown   the coordination service does not answer, so nothing is known
    busy      in an activity that has a limit of its own: compiling, saving, ...
    waiting   in a call of JAX, at the newest step: it arrived
    behind    alive, at an earlier step or outside of JAX: a callback, waiting for data, ...

The culprits are the silent processes. If there are none, they are those that left, then those
behind (with the earliest step), then the busy ones. If all processes arrived, the collective itself
hangs.
"""

import dataclasses
import enum
from collections.abc import Iterator, Mapping, Sequence

from jaxforge.training.health.heartbeats import Beat, Status

_LISTED = 8  # most processes in a line


class State(enum.Enum):
    """State of a process in a hang; see the docstring of the module."""

    VICTIM = "victim"
    FAILED = "failed"
    FINISHED = "finished"
    SILENT = "silent"
    UNKNOWN = "unknown"
    BUSY = "busy"
    WAITING = "waiting"
    BEHIND = "behind"


_LOST = (State.SILENT, State.FAILED, State.FINISHED)
_ENDED = {"victim": State.VICTIM, "failed": State.FAILED, "finished": State.FINISHED}


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Observations of one process about its job.

    Attributes:
        index: this process.
        count: number of processes.
        beats: last beat of each process; some may be missing.
        quiet: seconds without a heartbeat of each other process.
        unanswered: seconds without an answer of the coordination service.
        silent_after: seconds after which a process, or the service, is silent.
        address: address of the coordination service.
    """

    index: int
    count: int
    beats: Mapping[int, Beat]
    quiet: Mapping[int, float]
    unanswered: float
    silent_after: float
    address: str

    @property
    def is_cut_off(self) -> bool:
        """True if the coordination service does not answer."""
        return self.unanswered >= self.silent_after


@dataclasses.dataclass(frozen=True)
class Autopsy:
    """States of all processes of a job, and the culprits.

    Attributes:
        evidence: observations of this process.
        states: state of each process.
        culprits: indices of the processes that the others wait for; may be empty.
    """

    evidence: Evidence
    states: Sequence[State]
    culprits: Sequence[int]

    @property
    def has_lost_process(self) -> bool:
        """True if a culprit will never arrive."""
        return any(self.states[i] in _LOST for i in self.culprits) or self.is_isolated

    @property
    def is_isolated(self) -> bool:
        """True if all other processes, at least two, are silent."""
        peer_states = [state for i, state in enumerate(self.states) if i != self.evidence.index]
        return len(peer_states) > 1 and set(peer_states) == {State.SILENT}

    def verdict(self) -> str:
        """Return a line about the culprits and the processes that wait for them."""
        waiting = [i for i, state in enumerate(self.states) if state is State.WAITING]
        text = f"most likely culprit: {self.accusation()}"
        if waiting:
            verb = "waits" if len(waiting) == 1 else "wait"
            text += f". {_processes(waiting)} of {len(self.states)} {verb}"
            text += f" after launching step {self._newest()}" if self._newest() else ""
        return text

    def _newest(self) -> int:
        return max(map(_step, self.evidence.beats.values()), default=0)

    def accusation(self) -> str:
        """Return the culprits with their states."""
        evidence, culprits = self.evidence, self.culprits
        if evidence.is_cut_off and evidence.index != 0:
            return (
                f"process 0: its coordination service at {evidence.address} does not answer for "
                f"{evidence.unanswered:.0f} s. Process 0 is killed or suspended, or its host or "
                "the network to it failed"
            )
        if not culprits:
            if all(state is State.WAITING for state in self.states):
                return "the collective itself (network or device): all processes arrived"
            return "none: no process waits for another one"
        if self.is_isolated:
            return (
                f"this process, {self._name(evidence.index)}: no other process answers, so its "
                "network failed"
            )
        listed = "; ".join(self._describe(i) for i in culprits[:_LISTED])
        more = len(culprits) - _LISTED
        return listed + (f"; and {more} more" if more > 0 else "")

    def _name(self, index: int) -> str:
        beat = self.evidence.beats.get(index)
        return f"process {index} ({beat.host})" if beat else f"process {index}"

    def _describe(self, index: int) -> str:
        state, beat = self.states[index], self.evidence.beats.get(index)
        name, quiet = self._name(index), self.evidence.quiet.get(index, 0.0)
        if beat is None:
            return f"{name}, silent: it never had a heartbeat"
        if state in (State.FAILED, State.FINISHED):
            return f"{name}, {state.value}" + (f": {beat.reason}" if beat.reason else "")
        if state is State.SILENT:
            return (
                f"{name}, silent: no heartbeat for {quiet:.0f} s, last {_position(beat)}. It is "
                "killed or suspended, or its host or network failed"
            )
        idle = f"without progress for {beat.status.idle:.0f} s"
        return f"{name}, {state.value}: alive, {idle}, {_position(beat)}"


def examine(evidence: Evidence) -> Autopsy:
    """Classify the processes of a hanging job and find the culprits."""
    states = _states(evidence)
    return Autopsy(evidence, states, list(_culprits(evidence, states)))


def _states(evidence: Evidence) -> list[State]:
    alive = {
        i: beat
        for i in range(evidence.count)
        if (beat := evidence.beats.get(i)) is not None and _fate(evidence, i) is None
    }
    # A process that compiles or saves has another step for good reasons.
    stepping = [beat for beat in alive.values() if not _is_busy(beat)]
    newest = max(map(_step, stepping), default=0)
    # A call of compiled code from a callback or an evaluation shows no frame of JAX. If all are at
    # the same line, none is behind.
    positions = {(beat.status.step, beat.location) for beat in stepping}
    are_together = len(positions) == 1 and len(stepping) == evidence.count

    def state(index: int) -> State:
        if fate := _fate(evidence, index):
            return fate
        beat = alive[index]
        if _is_busy(beat):
            return State.BUSY
        # An activity at the newest step, such as loading data, is not a collective.
        is_at_newest = _step(beat) == newest and not beat.status.activity
        arrived = is_at_newest and (beat.is_in_jax or are_together)
        return State.WAITING if arrived else State.BEHIND

    return [state(i) for i in range(evidence.count)]


def _fate(evidence: Evidence, index: int) -> State | None:
    """Return the state of a process that is gone or unknown; None if it is alive."""
    beat = evidence.beats.get(index)
    if index == evidence.index:
        return None
    if beat is not None and beat.ending == "reported":
        return None  # it may have ended; its last state counts
    if beat is not None and beat.ending:
        return _ENDED[beat.ending]
    # Without the service nothing is known of the others, but process 0 runs it.
    if evidence.is_cut_off:
        return State.SILENT if index == 0 else State.UNKNOWN
    if evidence.quiet.get(index, 0.0) >= evidence.silent_after:
        return State.SILENT
    return State.UNKNOWN if beat is None else None


def _is_busy(beat: Beat) -> bool:
    return beat.status.has_own_limit


def _culprits(evidence: Evidence, states: Sequence[State]) -> Iterator[int]:
    def in_state(*kinds: State) -> list[int]:
        return [i for i, state in enumerate(states) if state in kinds]

    silent, n_peers = in_state(State.SILENT), evidence.count - 1
    # All others at once: rather the network of this process than all of them.
    if len(silent) == n_peers > 1 and not evidence.is_cut_off:
        yield evidence.index
    elif silent:
        yield from silent
    elif failed := in_state(State.FAILED):
        yield from failed
    # Nobody waits, so the job is slow and does not hang.
    elif not in_state(State.WAITING):
        return
    elif finished := in_state(State.FINISHED):
        yield from finished
    elif behind := in_state(State.BEHIND):
        beats = evidence.beats
        behind = [i for i in behind if not beats[i].is_in_jax] or behind  # they may wait in JAX
        earliest = min(_step(beats[i]) for i in behind)
        yield from (i for i in behind if _step(beats[i]) == earliest)
    else:
        yield from in_state(State.BUSY)


def _step(beat: Beat) -> int:
    return beat.status.step or 0


def _position(beat: Beat) -> str:
    status = beat.status
    step = "before the first step" if status.step is None else f"after launching step {status.step}"
    return f"{step}, {_activity(status)}" + (f", at {beat.location}" if beat.location else "")


def _activity(status: Status) -> str:
    return f"{status.section}: {status.activity}" if status.activity else status.section


def _processes(indices: Sequence[int]) -> str:
    shown = ", ".join(map(str, indices[:_LISTED]))
    more = len(indices) - _LISTED
    label = "Process" if len(indices) == 1 else "Processes"
    return f"{label} {shown}" + (f" and {more} more" if more > 0 else "")
