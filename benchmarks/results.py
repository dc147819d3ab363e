"""Reports of benchmarks: a table, JSON in `benchmarks/results/`, and tables in `docs/`.

A row compares jaxforge with a peer measured in the same run. `ratio` is larger if jaxforge is
better: ours / theirs for a speed, theirs / ours for a time or a size. A claim is a statement that
must hold.

If the environment variable JAXFORGE_RESULTS names a directory, results are written there, also with
`--quick`, and `docs/` are not updated.
"""

import argparse
import json
import os
import platform
import re
import runpy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
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
    """Leave half of the GPU memory to the peer in the same process; call this before JAX is used.

    JAX allocates its half at once: a growing pool takes up to twice the memory that it needs.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.48")


@dataclass
class Row:
    """Comparison of jaxforge with a peer.

    Attributes:
        case: the measured case.
        ours: value of jaxforge.
        peer: name of the peer.
        theirs: value of the peer, from the same run.
        unit: unit of both values.
        smaller_is_better: True for times and sizes.
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
    """Statement that must hold.

    Attributes:
        case: the checked case.
        measured: the measured value.
        expected: the expected value; "-" if there is none.
        holds: whether the statement holds.
    """

    case: str
    measured: float | str
    expected: str = "-"
    holds: bool = True


def arguments(description: str | None, *, cases: bool = False) -> argparse.ArgumentParser:
    """Return the parser of a benchmark: `--quick`, which writes nothing, and perhaps `--cases`."""
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
    limits: Mapping[str, float] = MappingProxyType({}),
    **more: Any,  # noqa: ANN401 (whatever JSON holds)
) -> None:
    """Print the rows and write `results/<name>-<platform>.json`.

    Args:
        name: name of the benchmark.
        rows: the measured rows.
        packages: packages whose versions are recorded.
        device: device of the measurement or compilation; by default JAX's first device.
        notes: notes for the reader, below the table and in the file.
        write: False with `--quick`, and for a part of the benchmark.
        limits: least ratio to a peer that is no other program, by the name of the peer.
        more: further values that are not in a table.

    Raises:
        SystemExit: a complete result is below a limit or its floors (`floors.toml`); nothing is
            published.
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
    publish(name, written, packages, device=device, notes=notes, write=write, limits=limits,
            **more)  # fmt: skip


def publish(
    name: str,
    rows: Sequence[dict[str, Any]],
    packages: Sequence[str],
    *,
    device: str | None = None,
    notes: Sequence[str] = (),
    write: bool = True,
    limits: Mapping[str, float] = MappingProxyType({}),
    **more: Any,  # noqa: ANN401 (whatever JSON holds)
) -> None:
    """Write rows with `ratio`; the other arguments are those of `report`.

    Raises:
        SystemExit: see `report`.
    """
    elsewhere = ELSEWHERE in os.environ
    result = f"{name}-{device or jax.default_backend()}"
    fallen = _below_floor(result, rows, limits, complete=not elsewhere) if write else []
    if elsewhere or (write and not fallen):
        write_json(name, rows, packages, device=device, notes=notes, **more)
    if fallen:
        raise SystemExit("\n".join([*fallen, "not published: mend it, or lower the floor in "
                                    "benchmarks/floors.toml with the reason"]))  # fmt: skip


def _below_floor(
    result: str, rows: Sequence[dict[str, Any]], limits: Mapping[str, float], *, complete: bool
) -> list[str]:
    limited = {floors.row_key(row): limits[row["peer"]] for row in rows if row["peer"] in limits}
    matches = floors.floors_for(floors.read_floors(), result, _machine())
    return floors.below_floor(limited | dict(matches), rows, complete=complete)


def judge(
    name: str,
    claims: Iterable[Claim],
    packages: Sequence[str],
    *,
    notes: Sequence[str] = (),
    write: bool = True,
) -> int:
    """Print each claim once it is known and write all; the arguments are those of `report`.

    Returns:
        An exit code: 1 if a claim does not hold.
    """
    console, judged = Console(), list[Claim]()
    for claim in claims:
        console.print("holds" if claim.holds else "FAILS", claim.case, claim.measured,
                      f"(expected: {claim.expected})", sep=": ", highlight=False)  # fmt: skip
        judged.append(claim)
    if write or ELSEWHERE in os.environ:
        write_json(name, [asdict(claim) for claim in judged], packages, notes=notes)
    return int(not all(claim.holds for claim in judged))


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
    """Write `results/<name>-<device>.json` with rows of any form.

    Args:
        name: name of the benchmark.
        rows: rows of the table.
        packages: packages whose versions are recorded.
        device: device of the measurement; by default JAX's first device.
        notes: notes for the reader.
        platform: platform in the file name, if it differs from the device's.
        more: further values that are not in a table.
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
    """Update the tables in `docs/`."""
    runpy.run_path(str(Path(__file__).with_name("figures.py")), run_name="__main__")


def _machine() -> str:
    return f"{_processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}"


def _processor() -> str:
    """Return architecture, vendor and vector extensions, for which PyTorch has special kernels."""
    try:
        about = Path("/proc/cpuinfo").read_text()
    except FileNotFoundError:  # no Linux
        return platform.machine()
    units = [unit for unit in ("avx2", "avx512f", "amx_bf16") if f" {unit} " in about]
    maker = re.search(r"vendor_id\s*: (\S+)", about)
    return " ".join([platform.machine(), *([maker[1]] if maker else []), *units])


def _shown(figure: float) -> str:
    return f"{figure:,.0f}" if abs(figure) >= 100 else f"{figure:.3g}"
