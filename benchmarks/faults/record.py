"""Record of the drill: one line of JSON per fault in `benchmarks/results/faults.jsonl`.

Several drills contribute to the record. A failure annuls the earlier faults of its kind: once the
cause is mended, they are repeated from the first.
"""

import dataclasses
import functools
import json
import subprocess
import sys
from collections.abc import Iterable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Self

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks import one another by their names

import results

ROOT = Path(__file__).parents[2]
PACKAGES = ("jax", "orbax-checkpoint", "grain")


@dataclasses.dataclass(frozen=True)
class Fault:
    """Outcome of a fault.

    Attributes:
        kind: name of the kind.
        number: number of the fault within its kind, which seeds its random choices.
        expected: description of the expected behaviour.
        seconds: duration, from the first start to the last comparison.
        codes: exit codes of the processes that met the fault.
        identical: whether the curve was bit-identical; None if it was not compared.
        torn: whether a half-written checkpoint was left.
        notes: measured values by name.
        failure: description of what did not hold.
        date: date of the fault.
        commit: commit of the code.
        versions: versions of packages.
    """

    kind: str
    number: int
    expected: str
    seconds: float
    codes: tuple[int, ...]
    identical: bool | None
    torn: bool
    notes: dict[str, float]
    failure: str | None
    date: str
    commit: str
    versions: dict[str, str]

    @classmethod
    def from_line(cls, line: str) -> Self:
        """Return the fault of a line of the record."""
        values = json.loads(line)
        return cls(**{**values, "codes": tuple(values["codes"])})


def path() -> Path:
    """Return the file of the record."""
    return results.directory() / "faults.jsonl"


def append(fault: Fault) -> None:
    """Add a fault to the record."""
    path().parent.mkdir(parents=True, exist_ok=True)
    with path().open("a") as file:
        file.write(json.dumps(dataclasses.asdict(fault)) + "\n")


def read() -> list[Fault]:
    """Return the recorded faults in the order of their ends."""
    lines = path().read_text().splitlines() if path().exists() else []
    return [Fault.from_line(line) for line in lines]


def counted(faults: Iterable[Fault]) -> dict[tuple[str, int], Fault]:
    """Return the faults since the last failure of their kind, by kind and number."""
    met: dict[tuple[str, int], Fault] = {}
    for fault in faults:
        if fault.failure:
            met = {key: each for key, each in met.items() if key[0] != fault.kind}
        else:
            met[fault.kind, fault.number] = fault
    return met


def versions() -> dict[str, str]:
    """Return the versions of the installed packages."""
    return {package: version(package) for package in PACKAGES}


@functools.cache  # of this process, while the files may change
def commit() -> str:
    """Return the abbreviated commit of the code."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True).stdout.strip()


def today() -> str:
    """Return the date."""
    return date.today().isoformat()
