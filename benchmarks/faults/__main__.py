"""Fault injection: break training runs in over 200 ways and check the result.

    python -m benchmarks.faults [--quick] [--only TEXT] [--jobs N] [--keep]

Every fault hits a short run of a tiny model in real processes. Location and time come from a
generator seeded by the fault's name and number. Results must be bit-identical to an undisturbed
run: loss, gradient norm, learning rate and counts of every step, each exactly once, and each
evaluation.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import os
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks import one another by their names

import results

from benchmarks.faults.case import Broken, Case, Shared
from benchmarks.faults.hosts import can_make_networks
from benchmarks.faults.kinds import KINDS, Kind

_INSIDE = "JAXFORGE_FAULTS_MAY_MOUNT"


@dataclasses.dataclass
class Tally:
    """Outcomes of one kind of fault."""

    kind: str
    expected: str
    count: int = 0
    codes: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    notes: list[dict[str, float]] = dataclasses.field(default_factory=list)
    compared: int = 0
    identical: int = 0
    torn: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)

    def add(self, case: Case, failure: str | None) -> None:
        """Count a fault."""
        self.count += 1
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


def meet(kind: Kind, number: int, shared: Shared, *, keep: bool) -> tuple[Case, str | None]:
    """Run one fault; return what did not hold, or None."""
    case, failure = Case(f"{kind.name} {number}", shared), None
    try:
        kind.scenario(case)
    except Broken as broken:
        failure = str(broken)
    except Exception:  # the drill goes on, whatever one case does
        failure = traceback.format_exc()
    case.close(keep=keep or failure is not None)
    return case, failure


def drill(kinds: list[Kind], shared: Shared, options: argparse.Namespace) -> list[Tally]:
    """Run all faults; those of several processes run last, one at a time."""
    tallies = {kind.name: Tally(kind.name, kind.expected) for kind in kinds}
    console, began = Console(), time.monotonic()
    for alone in (False, True):
        faults = [(kind, number) for kind in kinds if (kind.n > 1) == alone
                  for number in range(1 if options.quick else kind.count)]  # fmt: skip
        with concurrent.futures.ThreadPoolExecutor(1 if alone else options.jobs) as pool:
            meetings = {pool.submit(meet, *fault, shared, keep=options.keep): fault
                        for fault in faults}  # fmt: skip
            for meeting in concurrent.futures.as_completed(meetings):
                case, failure = meeting.result()
                tallies[meetings[meeting][0].name].add(case, failure)
                minutes = (time.monotonic() - began) / 60
                measured = ", ".join(f"{name} {x:.3g}" for name, x in case.notes.items())
                verdict = f"FAILED: {failure}" if failure else f"as it should {measured}"
                console.print(f"{minutes:5.1f} min  {case.name}: {case.codes} {verdict}",
                              highlight=False, markup=False)  # fmt: skip
    return list(tallies.values())


def show(tallies: list[Tally]) -> None:
    """Print the table."""
    table = Table("fault", "times", "exit codes", "bit-identical", "must hold", "failed",
                  title="faults")  # fmt: skip
    for tally in tallies:
        codes = ", ".join(f"{code} ({n})" for code, n in sorted(tally.codes.items()))
        table.add_row(tally.kind, str(tally.count), codes, f"{tally.identical}/{tally.compared}",
                      tally.expected, str(len(tally.failures)))  # fmt: skip
    Console(width=150).print(table)


def may_mount() -> bool:
    """Enter a private mount namespace if permitted; return whether that worked."""
    if os.environ.get(_INSIDE):
        return os.environ[_INSIDE] == "yes"
    unshare = shutil.which("unshare")
    namespaces = "-rm" if os.geteuid() else "-m"  # a user namespace could create no networks
    is_permitted = unshare and os.system(f"unshare {namespaces} true") == 0
    os.environ[_INSIDE] = "yes" if is_permitted else "no"
    if os.environ[_INSIDE] == "yes":
        command = [sys.executable, "-m", __package__, *sys.argv[1:]]
        os.execvp("unshare", ["unshare", namespaces, *command])
    return False


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = results.arguments(__doc__)
    parser.add_argument("--only", default="", help="kinds whose names hold this text")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time")
    parser.add_argument("--keep", action="store_true", help="keeps the files of every fault")
    parser.add_argument("--directory", type=Path, help="where to work; by default a temporary one")
    return parser.parse_args()


def main() -> int:
    """Run the drill; return 1 if anything did not hold."""
    options = parse()
    mounts = may_mount()
    chosen = [kind for kind in KINDS if options.only in kind.name]
    networks = can_make_networks()
    kinds = [kind for kind in chosen
             if (mounts or not kind.mounts) and (networks or not kind.has_network)]  # fmt: skip
    root = options.directory or Path(tempfile.mkdtemp(prefix="jaxforge-faults-"))
    for old in ("cases", "undisturbed"):
        shutil.rmtree(root / old, ignore_errors=True)
    tallies = drill(kinds, Shared(root), options)
    show(tallies)
    notes = [f"{sum(tally.count for tally in tallies)} faults, "
             f"{sum(tally.torn for tally in tallies)} left a half-written checkpoint"]  # fmt: skip
    if left_out := [kind.name for kind in chosen if kind not in kinds]:
        notes.append("left out, as this user may not mount or create networks here: "
                     f"{', '.join(left_out)}")  # fmt: skip
    failures = [failure for tally in tallies for failure in tally.failures]
    print("\n".join([*notes, *failures]))
    if failures:
        print(f"files of what failed: {root / 'cases'}")
    elif not options.keep:
        shutil.rmtree(root)
    if not options.quick and not options.only:
        results.write_json("faults", [tally.row() for tally in tallies],
                      ("jax", "orbax-checkpoint", "grain"), notes=notes)  # fmt: skip
    return bool(failures)


if __name__ == "__main__":
    raise SystemExit(main())
