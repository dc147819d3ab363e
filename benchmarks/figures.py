"""Write the tables in docs/ from `benchmarks/results/`: `python benchmarks/figures.py`.

A page names a table. The text between the two comments is generated:

    <!-- figures: remat -->
    <!-- end of figures -->

Every benchmark that writes results also updates the pages. A test compares pages and results.

Not in `make bench`: no benchmark.
"""

import collections
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # this file is run by its path

from benchmarks.faults import record

HERE = Path(__file__).parent
RESULTS, DOCS = HERE / "results", HERE.parent / "docs"
_BLOCK = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- end of figures -->\n)", re.DOTALL)
_COMPARISON = ("case", "ours", "peer", "theirs", "unit", "ratio")
_STORED = {
    "none": "everything but elementwise results",
    "everything_saveable": "everything",
    "selective": "everything but the inside of attention",
    "dots_saveable": "results of all matrix products",
    "dots_with_no_batch_dims_saveable": "results of products with weights",
    "full": "its input",
    "nothing_saveable": "the same",
}  # of each block, by train.activation_checkpointing


def result(name: str) -> dict[str, Any]:
    """Return the content of `results/<name>.json`."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def compared(name: str, case: str, peer: str | None = None, unit: str | None = None) -> Any:  # noqa: ANN401
    """Return the single row of a comparison.

    Raises:
        ValueError: there is no such row, or several.
    """
    (row,) = (
        row
        for row in result(name)["rows"]
        if row["case"] == case and peer in (None, row["peer"]) and unit in (None, row["unit"])
    )
    return row


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(shown, line)) + " |" for line in lines)


def shown(value: Any) -> str:  # noqa: ANN401 (whatever a result holds)
    """Format a number: three significant digits, or all digits before the decimal point."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {shown(each)}" for key, each in value.items())
    if not isinstance(value, int | float) or isinstance(value, bool):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def origin(matches: Mapping[str, Any]) -> str:
    """Describe when and on what a result was measured."""
    versions = ", ".join(f"{package} {version}" for package, version in matches["versions"].items())
    return f"{matches['date']}, {matches['device']}; {matches['machine']}; {versions}."


def everything() -> str:
    """Return origin, rows and notes of each result that no other table shows."""
    parts = []
    for path in sorted(RESULTS.glob("*.json")):
        if path.stem in SHOWN:
            continue
        matches = result(path.stem)
        listed = matches.get("programs", matches["rows"])  # of compiled steps, all columns
        every = dict.fromkeys(key for row in listed for key in row)
        head = _COMPARISON if "ours" in every else list(every)
        rows = [[row.get(key, "") for key in head] for row in listed]
        notes = [f"- {note}" for note in matches["notes"]]
        parts += [f"## {path.stem}\n", origin(matches) + "\n", table(head, rows), ""]
        parts += [*notes, ""] if notes else []
    return "\n".join(parts).rstrip()


def remat() -> str:
    """Return the table of memory and time by policy."""
    rows = []
    for policy, retained in _STORED.items():
        memory, time = (compared("remat-cpu", f"{policy}: {what}") for what in ("memory", "time"))
        relative = f"{time['ours'] / time['theirs']:.2f}"
        rows.append([f"`{policy}`", retained, f"{memory['ours']:.0f}", relative])
    return table(["policy", "kept of each block", "memory, MB", "time"], rows)


def pipeline_memory() -> str:
    """Return the table of temporary memory by number of microbatches and schedule."""
    counts = (8, 16, 32, 64)
    cases = [f"memory of 1f1b, {n} microbatches" for n in counts]
    ours = ["1f1b", *(compared("pipeline-cpu", case, "gpipe")["ours"] for case in cases)]
    peers = [
        [peer, *(compared("pipeline-cpu", case, peer)["theirs"] for case in cases)]
        for peer in ("gpipe", "differentiated")
    ]
    return table(["microbatches", *counts], [ours, *peers])


