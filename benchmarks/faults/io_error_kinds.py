"""Reads and writes that fail with EIO, for each kind of file of a run.

A preloaded library (`io_error.c`, built with the system's C compiler) lets the calls fail in
Python, Orbax and tensorstore. Token files are mapped: a shorter file then raises the same signal.
"""

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from benchmarks.faults import data
from benchmarks.faults.case import INTERVAL, STEPS, Case, Variation, require
from benchmarks.faults.kind import (
    GOES_ON,
    STORAGE,
    Kind,
    copy_half_run,
    least_saved,
    resumes,
)

SOURCE = Path(__file__).with_name("io_error.c")
WORDS = "Input/output error"


def library(case: Case) -> Path:
    """Return the preloaded library, compiled once."""
    path = case.shared.root / "io_error.so"
    with case.shared.lock:
        if not path.exists():
            subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", path, SOURCE, "-ldl"],
                           check=True)  # fmt: skip
    return path


def failing(
    case: Case, operation: Literal["read", "write"], pattern: str
) -> tuple[Variation, Path]:
    """Return a variation in which calls fail while a file exists, and that file.

    Args:
        case: the case.
        operation: operations that fail.
        pattern: pattern of paths, relative to the parent of the run directory.
    """
    armed = case.run.directory.with_name("armed")
    armed.with_name("failed").unlink(missing_ok=True)
    environment = {
        "LD_PRELOAD": str(library(case)), "IO_ERROR_OPERATION": operation,
        "IO_ERROR_PATH": f"{case.run.directory.parent}/{pattern}", "IO_ERROR_WHILE": str(armed),
        "IO_ERROR_MARK": str(armed.with_name("failed")),
    }  # fmt: skip
    return Variation(environment=environment), armed


def require_failure(armed: Path) -> None:
    """Require that a call has failed: the pattern may match no file."""
    require(armed.with_name("failed").exists(), "no call has failed")


def on_the_way(pattern: str, code: int, *said: str) -> Callable[[Case], None]:
    """Let all writes of a file fail from a step on."""

    def scenario(case: Case) -> None:
        variation, armed = failing(case, "write", pattern)
        step = case.rng.randrange(1, STEPS - 2 * INTERVAL)
        fault = ("make_file", {"step": step, "path": str(armed)})
        output = case.ends(case.run.start(fault=fault, variations={0: variation}), code, noisy=True)
        case.says(output, *said)
        require_failure(armed)
        armed.unlink()
        if code:
            least_saved(case, step)
            resumes(case)
        else:
            case.matches(case.undisturbed())

    return scenario


def for_a_while(pattern: str, *said: str) -> Callable[[Case], None]:
    """Let the writes of a file fail for some steps."""

    def scenario(case: Case) -> None:
        variation, armed = failing(case, "write", pattern)
        step = case.rng.randrange(INTERVAL, STEPS - INTERVAL, INTERVAL) + 1
        fault = ("make_file", {"step": step, "path": str(armed), "until": step + 6})
        output = case.ends(case.run.start(fault=fault, variations={0: variation}), 0)
        require_failure(armed)
        case.says(output, *said)
        case.matches(case.undisturbed())

    return scenario


def at_start(
    operation: Literal["read", "write"], pattern: str, code: int, *said: str, resumed: bool = False
) -> Callable[[Case], None]:
    """Let reads or writes of a file fail in a whole start, of a new or a resumed run."""

    def scenario(case: Case) -> None:
        if resumed:
            copy_half_run(case)
        variation, armed = failing(case, operation, pattern)
        armed.touch()
        before = case.run.durable()
        output = case.ends(case.run.start(variations={0: variation}), code, noisy=code == STORAGE)
        case.says(output, *said)
        require_failure(armed)
        armed.unlink()
        if code:
            require(case.run.durable() == before, "checkpoints have changed")
            resumes(case)
        else:
            case.matches(case.undisturbed())

    return scenario


