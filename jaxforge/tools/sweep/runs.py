"""Runs of a sweep: each is a process of `jaxforge.train`.

<checkpoint.dir>/<name>/                run directories, as of any run
<checkpoint.dir>/<name>/output.log      output of the processes of all starts
<checkpoint.dir>/<name>/finished.json   exists as soon as the run is finished
"""

import contextlib
import dataclasses
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxforge import exit_codes
from jaxforge.cli.process import listening, new_command_env, stop_message
from jaxforge.config.job import JobConfig
from jaxforge.config.section import Flag, flagged
from jaxforge.errors import UserError
from jaxforge.exit_codes import Exit
from jaxforge.runs.run_directory import changes, shown_config
from jaxforge.storage import run_lock, safe_files

_UNSAFE = re.compile(r"[^\w.,=+-]+")
_LONGEST = 200  # bytes of a name; file systems allow 255

Values = Mapping[str, str]
"""Values by key (`model.dim`), as on the command line."""


class Point(NamedTuple):
    """One run of a sweep.

    Attributes:
        name: name of its directory: `lr=1e-3,dim=128`.
        values: settings over the base config.
    """

    name: str
    values: Values

    @property
    def overrides(self) -> list[str]:
        """Command-line settings of the point."""
        return [f"--{key}={value}" for key, value in self.values.items()]


def points(grid: Sequence[str]) -> list[Point]:
    """Return every combination of a grid's values.

    Args:
        grid: axes of the grid, such as "optimizer.lr=1e-3,3e-3".

    Raises:
        UserError: a key is given twice, or two points are equal.
    """
    axes = [_axis(text) for text in grid]
    keys = [key for key, _ in axes]
    _check_keys(keys)
    last = Counter(key.rpartition(".")[2] for key in keys)  # names omit the section if unambiguous
    short = {key: end if last[end := key.rpartition(".")[2]] == 1 else key for key in keys}
    result = [
        Point(_name(combination, short), combination)
        for values in itertools.product(*(values for _, values in axes))
        for combination in [dict(zip(keys, values, strict=True))]
    ]
    _check_names(result)
    return result


def _axis(text: str) -> tuple[str, list[str]]:
    key, equals, values = text.partition("=")
    if not equals or not key or not values:
        raise UserError(f"--grid {text}: expected section.key=value,value")
    return key.removeprefix("--"), list(_split(values))


def _split(text: str) -> Iterator[str]:
    """Split at commas, except commas inside brackets, braces or quotes."""
    depth, quote, start = 0, "", 0
    for i, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "[({":
            depth += 1
        elif char in "])}":
            depth -= 1
        elif char == "," and depth == 0:
            yield text[start:i]
            start = i + 1
    yield text[start:]


def _check_keys(keys: Sequence[str]) -> None:
    twice = [key for key, n in Counter(keys).items() if n > 1]
    if twice:
        raise UserError(f"{twice[0]} is given twice: give all of its values together")
    if "checkpoint.dir" in keys:
        raise UserError("checkpoint.dir holds all points: it cannot be a key of the sweep")


def _check_names(points_: Sequence[Point]) -> None:
    for name, n in Counter(point.name for point in points_).items():
        if n > 1:
            raise UserError(f"{n} points are called {name}: their values must differ")
        if len(name.encode()) > _LONGEST:
            raise UserError(f"{name[:60]}... is too long for a directory: vary fewer keys")


def _name(values: Values, short: Mapping[str, str]) -> str:
    parts = [f"{short[key]}={value}" for key, value in values.items()]
    return _UNSAFE.sub("_", ",".join(parts)) or "base"


_OUTPUT, _FINISHED = "output.log", "finished.json"
_POLL_SEC = 0.5
_WITH_PARENT = """
import os, sys
from jaxforge.cli.process import stop_with_parent
stop_with_parent()
if os.getppid() == int(sys.argv[1]):  # otherwise the parent has already ended
    os.execv(sys.argv[2], sys.argv[2:])
"""
"""Wrapper that ends a process with the sweep.

A preexec_fn would be unsafe between fork and exec, because JAX's threads run in this process.
"""


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """Checked run of a point.

    Attributes:
        point: point of the sweep.
        directory: run directory.
        config: resolved config.
        command: command that trains it.
    """

    point: Point
    directory: Path
    config: JobConfig
    command: Sequence[str]

    @property
    def is_finished(self) -> bool:
        """True if the run needs no other start."""
        return (self.directory / _FINISHED).exists()

    @property
    def state(self) -> str:
        """State: "finished", "begun" or "new"."""
        if self.is_finished:
            return "finished"
        return "begun" if (self.directory / "config.toml").exists() else "new"

    def check_directory(self) -> None:
        """Check that an existing run directory has this config.

        Raises:
            UserError: the run was begun with another config.
        """
        if not (self.directory / "config.toml").exists():
            return
        # Settings such as intervals of saves may change between starts of a sweep.
        free = flagged(JobConfig, Flag.NO_RESULT)
        changed = [
            change
            for change in changes(shown_config(self.directory), self.config)
            if not free & {change.partition(".")[0], change.partition(" ")[0]}
        ]
        if changed:
            raise UserError(
                f"{self.directory} was begun with another config ({', '.join(changed[:3])}): "
                "remove it, or give another checkpoint.dir"
            )

    def last_output_line(self) -> str:
        """Return the last line of the run's output; empty if there is none."""
        path = self.directory / _OUTPUT
        lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
        return lines[-1] if lines else ""

    def finish(self) -> None:
        """Mark the run as finished."""
        text = json.dumps({"time": time.time(), **self.point.values}) + "\n"
        safe_files.replace_text(self.directory / _FINISHED, text)


