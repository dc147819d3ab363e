"""Writes what docs/ show of `benchmarks/results/`: `python benchmarks/figures.py`.

A page names a table, and what stands between the two comments is never edited by hand:

    <!-- figures: remat -->
    <!-- end of figures -->

Every benchmark that writes its results does this too. A test holds the pages against the results.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS, DOCS = HERE / "results", HERE.parent / "docs"
_BLOCK = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- end of figures -->\n)", re.DOTALL)
_COMPARISON = ("case", "ours", "peer", "theirs", "unit", "ratio")
_STORED = {
    "none": "everything",
    "everything_saveable": "everything, by `jax.checkpoint`",
    "selective": "everything but the inside of attention",
    "dots_saveable": "results of all matrix products",
    "dots_with_no_batch_dims_saveable": "results of products with weights",
    "full": "its input",
    "nothing_saveable": "the same",
}  # of each block, by train.activation_checkpointing


def result(name: str) -> dict[str, Any]:
    """The content of `results/<name>.json`."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def compared(name: str, case: str, peer: str | None = None, unit: str | None = None) -> Any:  # noqa: ANN401
    """The one row of a comparison.

    Raises:
        ValueError: there is none, or several.
    """
    (row,) = (
        row
        for row in result(name)["rows"]
        if row["case"] == case and peer in (None, row["peer"]) and unit in (None, row["unit"])
    )
    return row


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(shown, line)) + " |" for line in lines)


def shown(value: Any) -> str:  # noqa: ANN401 (whatever a result holds)
    """A cell: three digits of a figure, all before its point."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {shown(each)}" for key, each in value.items())
    if not isinstance(value, int | float) or isinstance(value, bool):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def origin(matches: Mapping[str, Any]) -> str:
    """When and with what a result was measured."""
    versions = ", ".join(f"{package} {version}" for package, version in matches["versions"].items())
    return f"{matches['date']}, {matches['device']}; {matches['machine']}; {versions}."


def everything() -> str:
    """Each result that no other table shows: its origin, its rows, its notes."""
    parts = []
    for path in sorted(RESULTS.glob("*.json")):
        if path.stem in SHOWN:
            continue
        matches = result(path.stem)
        every = dict.fromkeys(key for row in matches["rows"] for key in row)
        head = _COMPARISON if "ours" in every else list(every)
        rows = [[row.get(key, "") for key in head] for row in matches["rows"]]
        notes = [f"- {note}" for note in matches["notes"]]
        parts += [f"## {path.stem}\n", origin(matches) + "\n", table(head, rows), ""]
        parts += [*notes, ""] if notes else []
    return "\n".join(parts).rstrip()


def remat() -> str:
    """Memory and time of each policy."""
    rows = []
    for policy, retained in _STORED.items():
        memory, time = (compared("remat-cpu", f"{policy}: {what}") for what in ("memory", "time"))
        relative = f"{time['ours'] / time['theirs']:.2f}"
        rows.append([f"`{policy}`", retained, f"{memory['ours']:.0f}", relative])
    return table(["policy", "kept of each block", "memory, MB", "time"], rows)


def pipeline_memory() -> str:
    """Temporary memory by microbatches, of the two schedules and of a differentiated pipeline."""
    counts = (8, 16, 32, 64)
    cases = [f"memory of 1f1b, {n} microbatches" for n in counts]
    ours = ["1f1b", *(compared("pipeline-cpu", case, "gpipe")["ours"] for case in cases)]
    peers = [
        [peer, *(compared("pipeline-cpu", case, peer)["theirs"] for case in cases)]
        for peer in ("gpipe", "differentiated")
    ]
    return table(["microbatches", *counts], [ours, *peers])


def pipeline_seconds() -> str:
    """Return the seconds of an update next to those of a data-parallel one, and to theory."""
    peers = ("data-parallel", "data-parallel x (M + N - 1) / M")
    rows = []
    for where in ("virtual devices: 4 stages", "two processes: 2 stages"):
        for count in (8, 32):
            case = f"{where}, {count} microbatches"
            matches = [compared("pipeline-cpu", case, peer) for peer in peers]
            rows.append([case, matches[0]["ours"], *(row["theirs"] for row in matches)])
    return table(["", "pipelined", "data-parallel", "x (M + N - 1) / M"], rows)


def pipeline_tpu() -> str:
    """Memory, cycles per microbatch and what travels alone, in a step compiled for v5e."""
    names = {"GB of memory": "memory", "M cycles": "cycles", "GB sent in them": "GB sent alone"}
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
    """Milliseconds of blockwise and reference attention."""
    rows = [row for row in result("kernels-cpu")["rows"] if row["unit"] == "ms"]
    cells = [
        [r["case"].removeprefix("attention, "), r["ours"], r["theirs"], r["ratio"]] for r in rows
    ]
    return table(["", "`blockwise`, ms", "`reference`, ms", "ratio"], cells)


def kernels_loss() -> str:
    """Memory of the loss by vocabulary."""
    rows: dict[str, list[str]] = {}
    for row in result("kernels-cpu")["rows"]:
        if match := re.fullmatch(r"loss of a vocabulary of ([\d,]+), .*", row["case"]):
            cells = rows.setdefault(match[1], [f"{row['theirs']:,.1f} MiB"])
            cells.append(f"{row['ours']:,.1f} MiB")
    head = ["vocabulary", "autodiff", "at once", "512 tokens at a time", "8192 entries at a time"]
    return table(head, ([vocab, *cells] for vocab, cells in rows.items()))


def gpu_meshes() -> str:
    """Memory and compile time of each mesh and config, compiled for H100s."""
    matches = result("gpu_aot-h100")
    head = ["case", "GPUs", "peak memory, GB", "of the device, %", "compiled in, s"]
    rows = [[row[name] for name in head] for row in matches["rows"]]
    return "\n".join([origin(matches), "", *(f"- {note}" for note in matches["notes"]), "",
                      table(head, rows)])  # fmt: skip


def experts_tpu() -> str:
    """Memory, cycles and collectives of mixtures of experts, compiled for TPU slices."""
    matches = result("experts_aot-tpu")
    head = list(matches["rows"][0])
    rows = [[row[name] for name in head] for row in matches["rows"]]
    return "\n".join([origin(matches), "", *(f"- {note}" for note in matches["notes"]), "",
                      table(head, rows)])  # fmt: skip


def drill() -> str:
    """Every kind of fault, and what it came to."""
    matches = result("faults-cpu")
    rows = [
        [row["kind"], row["count"], _codes(row["codes"]),
         f"{row['identical']} of {row['compared']}", row["expected"]]
        for row in matches["rows"]
    ]  # fmt: skip
    head = ["fault", "times", "exit codes", "bit-identical", "what must hold"]
    failed = [failure for row in matches["rows"] for failure in row["failures"]]
    notes = [
        f"- {note}" for note in (*matches["notes"], f"what did not hold: {failed or 'nothing'}")
    ]
    return "\n".join([origin(matches), "", *notes, "", table(head, rows)])


def published() -> str:
    """Return a table of estimated and published speeds."""
    return _whole("plan-none")


def scaling() -> str:
    """Configs for clusters, planned."""
    return _whole("scaling-none")


def context() -> str:
    """Long sequences, planned."""
    return _whole("context-none")


def kempnerforge() -> str:
    """KempnerForge's files, planned."""
    return _whole("kempnerforge_plans-none")