def pipeline_seconds() -> str:
    """Return the table of pipelined update times against data parallelism and theory."""
    peers = ("data-parallel", "data-parallel x (M + N - 1) / M")
    rows = []
    for where in ("virtual devices: 4 stages", "two processes: 2 stages"):
        for count in (8, 32):
            case = f"{where}, {count} microbatches"
            matches = [compared("pipeline-cpu", case, peer) for peer in peers]
            rows.append([case, matches[0]["ours"], *(row["theirs"] for row in matches)])
    return table(["", "pipelined", "data-parallel", "x (M + N - 1) / M"], rows)


def pipeline_tpu() -> str:
    """Return the table of memory, cycles and exposed communication on v5e."""
    names = {
        "GB of memory": "memory",
        "M cycles": "cycles",
        "GB sent synchronously": "GB sent alone",
    }
    matches: dict[str, dict[str, list[str]]] = {}
    for row in result("pipeline-tpu")["rows"]:
        mesh, count = re.fullmatch(r"(.*), (\d+) microbatches", row["case"]).groups()
        if what := names.get(row["unit"]):
            each = int(count) if what == "cycles" else 1
            cells = matches.setdefault(mesh, {name: [] for name in names.values()})[what]
            cells.append(", ".join(shown(row[who] / each) for who in ("ours", "theirs")))
    rows = [
        [mesh, what, *cells, *[""] * (4 - len(cells))]
        for mesh, by in matches.items()
        for what, cells in by.items()
    ]
    return table(["mesh", "M", 8, 16, 32, 64], rows)


def kernels_attention() -> str:
    """Return the table of attention times."""
    rows = [row for row in result("kernels-cpu")["rows"] if row["unit"] == "ms"]
    cells = [
        [r["case"].removeprefix("attention, "), r["ours"], r["theirs"], r["ratio"]] for r in rows
    ]
    return table(["", "`blockwise`, ms", "`reference`, ms", "ratio"], cells)


def kernels_loss() -> str:
    """Return the table of memory of the loss by vocabulary."""
    rows: dict[str, list[str]] = {}
    for row in result("kernels-cpu")["rows"]:
        if match := re.fullmatch(r"loss of a vocabulary of ([\d,]+), .*", row["case"]):
            cells = rows.setdefault(match[1], [f"{row['theirs']:,.1f} MiB"])
            cells.append(f"{row['ours']:,.1f} MiB")
    head = ["vocabulary", "autodiff", "at once", "512 tokens at a time", "8192 entries at a time"]
    return table(head, ([vocab, *cells] for vocab, cells in rows.items()))


def gpu_meshes() -> str:
    """Return the table of memory and compile time by mesh and config on H100s."""
    head = ["case", "GPUs", "peak memory, GB", "of the device, %", "compiled in, s"]
    return _notes_and_table(result("gpu_aot-h100"), head)


def experts() -> str:
    """Return the table of plans of mixtures of experts and recurrent mixers."""
    matches = result("experts_aot-none")
    return _notes_and_table(matches, list(matches["rows"][0]))


def _notes_and_table(matches: Mapping[str, Any], head: list[str]) -> str:
    """Return the origin, the notes and some columns of results."""
    rows = [[row[name] for name in head] for row in matches["rows"]]
    notes = [f"- {note}" for note in matches["notes"]]
    return "\n".join([origin(matches), "", *notes, "", table(head, rows)])


