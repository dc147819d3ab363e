"""Watchdog: ends a hanging process with the stacks of all threads.

A thread counts the seconds since the loop last made progress. Steps have a limit of their own, and
setup with compilation and saves have another one (`[train] watchdog_*_sec`):

    with Watchdog(limits) as watchdog:        # "training": the setup limit until the first tick,
        watchdog.tick(step)                   # then the step limit; each tick is progress
        with watchdog.section("checkpoint"):  # own limit; the outer count is paused
            ...
        with watchdog.section("evaluation"):  # like training: setup first, then a tick per batch
            ...
        with watchdog.watching_peers(timeout):  # reports of a job name the culprit (`peers`)
            ...

The loop launches steps ahead of the devices, so a tick does not mean that a step is finished. But
when the devices stop, launches stop soon after (the runtime allows about 32 steps in flight), and
the ticks with them. Hence the step limit must cover about 32 steps.

The live line of a terminal shows the current section (`Watchdog.activity`); `naming` describes the
activity within a section.

Only seconds in which the thread ran count. A process that was suspended (SIGSTOP, a closed laptop,
a gang scheduler) does not expire when it resumes, and clock changes do not matter.
"""

import collections
import contextlib
import dataclasses
import faulthandler
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Literal, Protocol, TextIO

from jaxforge.cli.process import end_now
from jaxforge.config.train import TrainConfig
from jaxforge.errors import PeerLostError
from jaxforge.exit_codes import Exit
from jaxforge.parallel import multihost
from jaxforge.storage import safe_files
from jaxforge.telemetry.console import Activity
from jaxforge.telemetry.goodput import ActivityClock, Category
from jaxforge.training.health.heartbeats import Status
from jaxforge.training.health.peers import PeerWatch

log = logging.getLogger(__name__)

SectionName = Literal["training", "evaluation", "checkpoint", "data", "end"]

_ACTIVITIES: dict[SectionName, str] = {
    "training": "starting",  # until its first tick
    "evaluation": "evaluating",
    "checkpoint": "saving",
    "data": "loading data",
    "end": "finishing",
}
_STEP_KEY = "watchdog_step_sec"
_CATEGORIES: dict[str, Category] = {
    "evaluation": "evaluation",
    "checkpoint": "save",
    "data": "start",
    "end": "other",
    "compiling": "compile",
    "restoring a checkpoint": "restore",
    "rolling back": "rollback",
}
"""Section or activity -> category of its time (`telemetry.goodput`)."""
POLL_SEC = 1.0
_LINGER_SEC = 10.0  # between the report of a hang and the end of the process
_COORDINATOR_SEC = 5.0  # additional time of process 0: without its service, JAX ends the others


class Result(Protocol):
    """A result of a step, such as a `jax.Array`."""

    def is_ready(self) -> bool:
        """Return whether the devices have finished the step, without waiting for them."""

    def is_deleted(self) -> bool:
        """Return whether the result was deleted, for example by a callback."""


_HISTORY = 2  # finished steps after which the usual time between two of them is known
_PATIENCE = 3.0  # multiple of the longest stall so far that is unusual
_MAX_LAUNCHED = 64  # steps in flight whose end is awaited; runtimes allow about 32