def shard_at_start(case: Case) -> None:
    """Let the read of a shard's header fail."""
    case.own_tokens()
    at_start("read", f"tokens/{data.TRAINING}/0090.npy", STORAGE, "0090.npy", WORDS)(case)


def mapped_page(case: Case) -> None:
    """Let a page of a mapped shard be unreadable: the kernel sends SIGBUS."""
    victim = sorted((case.own_tokens() / data.TRAINING).iterdir())[5]
    spare = victim.read_bytes()
    where = {"window": 128 * data.ROWS, "path": str(victim), "size": 4096}
    fault = ("cut_mapped", where)
    case.ends(case.run.start(fault=fault), -signal.SIGBUS, noisy=True)
    least_saved(case, case.run.last_logged())
    victim.write_bytes(spare)
    resumes(case)


_NEWEST = f"run/checkpoints/step_{STEPS // 2}"
_UNREADABLE = "could not be read"
_FAILED_SAVE = "a checkpoint could not be written"

_COMPILED_KINDS = (
    Kind("EIO: arrays of a checkpoint, written", 6,
         on_the_way("run/checkpoints/*/d/*", STORAGE, _FAILED_SAVE), GOES_ON),
    Kind("EIO: indices of a checkpoint, written", 4,
         on_the_way("run/checkpoints/*manifest.ocdbt*", STORAGE, _FAILED_SAVE), GOES_ON),
    Kind("EIO: metadata of a checkpoint, written", 4,
         on_the_way("run/checkpoints/*/progress/*", STORAGE, _FAILED_SAVE), GOES_ON),
    Kind("EIO: arrays of a checkpoint, read", 2,
         at_start("read", f"{_NEWEST}/state/*/d/*", STORAGE, _UNREADABLE, WORDS, resumed=True),
         "says so"),
    Kind("EIO: indices of a checkpoint, read", 2,
         at_start("read", f"{_NEWEST}/state/*manifest.ocdbt", STORAGE, _UNREADABLE, WORDS,
                  resumed=True),
         "says so"),
    Kind("EIO: metadata of a checkpoint, read", 2,
         at_start("read", f"{_NEWEST}/progress/*", STORAGE, _UNREADABLE, WORDS, resumed=True),
         "says so"),
    Kind("EIO: metrics.jsonl, written, for a while", 6,
         for_a_while("run/metrics.jsonl", "metrics.jsonl failed: "), "no line is lost"),
    Kind("EIO: metrics.jsonl, read", 2,
         at_start("read", "run/metrics.jsonl", STORAGE, WORDS, resumed=True), "says so"),
    Kind("EIO: logs, written", 2, on_the_way("run/logs/process_0.log", 0), "nothing"),
    Kind("EIO: account of goodput, written", 2, on_the_way("run/logs/*goodput*", 0), "nothing"),
    Kind("EIO: schedule_summary.txt, written", 2,
         at_start("write", "run/*schedule_summary*", STORAGE, WORDS), "says so"),
    Kind("EIO: run.lock, written", 2,
         at_start("write", "run/run.lock*", STORAGE, WORDS), "says so"),
    Kind("EIO: run.lock, read", 2,
         at_start("read", "run/run.lock*", 0, resumed=True), "nothing"),
    Kind("EIO: config.toml, written", 2,
         at_start("write", "run/*config*", STORAGE, WORDS), "says so"),
    Kind("EIO: config.toml, read", 2,
         at_start("read", "run/config.toml", 0, WORDS, resumed=True), "nothing"),
    Kind("EIO: starts.jsonl, written", 2,
         at_start("write", "run/*starts.jsonl*", STORAGE, WORDS), "says so"),
    Kind("EIO: starts.jsonl, read", 2,
         at_start("read", "run/starts.jsonl", STORAGE, WORDS, resumed=True), "says so"),
    Kind("EIO: header of a shard, read", 2, shard_at_start, "says so"),
)  # fmt: skip

IO_ERROR_KINDS = (
    *(kind._replace(compiles=True) for kind in _COMPILED_KINDS),
    Kind("EIO: mapped page of a shard", 4, mapped_page, GOES_ON),
)
