"""`logs/goodput_<process>.jsonl` in a run directory: the account of each attempt of a run.

An attempt is one start of a process. Each process has a file with a line per earlier attempt. The
latest attempt has a file of its own, `goodput_<process>.latest`, which is replaced every few
seconds: after kill -9 only the time since then is unknown, and counts as down time. The next start
adds its line to the first file. So the cost of an update does not grow with the attempts.
`metrics.jsonl` could not hold the account: a resumed run drops the lines after its checkpoint, and
their seconds would be lost.
"""

import json
import logging
import re
import threading
import time
from pathlib import Path

from jaxforge.errors import exit_code_of
from jaxforge.storage import safe_files
from jaxforge.storage.untrusted_json import Field, is_number, is_step, is_table, is_time, read_lines
from jaxforge.telemetry.goodput import CATEGORIES, ActivityClock, Attempt, account

log = logging.getLogger(__name__)

BEAT_SEC = 2.0
"""Seconds between two updates of the file of process 0."""
BEAT_SEC_OF_WORKERS = 30.0
"""Seconds between two updates of the file of any other process."""

_DIRECTORY, _NAME = "logs", re.compile(r"goodput_(\d{1,7})\.(jsonl|latest)")


def file_name(process: int) -> str:
    """Return the path of the file of a process, relative to the run directory."""
    return f"{_DIRECTORY}/goodput_{process}.jsonl"


def file_names(process: int) -> list[str]:
    """Return the paths of both files of a process, relative to the run directory."""
    name = file_name(process)
    return [name, str(_latest_file(Path(name)))]


def _latest_file(path: Path) -> Path:
    return path.with_suffix(".latest")


class AttemptLog:
    """Record of the present attempt of this process; the context manager closes it on a failure.

    Args:
        clock: the clock of the process. After `open` it also has the account of earlier attempts.
    """

    def __init__(self, clock: ActivityClock) -> None:
        self._clock = clock
        # The clock has run since the start of the process, before this object existed.
        self._began = time.time() - sum(clock.attempt().values())
        self._path: Path | None = None
        self._earlier: str | None = None  # lines that are not in the first file yet
        self._has_failed = False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "AttemptLog":
        return self

    def __exit__(self, _: object, failure: BaseException | None, __: object) -> None:
        if failure is not None:
            self.close(exit_code_of(failure))

    def open(self, run: Path, process: int) -> None:
        """Read the earlier attempts, and record this attempt from here on.

        Args:
            run: the directory on this machine, whose lock is held.
            process: index of this process in the job.
        """
        self._path = run / file_name(process)
        attempts, damage = read_file(self._path)
        for message in damage:
            log.warning("%s", message)
        self._earlier = "".join(_as_line(attempt) for attempt in attempts)
        # Steps launched before a fault and not saved: repeating them is rework.
        furthest = max((attempt.step for attempt in attempts), default=0)
        self._clock.continue_from(account(attempts, until=self._began), furthest)
        # At once: a process that is killed before its first beat leaves an attempt, too.
        self._write(None)
        beat = BEAT_SEC if process == 0 else BEAT_SEC_OF_WORKERS
        self._thread = threading.Thread(
            target=self._run_heartbeat, args=(beat,), name="goodput", daemon=True
        )
        self._thread.start()

    def close(self, code: int) -> None:
        """Record the end of the attempt; without effect if it was never opened, or was closed.

        Args:
            code: exit code of the process.
        """
        if self._thread is None:
            return
        # The last line must be that with the exit code: wait for a beat in progress.
        self._ended.set()
        self._thread.join()
        self._thread = None
        self._write(code)

    def _run_heartbeat(self, beat: float) -> None:
        while not self._ended.wait(beat):
            self._write(None)

    def _write(self, code: int | None) -> None:
        """Replace the latest line; log a failure once, since it does not affect the training."""
        assert self._path is not None
        seconds = {name: value for name, value in self._clock.attempt().items() if value}
        attempt = Attempt(self._began, time.time(), self._clock.step or 0, seconds, code)
        try:
            # First of all: the file of the latest attempt still has the line of the one before.
            if self._earlier is not None:
                safe_files.replace_text(self._path, self._earlier)
                self._earlier = None
            safe_files.replace_text(_latest_file(self._path), _as_line(attempt))
        except OSError as error:
            if not self._has_failed:
                log.warning("cannot write %s: %s. Until it can be written, goodput counts the time "
                            "as down time", self._path, error.strerror)  # fmt: skip
            self._has_failed = True
        else:
            self._has_failed = False


def read_file(path: Path) -> tuple[list[Attempt], list[str]]:
    """Return the attempts of a process, and messages about damaged lines.

    Args:
        path: the file of earlier attempts, which may not exist.
    """
    (lines, damage), (latest, more) = (
        read_lines(file, _FIELDS) for file in (path, _latest_file(path))
    )
    # A start that was killed between its two writes has left the latest line in both files.
    lines += [line for line in latest if line not in lines[-1:]]
    attempts = [
        Attempt(line["began"], line["seen"], int(line["step"]), line["seconds"], line["code"])
        for line in lines
    ]
    return attempts, damage + more


def read(run: Path) -> tuple[dict[int, list[Attempt]], list[str]]:
    """Return the attempts of a run by process, and messages about damaged lines.

    The dict is empty for a run of a version without accounts.
    """
    names = (_NAME.fullmatch(path.name) for path in (run / _DIRECTORY).glob("goodput_*"))
    attempts, damage = {}, list[str]()
    for process in sorted({int(match[1]) for match in names if match}):
        attempts[process], messages = read_file(run / file_name(process))
        damage += messages
    return {process: lines for process, lines in attempts.items() if lines}, damage


def _as_line(attempt: Attempt) -> str:
    seconds = {name: round(value, 3) for name, value in attempt.seconds.items()}
    times = {"began": round(attempt.began, 3), "seen": round(attempt.seen, 3)}
    return json.dumps(attempt._asdict() | times | {"seconds": seconds}) + "\n"


def _are_seconds(value: object) -> bool:
    return (
        is_table(value, int | float)
        and isinstance(value, dict)
        and value.keys() <= set(CATEGORIES)
        and all(is_number(seconds) and seconds >= 0 for seconds in value.values())
    )


_FIELDS = {
    "began": Field(is_time, "a time in seconds since 1970"),
    "seen": Field(is_time, "a time in seconds since 1970"),
    "step": Field(is_step, "the number of a step"),
    "seconds": Field(_are_seconds, "a table of seconds"),
    "code": Field(lambda code: code is None or is_number(code), "an exit code"),
}
