"""Record of the drill in `benchmarks/results/`, to which several runs contribute.

A row counts the faults of one kind. A run replaces the rows of its kinds, or continues them: fault
numbers start after those of the row, whose versions must be the same.
"""

import collections
import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks import one another by their names

import results

from benchmarks.faults.case import Case

PACKAGES = ("jaxforge", "jax", "orbax-checkpoint", "grain")


def versions() -> dict[str, str]:
    """Return the versions that a row is valid for."""
    return {package: version(package) for package in PACKAGES}


def today() -> str:
    """Return the date."""
    return date.today().isoformat()


@dataclasses.dataclass
class Tally:
    """Outcomes of one kind of fault.

    Attributes:
        kind: name of the kind.
        expected: description of the expected behaviour.
        count: number of faults.
        codes: number of processes by exit code.
        notes: measured values of each fault.
        compared: number of faults after which the curve was compared.
        identical: number of curves that were bit-identical.
        torn: number of faults that left a half-written checkpoint.
        failures: descriptions of what did not hold.
        began: date of the first fault.
        date: date of the last fault.
        versions: versions of packages.
    """

    kind: str
    expected: str
    count: int = 0
    codes: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    notes: list[dict[str, float]] = dataclasses.field(default_factory=list)
    compared: int = 0
    identical: int = 0
    torn: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)
    began: str = dataclasses.field(default_factory=today)
    date: str = dataclasses.field(default_factory=today)
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.versions = self.versions or versions()

    def add(self, case: Case, failure: str | None) -> None:
        """Count a fault."""
        self.count += 1
        self.date = today()
        self.codes.update(case.codes)
        self.compared += case.identical is not None
        self.identical += bool(case.identical)
        self.torn += case.torn
        self.notes += [case.notes] if case.notes else []
        if failure:
            self.failures.append(f"{case.name}: {failure}")

    def row(self) -> dict[str, Any]:
        """Return the row for JSON."""
        return {**dataclasses.asdict(self), "codes": dict(sorted(self.codes.items()))}

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Self:
        """Return the tally of a row of JSON."""
        codes = collections.Counter({int(code): count for code, count in row["codes"].items()})
        return cls(**{**row, "codes": codes})


def recorded() -> list[dict[str, Any]]:
    """Return the recorded rows."""
    path = results.directory() / "faults-cpu.json"
    return json.loads(path.read_text())["rows"] if path.exists() else []


def continued(kinds: Iterable[tuple[str, str]]) -> dict[str, Tally]:
    """Return tallies that continue the recorded rows of the same versions.

    Args:
        kinds: name and expected behaviour of each kind.
    """
    rows = {row["kind"]: row for row in recorded() if row["versions"] == versions()}
    return {
        kind: Tally.from_row({**rows.get(kind, Tally(kind, expected).row()), "expected": expected})
        for kind, expected in kinds
    }


def merged(
    rows: Sequence[dict[str, Any]], tallies: Iterable[Tally], order: Sequence[str]
) -> list[dict[str, Any]]:
    """Return recorded rows with those of a run in place of rows of the same kinds.

    Args:
        rows: recorded rows.
        tallies: outcomes of the run; kinds without a fault leave recorded rows unchanged.
        order: names of all kinds; rows of other kinds are removed.
    """
    by_kind = {row["kind"]: row for row in rows}
    by_kind |= {tally.kind: tally.row() for tally in tallies if tally.count}
    return [by_kind[kind] for kind in order if kind in by_kind]


def write(tallies: Iterable[Tally], order: Sequence[str], notes: Sequence[str]) -> None:
    """Merge the outcomes of a run into the record; see `merged`."""
    results.write_json("faults", merged(recorded(), tallies, order), PACKAGES, notes=notes)
