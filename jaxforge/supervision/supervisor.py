"""Supervisor of a command on one machine."""

import logging
import math
import queue
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from jaxforge import exit_codes
from jaxforge.cli.process import listening
from jaxforge.cli.redaction import redacted_command
from jaxforge.exit_codes import AGREED
from jaxforge.supervision.processes import Ended, Event, Group, environments, free_port
from jaxforge.supervision.restarts import (
    Policy,
    command_env,
    newest_step,
    progressed,
    record,
    stop_code,
)

log = logging.getLogger("jaxforge.supervise")

_LONGEST_WAIT_SEC = 1.0


class Supervisor:
    """Runs a command until it succeeds, is stopped, or fails too often.

    Args:
        command: command to run.
        count: number of processes on this machine.
        policy: restart policy.
        run: run directory, for progress and the log; None if unknown.
    """

    def __init__(
        self, command: Sequence[str], count: int, policy: Policy, run: Path | None
    ) -> None:
        self._command, self._count, self._policy, self._run = command, count, policy, run
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._stopping: signal.Signals | None = None
        self._starts = self._failures = 0
        self._env = command_env(policy)

    def run(self) -> int:
        """Start the command as often as necessary.

        Returns:
            The exit code of the last start, or of a stop if stopped between two starts.
        """
        with listening(self._events.put):
            while True:
                began, clock, step = time.time(), time.monotonic(), newest_step(self._run)
                group = self._run_once()
                progress = progressed(self._run, step, time.monotonic() - clock)
                self._failures = 1 if progress else self._failures + 1
                code = self._code(group)
                delay = self._decide(code)
                self._record(began, step, group, delay)
                if delay is None:
                    return code
                if not self._pause(delay):
                    return stop_code(self._stopping)

    def _run_once(self) -> Group:
        self._starts += 1
        log.info("start %d: %s", self._starts, redacted_command(self._command))
        group = Group(self._command, self._environments(), self._events)
        deadline = math.inf
        while group.running:
            deadline = self._handle(self._next(deadline), group, deadline)
        return group

    def _environments(self) -> list[dict[str, str]]:
        if self._count == 1:
            return [self._env]
        coordinator = f"127.0.0.1:{free_port('127.0.0.1')}"
        return environments(self._env, coordinator, 0, self._count, self._count)

    def _handle(self, event: Event | None, group: Group, deadline: float) -> float:
        """Handle an event; return the time at which the remaining processes are killed."""
        match event:
            case Ended():
                group.ended(event)
                self._log_end(event)
                if event.code not in {exit_.code for exit_ in AGREED}:
                    return min(deadline, time.monotonic() + self._policy.peer_grace)
                return deadline
            case signal.Signals():
                self._stopping = event
                log.info("%s: forwarded; SIGKILL in %g s", event.name, self._policy.grace)
                group.send(event)
                return min(deadline, time.monotonic() + self._policy.grace)
            case None:
                log.warning("still running: SIGKILL")
                group.kill()
                return math.inf

    def _next(self, deadline: float) -> Event | None:
        """Return the next event, or None at the deadline.

        A signal immediately before a wait does not interrupt it, and its handler runs only after
        the wait. So every wait is short.
        """
        while True:
            left = max(0.0, deadline - time.monotonic())
            try:
                return self._events.get(timeout=min(left, _LONGEST_WAIT_SEC))
            except queue.Empty:
                if left <= _LONGEST_WAIT_SEC:
                    return None

    def _log_end(self, end: Ended) -> None:
        which = f"process {end.index}" if self._count > 1 else "the command"
        log.info("%s ended with %d: %s", which, end.code, exit_codes.meaning(end.code))

    def _code(self, group: Group) -> int:
        """Return the exit code of a start; death by the stop signal counts as a stop."""
        is_stopped = self._stopping and group.code == 128 + self._stopping
        return stop_code(self._stopping) if is_stopped else group.code

    def _decide(self, code: int) -> float | None:
        """Return the seconds until the next start, or None for no restart."""
        if self._stopping:
            log.info("done: exit code %d", code)
            return None
        return self._policy.next_delay(code, self._failures)

    def _pause(self, seconds: float) -> bool:
        """Wait; return False if a stop signal arrived."""
        event = self._next(time.monotonic() + seconds)
        if isinstance(event, signal.Signals):
            self._stopping = event
            log.info("%s: no restart", event.name)
        return event is None

    def _record(self, began: float, step: int, group: Group, delay: float | None) -> None:
        record(
            self._run,
            {
                "start": self._starts,
                "began": began,
                "ended": time.time(),
                "codes": group.codes,
                "code": group.code,
                "steps": [step, newest_step(self._run)],
                "signal": self._stopping.name if self._stopping else None,
                "again_in_sec": delay,
            },
        )
