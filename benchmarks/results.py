"""Reports of benchmarks: a table, JSON in `benchmarks/results/`, and tables in `docs/`.

A row compares jaxforge with a peer measured in the same run. `ratio` is larger where jaxforge is
better, whatever the unit: ours / theirs of a speed, theirs / ours of a time or a size. A claim is
something that must hold.

With JAXFORGE_RESULTS, a directory, in the environment, results go there, also those of `--quick`,
and `docs/` stay as they are.
"""

import argparse
import json
import os
import platform
import re
import runpy
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import floors
import jax
from rich.console import Console
from rich.table import Table

# Processes that are timed find this project's code compiled, as they do a peer's that is installed.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

RESULTS = Path(__file__).parent / "results"
ELSEWHERE = "JAXFORGE_RESULTS"


def leave_room() -> None:
    """Leaves half of a GPU to the peer in the same process; to be called before JAX is used.

    JAX takes its part at once and in one piece: where it grows, it takes up to twice what it needs.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.45")


@dataclass
class Row:
    """One comparison.

    Attributes:
        case: what was measured.
        ours: jaxforge's figure.
        peer: whose figure `theirs` is.
        theirs: the peer's figure, of the same run.
        unit: of both figures.
        smaller_is_better: for times and sizes.
    """

    case: str
    ours: float
    peer: str
    theirs: float
    unit: str
    smaller_is_better: bool = field(default=False, repr=False)

    @property
    def ratio(self) -> float:
        """Return how many times better jaxforge is."""
        best, worst = self.theirs, self.ours
        if not self.smaller_is_better:
            best, worst = worst, best
        return round(best / worst, 3)


@dataclass
class Claim:
    """Something that must hold.

    Attributes:
        case: what was looked at.
        found: what it came to.
        expected: what it should be; "-" where nobody can say.
        holds: whether it is so.
    """

    case: str
    measured: float | str
    expected: str = "-"
    holds: bool = True


def arguments(description: str | None, *, cases: bool = False) -> argparse.ArgumentParser:
    """The parser of a benchmark: `--quick`, which writes nothing; `--cases`, where it has that."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small and short; writes no results")
    if cases:
        parser.add_argument(
            "--cases", default="", metavar="WORDS", help="only those whose names have this"
        )
    return parser


def report(
    name: str,
    rows: Sequence[Row],
    packages: Sequence[str],
    *,
    device: str | None = None,
    notes: Sequence[str] = (),
    write: bool = True,
) -> None:
    """Prints the rows and writes `results/<name>-<platform>.json`.

    Args:
        name: of the benchmark.
        rows: what was measured.
        packages: whose versions matter.
        device: what it ran on, or was compiled for; by default JAX's first device.
        notes: what a reader must know, below the table and in the file.
        write: False with `--quick`, and for a part of the benchmark.

    Raises:
        SystemExit: a complete result is below its floors (`floors.toml`); nothing is published.
    """
    table = Table("case", "peer", "unit", title=name)
    for column in ("ours", "theirs", "ratio"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(row.case, row.peer, row.unit, _shown(row.ours), _shown(row.theirs),
                      f"{row.ratio:.2f}")  # fmt: skip
    console = Console()
    console.print(table)
    for note in notes:
        console.print(note, highlight=False)
    written = [{**asdict(row), "ratio": row.ratio} for row in rows]
    fallen = _below_floor(f"{name}-{device or jax.default_backend()}", written) if write else []
    if ELSEWHERE in os.environ or (write and not fallen):
        write_json(name, written, packages, device=device, notes=notes)
    if fallen:
        raise SystemExit("\n".join([*fallen, "not published: mend it, or lower the floor in "
                                    "benchmarks/floors.toml with the reason"]))  # fmt: skip


def _below_floor(result: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    matches = floors.floors_for(floors.read_floors(), result, _machine())
    return floors.below_floor(matches, rows)


def judge(
    name: str,
    claims: Sequence[Claim],
    packages: Sequence[str],
    *,
    notes: Sequence[str] = (),
    write: bool = True,
) -> int:
    """Prints claims and writes them; arguments as of `report`.

    Returns:
        An exit code: 1 where one does not hold.
    """
    console = Console()
    for claim in claims:
        console.print("holds" if claim.holds else "FAILS", claim.case, claim.measured,
                      f"(expected: {claim.expected})", sep=": ", highlight=False)  # fmt: skip
    if write or ELSEWHERE in os.environ:
        write_json(name, [asdict(claim) for claim in claims], packages, notes=notes)
    return int(not all(claim.holds for claim in claims))


def write_json(
    name: str,
    rows: Sequence[dict[str, Any]],
    packages: Sequence[str],
    *,
    device: str | None = None,
    notes: Sequence[str] = (),
    platform: str | None = None,
    **more: Any,  # noqa: ANN401 (whatever JSON holds)
) -> None:
    """Writes `results/<name>-<device>.json`; arguments as of `report`, rows as they are.

    Args:
        name: of the benchmark.
        rows: of its table.
        packages: whose versions matter.
        device: by default JAX's first, whose file is named by its platform.
        notes: for readers.
        platform: for the file's name, where it is not to be that of the device.
        more: what no table shows.
    """
    platform = platform or device or jax.default_backend()
    device = device or jax.devices()[0].device_kind
    result = {
        "name": name,
        "device": device,
        "machine": _machine(),
        "versions": {package: version(package) for package in packages},
        "date": date.today().isoformat(),
        "rows": list(rows),
        "notes": list(notes),
        **more,
    }
    path = directory() / f"{name}-{platform}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {path}")
    if ELSEWHERE not in os.environ:
        show_in_docs()


def directory() -> Path:
    """Return the directory of results."""
    return Path(os.environ.get(ELSEWHERE) or RESULTS)


def show_in_docs() -> None:
    """Brings the tables in `docs/` up to date."""
    runpy.run_path(str(Path(__file__).with_name("figures.py")), run_name="__main__")


def _machine() -> str:
    return f"{_processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}"


def _processor() -> str:
    """Its architecture, maker and widest units: PyTorch's products are made for some of them."""
    try:
        about = Path("/proc/cpuinfo").read_text()
    except FileNotFoundError:  # no Linux
        return platform.machine()
    units = [unit for unit in ("avx2", "avx512f", "amx_bf16") if f" {unit} " in about]
    maker = re.search(r"vendor_id\s*: (\S+)", about)
    return " ".join([platform.machine(), *([maker[1]] if maker else []), *units])


def _shown(figure: float) -> str:
    return f"{figure:,.0f}" if abs(figure) >= 100 else f"{figure:.3g}"
