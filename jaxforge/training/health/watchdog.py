"""Watchdog: ends a hanging process with the stacks of all threads.

A thread next to the loop counts the seconds since the loop last moved. Setting up and compiling,
steps, and checkpoints have a limit each (`[train] watchdog_*_sec`):

    with Watchdog(limits) as watchdog:        # "training": the set-up limit until the first tick,
        watchdog.tick(step)                   # the step limit from then on; each tick is progress
        with watchdog.section("checkpoint"):  # its own limit; the outer count stands still
            ...
        with watchdog.section("evaluation"):  # as training: set-up first, then a tick per batch
            ...

The loop launches steps ahead of the devices, so a tick does not say that a step is done; but the
launches end soon after the devices do (the runtime lets about 32 steps be in flight), and then the
ticks end too. Hence a step limit has to cover some 32 steps.

What it watches over is also what a terminal shows (`Watchdog.moment`); `naming` says more exactly
what a section is at.

Only time in which this thread ran counts: a process that was suspended (SIGSTOP, a laptop's lid, a
gang scheduler) does not expire when it goes on, and clocks that jump do not matter.
"""

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
from typing import Literal, TextIO

from jaxforge.cli.process import end_now
from jaxforge.config.train import TrainConfig
from jaxforge.exit_codes import Exit
from jaxforge.storage import safe_files
from jaxforge.telemetry.live_line import Moment

log = logging.getLogger(__name__)

SectionName = Literal["training", "evaluation", "checkpoint", "data", "end"]

_DOING: dict[SectionName, str] = {
    "training": "starting",  # until its first tick
    "evaluation": "evaluating",
    "checkpoint": "saving",
    "data": "loading data",
    "end": "finishing",
}
_POLL_SEC = 1.0
_LINGER_SEC = 10.0


@dataclasses.dataclass(frozen=True)
class Limits:
    """Seconds without progress that are still patience; 0 is endless.

    Attributes:
        setup: until the first step: joining the processes, data, restoring, compiling.
        step: between two steps, waiting for data and hooks included.
        checkpoint: one save, or waiting for one.
    """

    setup: float
    step: float
    checkpoint: float

    @classmethod
    def of(cls, config: TrainConfig) -> "Limits":
        """The limits that a config sets."""
        return cls(
            config.watchdog_setup_sec, config.watchdog_step_sec, config.watchdog_checkpoint_sec
        )


@dataclasses.dataclass
class _Section:
    name: SectionName
    limit: float
    key: str  # of [train], that sets the limit
    doing: str  # in words; empty while it steps
    since: float = dataclasses.field(default_factory=time.monotonic)  # of what it is doing
    idle: float = 0.0  # seconds


class Watchdog:
    """Watches over one process; see the module's docstring.

    Args:
        limits: how long each section may stand still.
        expire: what to do with the message of an expired limit; by default `die`.
    """

    def __init__(self, limits: Limits, expire: Callable[[str], None] | None = None) -> None:
        self._limits, self._expire = limits, expire or self.die
        self._lock = threading.Lock()
        self._sections = [self._new("training")]
        self._last_step: int | None = None
        self._stacks: Path | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def write_stacks_to(self, path: Path) -> None:
        """Names the file that stacks are appended to; until then they go to stderr alone."""
        self._stacks = path

    def tick(self, step: int | None = None) -> None:
        """The loop moved: it has finished `step`, or another batch of an evaluation."""
        with self._lock:
            section = self._sections[-1]
            section.idle = 0.0
            if section.name in ("training", "evaluation"):
                section.limit, section.key = self._limits.step, "watchdog_step_sec"
            if section.name == "training":
                section.doing, section.since = "", time.monotonic()
            if step is not None:
                self._last_step = step

    @contextlib.contextmanager
    def section(self, name: SectionName) -> Iterator[None]:
        """A part of the run with a limit of its own; the count of what it is part of stands still.

        Args:
            name: "checkpoint", or "evaluation" (also for anything else that compiles, then ticks).
                "data" and "end" have no limit: a dataset that is tokenized when it is first used,
                and exports, take what they take.
        """
        section = self._new(name)
        with self._lock:
            self._sections.append(section)
        try:
            yield
        finally:
            with self._lock:
                self._sections.pop()

    @contextlib.contextmanager
    def naming(self, doing: str) -> Iterator[None]:
        """Says what the section is at meanwhile; nothing of its limit changes.

        Args:
            doing: such as "compiling".
        """
        section = self._sections[-1]
        before, section.doing, section.since = section.doing, doing, time.monotonic()
        try:
            yield
        finally:
            section.doing, section.since = before, time.monotonic()

    def moment(self) -> Moment:
        """Return the current activity of the process."""
        with self._lock:
            section = self._sections[-1]
            return Moment(self._last_step, section.doing, time.monotonic() - section.since)

    def idle(self, seconds: float) -> str | None:
        """Lets `seconds` pass without progress.

        Returns:
            What to say if that was too long.
        """
        with self._lock:
            section = self._sections[-1]
            section.idle += seconds
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
            return _Section(name, 0.0, "", _DOING[name])
        if name == "checkpoint":
            limit = self._limits.checkpoint
            return _Section(name, limit, "watchdog_checkpoint_sec", _DOING[name])
        return _Section(name, self._limits.setup, "watchdog_setup_sec", _DOING[name])

    def _watch(self) -> None:
        while not self._stopped.wait(_POLL_SEC):
            if message := self.idle(_POLL_SEC):
                self._expire(message)
                return

    def die(self, message: str, linger: float = _LINGER_SEC) -> None:
        """Reports in a thread of its own, for what hangs may hold a lock or a disk; then exits.

        At a prompt and in a notebook, whose process it is not, it only reports.

        Args:
            message: what hung.
            linger: seconds until the end. The other processes of a job, whose limits end at about
                the same time, report in it: without process 0 they would be ended at once.
        """
        threading.Thread(target=self._report, args=(message,), daemon=True).start()
        time.sleep(linger)
        end_now(Exit.HUNG.code, flush=False)

    def _report(self, message: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # its reader may be gone
            if sys.__stderr__ is not None:
                _dump(message, sys.__stderr__)
        if self._stacks is not None:
            with TextIOWrapper(safe_files.open_to_append(self._stacks)) as file:
                _dump(message, file)
        log.error("%s; exiting with code %d", message, Exit.HUNG.code)


def _dump(message: str, file: TextIO) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}", file=file, flush=True)
    faulthandler.dump_traceback(file, all_threads=True)
