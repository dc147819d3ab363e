"""Fault injection: break over 1,000 training runs and check the result.

    python -m benchmarks.faults [--quick] [--only TEXT] [--jobs N] [--minutes M] [--keep]

Every fault hits a short run of a tiny model in real processes. Location and time come from a
generator seeded by the fault's name and number. Results must be bit-identical to an undisturbed
run: loss, gradient norm, learning rate and counts of every step, each exactly once, and each
evaluation.

Each run replaces the rows of its kinds in `benchmarks/results/faults-cpu.json`. With `--minutes`,
it continues them: a complete drill may consist of several such runs.
"""

import argparse
import concurrent.futures
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks import one another by their names

import results

from benchmarks.faults import record
from benchmarks.faults.case import Broken, Case, Shared
from benchmarks.faults.kinds import KINDS, Kind
from benchmarks.faults.network import can_make_networks
from benchmarks.faults.record import Tally, continued

_INSIDE = "JAXFORGE_FAULTS_MAY_MOUNT"


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


def drill(
    kinds: list[Kind], tallies: dict[str, Tally], shared: Shared, options: argparse.Namespace
) -> list[str]:
    """Run all faults that the tallies lack; those of several processes run last, one at a time.

    Kinds take turns, in proportion to their counts, so that a part of a drill has all of them.

    Returns:
        What did not hold in this run.
    """
    console, began, failures = Console(), time.monotonic(), []

    def minutes() -> float:
        return (time.monotonic() - began) / 60

    def meet_in_time(kind: Kind, number: int) -> tuple[Case, str | None] | None:
        if options.minutes and minutes() > options.minutes:
            return None
        return meet(kind, number, shared, keep=options.keep)

    for alone in (False, True):
        faults = missing([kind for kind in kinds if (kind.n > 1) == alone], tallies, options.quick)
        with concurrent.futures.ThreadPoolExecutor(1 if alone else options.jobs) as pool:
            meetings = {pool.submit(meet_in_time, *fault): fault for fault in faults}
            for meeting in concurrent.futures.as_completed(meetings):
                outcome = meeting.result()
                if outcome is None:
                    continue
                case, failure = outcome
                tallies[meetings[meeting][0].name].add(case, failure)
                failures += [f"{case.name}: {failure}"] if failure else []
                measured = ", ".join(f"{name} {x:.3g}" for name, x in case.notes.items())
                verdict = f"FAILED: {failure}" if failure else f"as it should {measured}"
                console.print(f"{minutes():5.1f} min  {case.name}: {case.codes} {verdict}",
                              highlight=False, markup=False)  # fmt: skip
    return failures


def missing(
    kinds: list[Kind], tallies: dict[str, Tally], quick: bool = False
) -> list[tuple[Kind, int]]:
    """Return the numbered faults that tallies lack, rarest kinds first."""
    faults = [
        (kind, number)
        for kind in kinds
        for number in range(tallies[kind.name].count, 1 if quick else kind.count)
    ]
    return sorted(faults, key=lambda fault: fault[1] / fault[0].count)


def show(tallies: Iterable[Tally]) -> None:
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
    parser.add_argument(
        "--minutes", type=float, help="starts no fault later, and continues the recorded counts"
    )
    parser.add_argument("--keep", action="store_true", help="keeps the files of every fault")
    parser.add_argument("--directory", type=Path, help="where to work; by default a temporary one")
    return parser.parse_args()


def main() -> int:
    """Run the drill; return 1 if anything did not hold."""
    options = parse()
    mounts = may_mount()
    chosen = [kind for kind in KINDS if options.only in kind.name]
    networks, compiler = can_make_networks(), shutil.which("cc") is not None
    kinds = [
        kind
        for kind in chosen
        if (mounts or not kind.mounts)
        and (networks or not kind.has_network)
        and (compiler or not kind.compiles)
    ]
    root = options.directory or Path(tempfile.mkdtemp(prefix="jaxforge-faults-"))
    root.mkdir(parents=True, exist_ok=True)
    for old in ("cases", "undisturbed"):
        shutil.rmtree(root / old, ignore_errors=True)
    named = [(kind.name, kind.expected) for kind in kinds]
    is_part = options.minutes is not None and not options.quick
    tallies = continued(named) if is_part else {name: Tally(name, text) for name, text in named}
    failures = drill(kinds, tallies, Shared(root), options)
    show(tallies.values())
    notes = []
    if left_out := [kind.name for kind in chosen if kind not in kinds]:
        notes.append("left out for want of cc, or of the right to mount or create networks: "
                     f"{', '.join(left_out)}")  # fmt: skip
    print("\n".join([*notes, *failures]))
    if failures:
        print(f"files of what failed: {root / 'cases'}")
    elif not options.keep:
        shutil.rmtree(root)
    if not options.quick:
        record.write(tallies.values(), [kind.name for kind in KINDS], notes)
    return bool(failures)


if __name__ == "__main__":
    raise SystemExit(main())
