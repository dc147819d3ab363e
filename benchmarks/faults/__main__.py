"""Fault injection: break over 1,000 training runs and check the result.

    python -m benchmarks.faults [--quick] [--only TEXT] [--jobs N] [--minutes M] [--again] [--keep]

Every fault hits a short run of a tiny model in real processes. Location and time come from a
generator seeded by the fault's name and number. Results must be bit-identical to an undisturbed
run: loss, gradient norm, learning rate and counts of every step, each exactly once, and each
evaluation.

Each fault is recorded as soon as it has ended (`record.py`). A drill continues the record: it has
the faults that were not met with the installed versions.
"""

import argparse
import collections
import concurrent.futures
import importlib.util
import itertools
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
from benchmarks.faults.record import Fault

TURNS = 20  # of a drill; each has faults of all kinds
_INSIDE = "JAXFORGE_FAULTS_MAY_MOUNT"


def meet(kind: Kind, number: int, shared: Shared, *, keep: bool) -> Fault:
    """Run one fault."""
    case, failure, began = Case(f"{kind.name} {number}", shared), None, time.monotonic()
    try:
        kind.scenario(case)
    except Broken as broken:
        failure = str(broken)
    except Exception:  # the drill goes on, whatever one case does
        failure = traceback.format_exc()
    seconds = round(time.monotonic() - began, 1)
    case.close(keep=keep or failure is not None)
    return Fault(
        kind.name, number, kind.expected, seconds, tuple(case.codes), case.identical, case.torn,
        case.notes, failure, record.today(), record.commit(), record.versions(),
    )  # fmt: skip


def drill(kinds: list[Kind], shared: Shared, options: argparse.Namespace) -> list[Fault]:
    """Run all faults that the record lacks; those of several processes run one at a time.

    Kinds take turns, in proportion to their counts, so that a part of a drill has all of them.
    """
    console, began, met = Console(), time.monotonic(), list[Fault]()

    def minutes() -> float:
        return (time.monotonic() - began) / 60

    def meet_in_time(kind: Kind, number: int) -> Fault | None:
        if options.minutes and minutes() > options.minutes:
            return None
        return meet(kind, number, shared, keep=options.keep)

    recorded = [] if options.again or options.quick else record.read()
    faults = missing(kinds, recorded, options.quick)
    for (_, alone), turn in itertools.groupby(sorted(faults, key=turn_of), turn_of):
        with concurrent.futures.ThreadPoolExecutor(1 if alone else options.jobs) as pool:
            meetings = [pool.submit(meet_in_time, *fault) for fault in turn]
            for meeting in concurrent.futures.as_completed(meetings):
                fault = meeting.result()
                if fault is None:
                    continue
                met.append(fault)
                if not options.quick:
                    record.append(fault)
                console.print(f"{minutes():5.1f} min  {verdict(fault)}", highlight=False,
                              markup=False)  # fmt: skip
    return met


def verdict(fault: Fault) -> str:
    """Return a line about a fault that has ended."""
    measured = ", ".join(f"{name} {x:.3g}" for name, x in fault.notes.items())
    outcome = f"FAILED: {fault.failure}" if fault.failure else f"holds {measured}"
    return f"{fault.kind} {fault.number}: {list(fault.codes)} {fault.seconds:.0f} s {outcome}"


def missing(
    kinds: list[Kind], recorded: Iterable[Fault] = (), quick: bool = False
) -> list[tuple[Kind, int]]:
    """Return the numbered faults that are not recorded, rarest kinds first."""
    versions = record.versions()
    met = record.counted(fault for fault in recorded if fault.versions == versions)
    faults = [
        (kind, number)
        for kind in kinds
        for number in range(1 if quick else kind.count)
        if (kind.name, number) not in met
    ]
    return sorted(faults, key=lambda fault: fault[1] / fault[0].count)


def turn_of(fault: tuple[Kind, int]) -> tuple[int, bool]:
    """Return the turn of a fault, in which each kind has an equal share of its count."""
    kind, number = fault
    return TURNS * number // kind.count, kind.n > 1


def show(faults: Iterable[Fault]) -> None:
    """Print a table of kinds."""
    table = Table("fault", "times", "exit codes", "bit-identical", "must hold", "failed",
                  title="faults")  # fmt: skip
    of_kind = collections.defaultdict(list)
    for fault in faults:
        of_kind[fault.kind].append(fault)
    for kind, each in of_kind.items():
        codes = collections.Counter(code for fault in each for code in fault.codes)
        compared = [fault.identical for fault in each if fault.identical is not None]
        table.add_row(kind, str(len(each)),
                      ", ".join(f"{code} ({n})" for code, n in sorted(codes.items())),
                      f"{sum(compared)}/{len(compared)}", each[0].expected,
                      str(sum(fault.failure is not None for fault in each)))  # fmt: skip
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
    parser.add_argument("--minutes", type=float, help="starts no fault later")
    parser.add_argument("--again", action="store_true", help="has the recorded faults, too")
    parser.add_argument("--keep", action="store_true", help="keeps the files of every fault")
    parser.add_argument("--directory", type=Path, help="where to work; by default a temporary one")
    return parser.parse_args()


def main() -> int:
    """Run the drill; return 1 if anything did not hold."""
    options = parse()
    mounts = may_mount()
    chosen = [kind for kind in KINDS if options.only in kind.name]
    networks, compiler = can_make_networks(), shutil.which("cc") is not None
    ray = importlib.util.find_spec("ray") is not None
    kinds = [
        kind
        for kind in chosen
        if (mounts or not kind.mounts)
        and (networks or not kind.has_network)
        and (compiler or not kind.compiles)
        and (ray or not kind.has_ray)
    ]
    root = options.directory or Path(tempfile.mkdtemp(prefix="jaxforge-faults-"))
    root.mkdir(parents=True, exist_ok=True)
    for old in ("cases", "undisturbed"):
        shutil.rmtree(root / old, ignore_errors=True)
    met = drill(kinds, Shared(root), options)
    show(met)
    if left_out := [kind.name for kind in chosen if kind not in kinds]:
        print("left out for want of cc, Ray, or the right to mount or create networks: "
              f"{', '.join(left_out)}")  # fmt: skip
    failures = [f"{fault.kind} {fault.number}: {fault.failure}" for fault in met if fault.failure]
    print("\n".join(failures))
    if failures:
        print(f"files of what failed: {root / 'cases'}")
    elif not options.keep:
        shutil.rmtree(root)
    if not options.quick and results.ELSEWHERE not in os.environ:
        results.show_in_docs()
    return bool(failures)


if __name__ == "__main__":
    raise SystemExit(main())
