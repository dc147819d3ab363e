"""The tables in docs/ are those of benchmarks/results/, and no ratio is below its floor."""

import importlib
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.faults import record
from benchmarks.faults.kinds import KINDS

ROOT = Path(__file__).parents[1]
FIGURES = runpy.run_path(str(ROOT / "benchmarks" / "figures.py"))
FLOORS = runpy.run_path(str(ROOT / "benchmarks" / "floors.py"))
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
NAMED = re.compile(r"<!-- figures: ([\w-]+) -->\n")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_are_those_of_the_results(page):
    text = page.read_text()
    assert text == FIGURES["with_figures"](text), "run `python benchmarks/figures.py`"
    assert text.count("<!-- figures: ") == text.count("<!-- end of figures -->")


def test_pictures_are_those_of_the_results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for name, content in FIGURES["pictures"]().items():
        drawn = (ROOT / "docs" / name).read_text()
        assert drawn == content, "run `python benchmarks/figures.py`"


def test_every_table_and_with_them_every_result_is_on_a_page():
    named = [name for page in PAGES for name in NAMED.findall(page.read_text())]
    assert sorted(named) == sorted(FIGURES["TABLES"])
    results = {path.stem for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    assert FIGURES["SHOWN"] <= results
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert all(f"## {name}\n" in page for name in results - FIGURES["SHOWN"])


def test_stale_figure_is_found():
    page = (ROOT / "docs" / "remat.md").read_text()
    memory = f"{FIGURES['compared']('remat-cpu', 'full: memory')['ours']:.0f}"
    stale = page.replace(f"| {memory} |", "| 1 |")
    assert stale != page
    assert FIGURES["with_figures"](stale) == page


def test_front_page_figures_match_the_drill():
    faults = record.counted(record.read())
    page = (ROOT / "README.md").read_text()
    recorded, n_recorded = re.search(r"record has\s+([\d,]+) faults of (\d+) kinds", page).groups()
    [compared] = re.findall(r"([\d,]+) broken runs compared", page)
    [n_kinds] = re.findall(r"breaks short runs in over (\d+) ways", page)
    assert f"{len(faults):,}" == recorded == compared
    assert len({kind for kind, _ in faults}) == int(n_recorded)
    assert 0 < len(KINDS) - int(n_kinds) < 10


def test_record_names_kinds_of_the_drill():
    counts = {kind.name: kind.count for kind in KINDS}
    complete = f"{sum(counts.values()):,} faults of {len(counts)} kinds"
    assert complete in (ROOT / "docs" / "reliability.md").read_text()
    assert all(number < counts[kind] for kind, number in record.counted(record.read()))


def test_front_page_figures_match_the_compiled_steps():
    page = (ROOT / "README.md").read_text()
    for case in ("Llama 2 7B, v5e 4x4, full remat", "Llama 3 8B, v6e 4x4, full remat"):
        line = next(row for row in page.splitlines() if f"{case[:10]}, 16" in row)
        assert "without collectives and attention kernels" in line
        programs = [row for row in FIGURES["result"]("aot-tpu")["programs"] if row["case"] == case]
        assert {"plain JAX", "MaxText 0.2.5"} < {row["program"] for row in programs}
        for row in programs:
            if row["program"] != "jaxforge, compute":
                assert f"{row['M cycles']:,.0f}M" in line
                assert f"{row['GB sent synchronously']:.3g} GB" in line
            if "7B" in case and "s, simulated" in row:
                assert f"{row['s, simulated']:.2f} s" in line


@pytest.mark.processes
def test_drill_starts_as_its_page_says():
    module = re.search(
        r"`python -m (\S+)` breaks short runs", (ROOT / "docs" / "reliability.md").read_text()
    )[1]
    started = subprocess.run(
        [sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert started.returncode == 0, started.stderr


def test_no_published_ratio_is_below_its_floor():
    every = FLOORS["read_floors"]()
    assert every.keys() <= {path.stem for path in RESULTS}
    for path in RESULTS:
        result = json.loads(path.read_text())
        claims = [row for row in result["rows"] if FLOORS["is_claim"](row)]
        floors = FLOORS["floors_for"](every, path.stem, result["machine"])
        # A floor for each comparison with another program, and for nothing else.
        assert {FLOORS["row_key"](row) for row in claims} == set(floors), path.stem
        assert FLOORS["below_floor"](floors, claims) == []


def test_floor_of_the_most_exact_machine_judges_each_row():
    floors = {"step-cpu": {"x86_64": {"5M | tokens/s | torch": 2.0}, "x86_64 amx": {
        "5M | tokens/s | torch": 0.75, "40M | tokens/s | torch": 0.5}}}  # fmt: skip
    row = {"case": "5M", "unit": "tokens/s", "peer": "torch", "ratio": 0.7}
    of_amx = FLOORS["floors_for"](floors, "step-cpu", "x86_64 GenuineIntel amx, 2 cores, load 3")
    assert FLOORS["below_floor"](of_amx, [row]) == [
        "5M | tokens/s | torch: ratio 0.7 is below its floor of 0.75",
        "40M | tokens/s | torch: not measured",
    ]
    assert FLOORS["below_floor"](of_amx, [{**row, "ratio": 0.76}], complete=False) == []
    above = [{**row, "ratio": 0.76}, {**row, "case": "40M", "ratio": 0.5}]
    assert FLOORS["below_floor"](of_amx, above) == []
    assert FLOORS["floors_for"](floors, "step-cpu", "aarch64, 2 cores, load 1") == {}


def test_benchmark_below_a_floor_or_limit_publishes_nothing(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    results = importlib.import_module("results")
    monkeypatch.delenv(results.ELSEWHERE, raising=False)
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(results, "show_in_docs", lambda: None)
    floors = {"a-cpu": {results._machine().split()[0]: {"1B | ms | torch": 2.0}}}
    monkeypatch.setattr(results.floors, "read_floors", lambda: floors)

    def report(torch, plain):
        rows = [results.Row("1B", 1.0, "torch", torch, "ms", smaller_is_better=True),
                results.Row("1B", 1.0, "linear", plain, "ms", smaller_is_better=True)]  # fmt: skip
        results.report("a", rows, (), device="cpu", limits={"linear": 0.5})

    for values in ((1.9, 1.0), (2.1, 0.4)):
        with pytest.raises(SystemExit, match="is below its floor"):
            report(*values)
    assert list(tmp_path.iterdir()) == []
    report(2.1, 1.0)
    assert (tmp_path / "a-cpu.json").is_file()


def test_make_bench_fails_if_a_benchmark_fails(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / ".dev").touch()
    fails, runs, ran = tmp_path / "fails.py", tmp_path / "runs.py", tmp_path / "ran"
    fails.write_text("raise SystemExit('below its floor')")
    runs.write_text(f"open({str(ran)!r}, 'w')")
    command = ["make", "bench", f"VENV={tmp_path}", f"BENCHMARKS={fails} {runs}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert f"failed: {fails}" in done.stdout
    assert ran.exists()


def test_make_bench_runs_nothing_that_needs_an_accelerator():
    shown = subprocess.run(["make", "-n", "bench"], cwd=ROOT, capture_output=True, text=True).stdout
    run = set(re.findall(r"benchmarks/(\w+)\.py", shown))
    assert {"step", "growth", "mixers"} < run
    assert run.isdisjoint({"aot", "gpu", "tpu", "gpu_flags", "device_train", "results", "twins"})