class Stall:
    """Counts seconds without progress: launched or finished steps, and changes of the section.

    The host launches steps ahead of the devices and then waits, perhaps for many steps. The end of
    each step on the devices shows that the wait is not a hang.

    The training thread calls `progress` and `launch`, and the watchdog's thread calls `count`.

    Attributes:
        seconds: time since the last progress.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._longest, self._finished = 0.0, 0
        self._launched: collections.deque[Result] = collections.deque(maxlen=_MAX_LAUNCHED)

    def progress(self) -> None:
        """Note progress that says nothing about the time between steps."""
        self.seconds = 0.0

    def launch(self, result: Result | None = None) -> None:
        """Note the launch of a step."""
        if self._finished >= _HISTORY:
            self._longest = max(self._longest, self.seconds)
        self.seconds = 0.0
        if result is not None:
            self._launched.append(result)

    def count(self, seconds: float) -> None:
        """Add seconds, unless the devices have finished a step since the last call."""
        self.seconds += seconds
        # With jaxlib 0.10, `is_ready` of a deleted array ends the process (SIGSEGV).
        while self._launched and (self._launched[0].is_deleted() or self._launched[0].is_ready()):
            self._launched.popleft()
            self._finished += 1
            self._longest, self.seconds = max(self._longest, self.seconds), 0.0

    def is_unusual(self) -> bool:
        """Return whether the current stall is much longer than all others of a running loop."""
        return self._finished >= _HISTORY and self.seconds >= _PATIENCE * self._longest


@dataclasses.dataclass(frozen=True)
class Limits:
    """Longest times without progress, in seconds; 0 means no limit.

    Attributes:
        setup: until the first step (joining the processes, data, restoring, compiling), and for a
            save.
        step: between two steps, including waiting for data and callbacks.
    """

    setup: float
    step: float

    @classmethod
    def of(cls, config: TrainConfig) -> "Limits":
        """Return the limits of a config."""
        return cls(config.watchdog_setup_sec, config.watchdog_step_sec)


@dataclasses.dataclass
class _Section:
    name: SectionName
    limit: float
    key: str  # key of [train] that sets the limit
    activity: str  # current activity; empty while it steps
    since: float = dataclasses.field(default_factory=time.monotonic)  # start of the activity
    idle: float = 0.0  # seconds without progress


class Watchdog:
    """Ends this process when it makes no progress; see the docstring of the module.

    Args:
        expire: called with the message of an expired limit; by default `die`.
        since: start of the process, by `time.perf_counter`; None means now.

    Attributes:
        clock: attributes the time of sections and activities to categories.
    """

    def __init__(
        self,
        limits: Limits,
        expire: Callable[[str], None] | None = None,
        since: float | None = None,
    ) -> None:
        self._limits, self._expire = limits, expire or self.die
        self.clock = ActivityClock(since)
        self._lock = threading.Lock()
        self._sections = [self._new("training")]
        self._last_step: int | None = None
        self._stall = Stall()
        self._peers: PeerWatch | None = None
        self._stacks: Path | None = None
        self._has_expired = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def write_stacks_to(self, path: Path) -> None:
        """Append stacks to this file too; before this call they go to stderr only."""
        self._stacks = path

    @contextlib.contextmanager
    def watching_peers(self, timeout: float) -> Iterator[None]:
        """Watch the other processes of the job within the block."""
        job = multihost.joined_job()
        if not timeout or job is None:
            yield
            return
        # Peers are watched only inside a job: a single process waits for nobody.
        with PeerWatch(timeout, job, self.status) as self._peers:
            try:
                yield
            finally:
                self._peers = None

    def note_failure(self, error: BaseException) -> None:
        """Tell the other processes of the job why this one fails, or find the one that is lost."""
        if isinstance(error, PeerLostError) and self._has_expired:
            self._thread.join()  # others ended after their reports, and so does this process
        if self._peers:
            self._peers.note_failure(error)

    def tick(self, step: int | None = None, result: Result | None = None) -> None:
        """Record progress: `step` is launched, or another batch of an evaluation.

        Args:
            step: the step; None for a batch.
            result: a result of the step, which shows when the devices have finished it.
        """
        with self._lock:
            section = self._sections[-1]
            section.idle = 0.0
            if step is None:
                self._stall.progress()
            else:
                self._stall.launch(result if self._peers else None)
            # From the first tick on everything is compiled: the short limit holds.
            if section.name in ("training", "evaluation"):
                section.limit, section.key = self._limits.step, _STEP_KEY
            if section.name == "training":
                section.activity, section.since = "", time.monotonic()
            if step is not None:
                self._last_step = step

    @contextlib.contextmanager
    def section(self, name: SectionName) -> Iterator[None]:
        """Apply the limit of a section to the block; the count of the outer section is paused.

        Args:
            name: "checkpoint", or "evaluation" (also for other blocks that compile, then tick).
                "data" and "end" have no limit: exports, and datasets that are tokenized on first
                use, may take any time.
        """
        section = self._new(name)
        with self._lock:
            self._sections.append(section)
            self._stall.progress()
        try:
            with self.clock.during(_CATEGORIES.get(name, self.clock.current)):
                yield
        finally:
            with self._lock:
                self._sections.pop()
                self._stall.progress()

    @contextlib.contextmanager
    def naming(self, activity: str) -> Iterator[None]:
        """Name the activity of the block, without a change of limits."""
        section = self._sections[-1]
        before, section.activity, section.since = section.activity, activity, time.monotonic()
        try:
            with self.clock.during(_CATEGORIES.get(activity, self.clock.current)):
                yield
        finally:
            section.activity, section.since = before, time.monotonic()

    def activity(self) -> Activity:
        """Return the current activity of the process."""
        with self._lock:
            section = self._sections[-1]
            return Activity(self._last_step, section.activity, time.monotonic() - section.since)

    def status(self) -> Status:
        """Return the state of the training thread for the other processes of the job."""
        with self._lock:
            section, stall = self._sections[-1], self._stall
            # The usual time between steps is known only while the loop steps.
            is_training = section.name == "training" and section.key == _STEP_KEY
            return Status(
                self._last_step, section.name, section.activity,
                has_own_limit=section.key != _STEP_KEY, idle=stall.seconds,
                is_unusual=is_training and stall.is_unusual(),
            )  # fmt: skip

    def idle(self, seconds: float) -> str | None:
        """Count seconds without progress.

        Returns:
            The message of an expired limit, or None.
        """
        self._stall.count(seconds)  # without the lock: it asks the runtime
        with self._lock:
            section = self._sections[-1]
            section.idle += seconds
            # A limit of 0 never expires.
            if not 0 < section.limit <= section.idle:
                return None
            after = "the first step" if self._last_step is None else f"step {self._last_step}"
            when = "before" if self._last_step is None else "after"
            return (
                f"hung: no progress in {section.name} for {section.idle:.0f} s, {when} {after} "
                f"(train.{section.key} = {section.limit:g})"
            )

    def _new(self, name: SectionName) -> _Section:
        if name in ("data", "end"):
            return _Section(name, 0.0, "", _ACTIVITIES[name])
        return _Section(name, self._limits.setup, "watchdog_setup_sec", _ACTIVITIES[name])

    def _watch(self) -> None:
        while not self._stopped.wait(POLL_SEC):
            message, peers = self.idle(POLL_SEC), self._peers
            if peers:
                message = self._examine_job(peers, message)
            if message:
                # Set before the report, for which `note_failure` then waits.
                self._has_expired = True
                self._expire(message)
                return

    def _examine_job(self, peers: PeerWatch, message: str | None) -> str | None:
        """Return the message of a hang of the job, or None."""
        # Called in each poll, since it counts the seconds of silence.
        autopsy = peers.suspect(POLL_SEC)
        if message:
            autopsy = peers.examine()
        elif autopsy is None:
            return None
        is_end = message is not None or autopsy.has_lost_process
        line = f"{message or self._describe_stall(is_end=is_end)}; {autopsy.verdict()}"
        # Others must not take the end of this process for the cause.
        if is_end:
            peers.note_hang()
            return line
        self._start_report(line, is_end=False)
        return None

    def _describe_stall(self, *, is_end: bool) -> str:
        status = self.status()
        when = "before the first step"
        if status.step is not None:
            when = f"after launching step {status.step}"
        return f"{'hung' if is_end else 'may hang'}: no progress for {status.idle:.0f} s, {when}"

    def die(self, message: str, linger: float = _LINGER_SEC) -> None:
        """Report a hang and exit with the code of `Exit.HUNG`.

        At a prompt and in a notebook, the process does not exit.

        Args:
            message: description of the hang.
            linger: seconds until the exit. The limits of all processes of a job expire at about the
                same time, and without process 0 the others would end before they report.
        """
        self._start_report(message, is_end=True)
        is_coordinator = self._peers is not None and self._peers.is_coordinator
        time.sleep(linger + _COORDINATOR_SEC * is_coordinator)
        end_now(Exit.HUNG.code, flush=False)

    def _start_report(self, message: str, *, is_end: bool) -> None:
        """Report a hang in a separate thread, since a disk or a lock may hang.

        Args:
            message: description of the hang.
            is_end: True if the process ends; the stacks are then also written to stderr.
        """
        threading.Thread(target=self._report, args=(message, is_end), daemon=True).start()

    def _report(self, message: str, is_end: bool) -> None:
        if is_end:
            # stderr first: the disk may be what hangs.
            with contextlib.suppress(OSError, ValueError):  # stderr may be closed
                if sys.__stderr__ is not None:
                    _dump(message, sys.__stderr__)
        if self._stacks is not None:
            with TextIOWrapper(safe_files.open_to_append(self._stacks)) as file:
                _dump(message, file)
        if is_end:
            log.error("%s; exiting with code %d", message, Exit.HUNG.code)
        else:
            log.warning("%s; stacks are in %s", message, self._stacks)


def _dump(text: str, file: TextIO) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", file=file, flush=True)
    faulthandler.dump_traceback(file, all_threads=True)
