"""Supervisor of a command on one machine."""

import dataclasses
import json
import logging
import math
import queue
import random
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxforge import exit_codes
from jaxforge.checkpoint.paths import is_durable
from jaxforge.cli.process import began_env, listening, new_command_env
from jaxforge.cli.redaction import redacted_command
from jaxforge.exit_codes import AGREED, Exit, as_stop, stop_code
from jaxforge.storage import safe_files, urls
from jaxforge.supervision.processes import Ended, Event, Group, environments, free_port

log = logging.getLogger("jaxforge.supervise")

_LOG_FILE = "supervise.jsonl"
_HEALTHY_SEC = 3600.0


@dataclasses.dataclass(frozen=True)
class Policy:
    """Restart policy: exit codes that lead to a restart, and waiting times.

    Attributes:
        max_restarts: consecutive restarts without progress.
        backoff: seconds before the first restart, doubled before each further restart.
        backoff_cap: maximum of these seconds.
        grace: seconds between a forwarded signal and SIGKILL.
        peer_grace: seconds until the other processes are killed after one has failed.
        again: further exit codes that lead to a restart, in addition to those of `exit_codes`.
    """

    max_restarts: int
    backoff: float
    backoff_cap: float
    grace: float
    peer_grace: float
    again: frozenset[int] = frozenset()

    def runs_again(self, code: int) -> bool:
        """Return whether a restart may help after an exit code."""
        return code in self.again or exit_codes.again(code)

    def delay(self, failures: int) -> float:
        """Return the pause in seconds after this many failures in a row, before jitter."""
        return min(self.backoff_cap, self.backoff * 2 ** (failures - 1))

    def next_delay(self, code: int, failures: int) -> float | None:
        """Return the pause before the next start, and log it; None for no restart.

        Args:
            code: exit code of the latest start.
            failures: consecutive starts without progress, including the latest one.
        """
        if not self.runs_again(code):
            log.info("done: exit code %d", code)
            return None
        if failures > self.max_restarts:
            log.error("%d consecutive starts without progress, --max-restarts %d: exit code %d",
                      failures, self.max_restarts, code)  # fmt: skip
            return None
        # Jitter, so that many supervisors do not restart at the same time.
        delay = self.delay(failures) * random.uniform(0.5, 1.0)
        log.info("restarting in %.1f s (restart %d of %d without progress)",
                 delay, failures, self.max_restarts)  # fmt: skip
        return delay


def command_env(policy: Policy) -> dict[str, str]:
    """Return the environment of a command under a restart policy.

    The time limit of a job covers all starts, unless reaching it leads to a restart.
    """
    # With a restart at the limit, the limit is that of each start.
    has_limit = Exit.DURATION.code not in policy.again
    return {**new_command_env(), **(began_env() if has_limit else {})}


def newest_step(run: Path | None) -> int:
    """Return the step of the newest complete checkpoint of a run, or -1."""
    # Names of unfinished saves are not counted: a torn checkpoint is not progress.
    names = filter(is_durable, (run / "checkpoints").glob("step_*")) if run else ()
    steps = [int(number) for p in names if (number := p.name.partition("_")[2]).isdigit()]
    return max(steps, default=-1)


def progressed(run: Path | None, step_before: int, seconds: float) -> bool:
    """Return whether a start wrote a newer checkpoint; for other commands, ran for an hour."""
    # A command without a run directory has no checkpoints by which to judge it.
    if run is None:
        return seconds >= _HEALTHY_SEC
    return newest_step(run) > step_before


def record(run: Path | None, values: Mapping[str, Any]) -> None:
    """Append a line to the log in the run directory, if that exists and is local.

    Args:
        run: run directory; None if unknown.
        values: content of the line; "code" is the exit code of a start.
    """
    if run is None or urls.in_bucket(run) or not run.is_dir():
        return
    meaning = exit_codes.meaning(values["code"])
    line = {"host": socket.gethostname(), **values, "meaning": meaning}
    try:
        with safe_files.open_to_append(run / _LOG_FILE) as file:
            file.write(f"{json.dumps(line)}\n".encode())
    except OSError as error:  # a full disk does not prevent a restart
        log.warning("cannot write %s: %s", run / _LOG_FILE, error.strerror)


_LONGEST_WAIT_SEC = 1.0


class Supervisor:
    """Runs a command until it succeeds, is stopped, or fails too often.

    Args:
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
            # The wall clock is for the log; durations must not jump with it.
            while True:
                began, clock, step = time.time(), time.monotonic(), newest_step(self._run)
                group = self._run_once()
                progress = progressed(self._run, step, time.monotonic() - clock)
                # Failures add up only while no newer checkpoint is written between them.
                self._failures = 1 if progress else self._failures + 1
                code = as_stop(group.code)
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
        # A new port for each start: the old one may linger in TIME_WAIT.
        coordinator = f"127.0.0.1:{free_port('127.0.0.1')}"
        return environments(self._env, coordinator, 0, self._count, self._count)

    def _handle(self, event: Event | None, group: Group, deadline: float) -> float:
        """Handle an event; return the time at which the remaining processes are killed."""
        match event:
            case Ended():
                group.ended(event)
                self._log_end(event)
                # The other processes may wait in a collective for this one, and never end.
                if event.code not in {exit_.code for exit_ in AGREED}:
                    return min(deadline, time.monotonic() + self._policy.peer_grace)
                return deadline
            case signal.Signals():
                # The processes save and end by themselves; the deadline is for those that hang.
                self._stopping = event
                log.info("%s: forwarded; SIGKILL in %g s", event.name, self._policy.grace)
                group.send(event)
                return min(deadline, time.monotonic() + self._policy.grace)
            case None:
                # The ends of killed processes are awaited without another deadline.
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