def drill() -> str:
    """Return the table of faults and their outcomes; kinds "name: variant" share a row."""
    recorded = record.read()
    faults = list(record.counted(recorded).values())
    groups: dict[str, list[record.Fault]] = {}
    for fault in sorted(faults, key=lambda fault: (fault.kind.lower(), fault.number)):
        groups.setdefault(fault.kind.partition(":")[0], []).append(fault)
    rows = []
    for name, group in groups.items():
        compared = [fault.identical for fault in group if fault.identical is not None]
        codes = collections.Counter(code for fault in group for code in fault.codes)
        expected = dict.fromkeys(fault.expected for fault in group)
        rows.append([
            name, len({fault.kind for fault in group}), len(group), _codes(codes),
            f"{sum(compared)} of {len(compared)}", "; ".join(expected),
        ])  # fmt: skip
    failed = collections.Counter(fault.kind for fault in recorded if fault.failure)
    mended = ", ".join(f"{kind} ({count})" for kind, count in sorted(failed.items()))
    dates = sorted({fault.date for fault in faults})
    versions = sorted({shown(fault.versions) for fault in faults})
    notes = [
        f"{len(faults)} faults of {len({fault.kind for fault in faults})} kinds, "
        f"{sum(fault.torn for fault in faults)} left a half-written checkpoint",
        f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}; {' or '.join(versions)}",
        f"failures, after which the kind was mended and repeated from its first fault: "
        f"{mended or 'none'}",
    ]  # fmt: skip
    head = ["fault", "kinds", "times", "exit codes", "bit-identical", "what must hold"]
    return "\n".join([*(f"- {note}" for note in notes), "", table(head, rows)])


def growth() -> str:
    """Return the table of costs by size, with the fitted exponents."""
    matches = result("growth-cpu")
    rows = [
        [row["case"], " · ".join(row["sizes"]), row["unit"],
         " · ".join(map(shown, row["costs"])), f"{row['exponent']:.2f}"]
        for row in matches["rows"]
    ]  # fmt: skip
    head = ["size", "sizes", "cost", "by size", "exponent"]
    return f"{origin(matches)}\n\n{table(head, rows)}"


def published() -> str:
    """Return a table of estimated and published speeds."""
    return _whole("plan-none")


def scaling() -> str:
    """Return the table of planned configs for clusters."""
    return _whole("scaling-none")


def context() -> str:
    """Return the table of planned long sequences."""
    return _whole("context-none")


def kempnerforge() -> str:
    """Return the table of KempnerForge's planned configs."""
    return _whole("kempnerforge_plans-none")


def cost() -> str:
    """Return the table of what the loop and its safeguards cost per update."""
    return _notes_and_table(result("fault_cost-cpu"), list(result("fault_cost-cpu")["rows"][0]))


def precision() -> str:
    """Return the table of the quickstart by precision."""
    return _whole("precision-cpu")


def precision_kept() -> str:
    """Return the table of the quickstart by storage format."""
    return _whole("precision_kept-cpu")


def storage() -> str:
    """Return the table of memory of a step by storage format and machine."""
    return "\n\n".join(_whole(f"kept-{chip}") for chip in ("v5e", "h100"))


def mup_coordinates() -> str:
    """Return the table of mean |x| by width, with and without muP."""
    return _whole("mup-cpu")


def mup_rates() -> str:
    """Return the table of losses by learning rate and width, with and without muP."""
    return _whole("mup_rates-cpu")


def speedrun() -> str:
    """Return the table of what each trick of the speed run gains."""
    matches = result("speedrun-cpu")
    rows = [[row["case"], f"{row['theirs']:.3f}", f"{row['theirs'] - row['ours']:+.3f}"]
            for row in matches["rows"]]  # fmt: skip
    record = f"- loss of the record: {matches['rows'][0]['ours']:.3f}"
    notes = [record, *(f"- {note}" for note in matches["notes"])]
    return "\n".join(
        [origin(matches), "", *notes, "", table(["trick", "without it", "gained"], rows)]
    )


def optimizers() -> str:
    """Return table, notes and pictures of optimizers at their best learning rates, by platform."""
    parts = []
    for name in measured("optimizers"):
        parts += [_whole(name), *(f"- {note}" for note in result(name)["notes"])]
        parts += [f"![]({picture})" for picture in (f"{name}-curves.svg", f"{name}-rates.svg")]
    return "\n\n".join(parts)


def diloco() -> str:
    """Return table, notes and picture of groups that train apart."""
    name = "diloco-cpu"
    notes = (f"- {note}" for note in result(name)["notes"])
    return "\n\n".join([_whole(name), *notes, f"![]({name}.svg)"])