def precision() -> str:
    """The quickstart in every precision."""
    return _whole("precision-cpu")


def precision_kept() -> str:
    """The quickstart with all that parameters and moments may be kept in."""
    return _whole("precision_kept-cpu")


def storage() -> str:
    """A step by what its state is kept in, on each of the machines."""
    return "\n\n".join(_whole(f"kept-{chip}") for chip in ("v5e", "h100"))


def mup_coordinates() -> str:
    """Mean |x| by width, with muP and without."""
    return _whole("mup-cpu")


def mup_rates() -> str:
    """Loss by learning rate of two widths, with muP and without."""
    return _whole("mup_rates-cpu")


def poison() -> str:
    """At which place replay names planted documents."""
    matches = result("poison-cpu")
    return f"{_whole('poison-cpu')}\n\n" + "\n".join(f"- {note}" for note in matches["notes"])


def _whole(name: str) -> str:
    matches = result(name)
    head = list(dict.fromkeys(key for row in matches["rows"] for key in row))
    rows = [[row.get(key, "-") for key in head] for row in matches["rows"]]
    return f"{origin(matches)}\n\n{table(head, rows)}"


def _codes(codes: Mapping[str, int]) -> str:
    if len(codes) == 1:
        return next(iter(codes))
    return ", ".join(f"{code} ({codes[code]})" for code in sorted(codes, key=int))


TABLES: Mapping[str, Callable[[], str]] = {
    "everything": everything,
    "remat": remat,
    "pipeline-memory": pipeline_memory,
    "pipeline-seconds": pipeline_seconds,
    "pipeline-tpu": pipeline_tpu,
    "kernels-attention": kernels_attention,
    "kernels-loss": kernels_loss,
    "gpu-meshes": gpu_meshes,
    "experts-tpu": experts_tpu,
    "plan": published,
    "scaling": scaling,
    "context": context,
    "kempnerforge": kempnerforge,
    "drill": drill,
    "precision": precision,
    "precision-kept": precision_kept,
    "kept": storage,
    "mup-coordinates": mup_coordinates,
    "mup-rates": mup_rates,
    "poison": poison,
}
"""What a page may name."""
SHOWN = {"remat-cpu", "pipeline-cpu", "pipeline-tpu", "kernels-cpu", "faults-cpu", "gpu_aot-h100",
         "experts_aot-tpu", "plan-none", "scaling-none", "kempnerforge_plans-none",
         "precision-cpu", "precision_kept-cpu", "kept-v5e", "kept-h100",
         "mup-cpu", "mup_rates-cpu", "poison-cpu"}  # fmt: skip
"""Results with tables of their own."""


def with_figures(text: str) -> str:
    """A page with the tables that it names."""
    return _BLOCK.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}\n{match[3]}", text)


def write() -> None:
    """Brings all pages up to date."""
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text()
        if (new := with_figures(text)) != text:
            page.write_text(new)
            print(f"figures written to {page}")


if __name__ == "__main__":
    write()