def _say(line: str) -> None:
    print(line, flush=True)


class Runner:
    """Sequential execution of runs. Signals are forwarded to the current run, which saves and ends.

    Args:
        say: prints a line of progress.
    """

    def __init__(self, say: Callable[[str], None] = _say) -> None:
        self._say = say
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping: signal.Signals | None = None

    def run(self, runs: Sequence[PlannedRun]) -> int:
        """Run all unfinished runs in order; a failed run does not stop the others.

        Returns:
            The exit code of the first run that failed or was stopped, `Exit.SIGNAL` after a
            signal, else 0.
        """
        codes = []
        with listening(self._receive):
            for i, planned_run in enumerate(runs, 1):
                label = f"[{i}/{len(runs)}] {planned_run.point.name}"
                codes.append(self._run_point(planned_run, label))
                if self._stopping is not None:
                    return Exit.SIGNAL.code if codes[-1] == 0 else codes[-1]
        return next((code for code in codes if code), 0)

    def _run_point(self, planned_run: PlannedRun, label: str) -> int:
        # First: the run of a killed sweep may be finishing this point.
        self._await_unlocked(planned_run)
        if planned_run.is_finished:
            self._say(f"{label}: already finished")
            return 0
        # The signal may have come during the wait.
        if self._stopping is not None:
            return Exit.SIGNAL.code
        self._say(f"{label}: {'resumes' if planned_run.state == 'begun' else 'begins'}")
        began = time.monotonic()
        code = self._train(planned_run)
        duration = f"after {time.monotonic() - began:.0f} s"
        if code == 0:
            planned_run.finish()
            self._say(f"{label}: finished {duration}")
        else:
            cause = f"exit code {code}, {exit_codes.meaning(code)}"
            last = planned_run.last_output_line()
            self._say(f"{label}: not finished {duration}: {cause}\n    {last}")
            self._say(f"    full output: {planned_run.directory / _OUTPUT}")
        return code

    def _await_unlocked(self, planned_run: PlannedRun) -> None:
        """Wait until no other process trains in the directory, such as a killed sweep's run."""
        last_message = None
        while self._stopping is None and (holder := run_lock.holder(planned_run.directory)):
            if last_message != holder:
                self._say(f"{planned_run.point.name}: waiting for {holder}")
            last_message = holder
            time.sleep(_POLL_SEC)

    def _train(self, planned_run: PlannedRun) -> int:
        planned_run.directory.mkdir(parents=True, exist_ok=True)
        with safe_files.open_to_append(planned_run.directory / _OUTPUT) as output:
            self._process = subprocess.Popen(
                # A process group of its own: Ctrl-C reaches the sweep alone, which forwards it
                # once.
                [sys.executable, "-c", _WITH_PARENT, str(os.getpid()), *planned_run.command],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, process_group=0,
                # Each run has a start time of its own, from which its time limit counts.
                env=new_command_env(),
            )  # fmt: skip
            if self._stopping is not None:  # the signal came before the process existed
                self._process.send_signal(self._stopping)
            code = self._wait(self._process)
        self._process = None
        return code

    def _wait(self, process: "subprocess.Popen[bytes]") -> int:
        """Wait for the end of the run, and report the signal that requests it."""
        reported = None
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return exit_codes.exit_code(process.wait(_POLL_SEC))
            # Printed here, because handlers of signals must not print.
            if self._stopping not in (None, reported):
                reported = self._stopping
                action = "the run saves a checkpoint, then the sweep ends"
                self._say(stop_message(reported, action))

    def _receive(self, sig: signal.Signals) -> None:
        self._stopping = sig
        if self._process is not None:
            self._process.send_signal(sig)