def diloco_link() -> str:
    """Return the table of groups behind a slow link."""
    measured_now = result("diloco_link-cpu")
    rows = measured_now["rows"]
    lines = [["synchronous", f"{rows[0]['theirs']:.1f}", "1"]]
    lines += [[row["case"], f"{row['ours']:.2f}", f"{row['ratio']:.1f}"] for row in rows]
    head = ["case", "seconds of an update", "times as fast"]
    notes = (f"- {note}" for note in measured_now["notes"])
    return "\n\n".join([origin(measured_now), table(head, lines), *notes])


def measured(benchmark: str) -> list[str]:
    """Return the names of a benchmark's results on all platforms, GPUs before CPUs."""
    return sorted((path.stem for path in RESULTS.glob(f"{benchmark}-*.json")), reverse=True)


def _whole(name: str) -> str:
    matches = result(name)
    head = list(dict.fromkeys(key for row in matches["rows"] for key in row))
    rows = [[row.get(key, "-") for key in head] for row in matches["rows"]]
    return f"{origin(matches)}\n\n{table(head, rows)}"


def _codes(codes: Mapping[int, int]) -> str:
    if len(codes) == 1:
        return str(next(iter(codes)))
    return ", ".join(f"{code} ({codes[code]})" for code in sorted(codes))


TABLES: Mapping[str, Callable[[], str]] = {
    "everything": everything,
    "remat": remat,
    "pipeline-memory": pipeline_memory,
    "pipeline-seconds": pipeline_seconds,
    "pipeline-tpu": pipeline_tpu,
    "kernels-attention": kernels_attention,
    "kernels-loss": kernels_loss,
    "gpu-meshes": gpu_meshes,
    "experts": experts,
    "plan": published,
    "scaling": scaling,
    "growth": growth,
    "context": context,
    "kempnerforge": kempnerforge,
    "drill": drill,
    "cost": cost,
    "precision": precision,
    "precision-kept": precision_kept,
    "kept": storage,
    "mup-coordinates": mup_coordinates,
    "mup-rates": mup_rates,
    "optimizers": optimizers,
    "diloco": diloco,
    "diloco-link": diloco_link,
    "speedrun": speedrun,
}
"""What a page may name."""
SHOWN = {"remat-cpu", "pipeline-cpu", "pipeline-tpu", "kernels-cpu", "gpu_aot-h100",
         "experts_aot-none", "plan-none", "scaling-none", "kempnerforge_plans-none",
         "precision-cpu", "precision_kept-cpu", "kept-v5e", "kept-h100",
         "mup-cpu", "mup_rates-cpu", "growth-cpu", "speedrun-cpu", "fault_cost-cpu",
         "diloco-cpu", "diloco_link-cpu",
         *measured("optimizers")}  # fmt: skip
"""Results with tables of their own."""


def pictures() -> dict[str, str]:
    """Return file name -> SVG of the curves of optimizers, and of groups that train apart."""
    from pictures import picture  # requires NumPy, which the tables do not

    name = "diloco-cpu"
    # Before the second evaluation, the scale hides the differences.
    late = {case: points[1:] for case, points in result(name)["curves"].items()}
    drawn = {f"{name}.svg": picture({"validation loss": late}, "tokens", log_x=False, log_y=False)}
    for name in measured("optimizers"):
        content = result(name)
        curves, rates = ({"loss": content[key]} for key in ("curves", "rates"))
        drawn[f"{name}-curves.svg"] = picture(curves, "tokens", log_x=False, log_y=False)
        drawn[f"{name}-rates.svg"] = picture(rates, "learning rate", log_y=False)
    return drawn


def with_figures(text: str) -> str:
    """Return a page with its tables filled in."""
    return _BLOCK.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}\n{match[3]}", text)


def write() -> None:
    """Update all pages and the pictures of results."""
    for name, content in pictures().items():
        (DOCS / name).write_text(content)
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text()
        if (new := with_figures(text)) != text:
            page.write_text(new)
            print(f"figures written to {page}")


if __name__ == "__main__":
    write()
