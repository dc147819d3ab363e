"""Kind of fault, and what the scenarios of several modules share."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.faults.case import INTERVAL, STEPS, Case, require

USER, MACHINE, GAVE_UP, HUNG, STORAGE, STOPPED, INTERRUPTED = 2, 16, 65, 70, 74, 75, 130
KILLED = -signal.SIGKILL


class Kind(NamedTuple):
    """Kind of fault.

    Attributes:
        name: name of the fault.
        count: number of such faults in a complete drill.
        scenario: function that injects the fault and checks the result.
        expected: description of the expected behaviour.
        mounts: whether the fault needs to mount file systems.
        n: processes of a run.
        has_network: whether the fault needs network namespaces.
        compiles: whether the fault needs a C compiler.
        has_ray: whether the fault needs Ray.
    """

    name: str
    count: int
    scenario: Callable[[Case], None]
    expected: str
    mounts: bool = False
    n: int = 1
    has_network: bool = False
    compiles: bool = False
    has_ray: bool = False


GOES_ON = "goes on from the newest durable step"
SAVES = "saves that very step and goes on"
HALF = STEPS // 2
"""Step at which the runs stop that `copy_half_run` copies."""


def copy_half_run(case: Case) -> None:
    """Let the case begin with a run that has stopped at step `HALF`."""
    half = case.shared.undisturbed(f"--train.exit_interval={HALF}", code=STOPPED)
    shutil.copytree(half.directory, case.run.directory)


def resumes(case: Case, *overrides: str, n: int = 1) -> None:
    """Run the command again to the end, and compare the curve."""
    case.goes_on(*overrides, n=n)
    case.matches(case.shared.undisturbed(n=n))


def least_saved(case: Case, logged: int) -> None:
    """Return the least step that must be saved: a save waits for the previous save.

    A step is logged before it is saved: the save of step `logged` may not have started.
    """
    newest, started = max(case.run.durable(), default=0), (logged - 1) // INTERVAL * INTERVAL
    require(newest >= started - INTERVAL, f"step {logged} logged, {newest} saved")


def array_files(checkpoint: Path) -> list[Path]:
    """Return the files with numbers; smaller files are indices."""
    files = sorted((checkpoint / "state").rglob("d/*"))
    return [path for path in files if path.stat().st_size > 100_000]


def flip(path: Path, case: Case, first: int = 0, end: int | None = None) -> None:
    """Flip a bit of a byte from `first` on, before `end`."""
    with path.open("r+b") as file:
        at = case.rng.randrange(first, end or path.stat().st_size)
        file.seek(at)
        byte = file.read(1)[0] ^ (1 << case.rng.randrange(8))
        file.seek(at)
        file.write(bytes([byte]))


def truncate(path: Path, case: Case) -> None:
    """Truncate the file at a random byte."""
    os.truncate(path, case.rng.randrange(path.stat().st_size))


def remove(path: Path, case: Case) -> None:
    """Remove the file."""
    path.unlink()
