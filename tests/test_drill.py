"""Record of the fault drill: several runs contribute to its rows."""

import importlib
import json
import sys

import pytest


@pytest.fixture
def drill(monkeypatch, tmp_path):
    """Return a function that runs the drill with two kinds, and the recorded rows by kind."""
    monkeypatch.setattr(sys, "path", [*sys.path])  # benchmarks add their directory
    main = importlib.import_module("benchmarks.faults.__main__")
    results = tmp_path / "results"
    monkeypatch.setenv("JAXFORGE_RESULTS", str(results))
    monkeypatch.setenv(main._INSIDE, "no")
    monkeypatch.setattr(main, "can_make_networks", lambda: False)
    names = []

    def scenario(case):
        names.append(case.name)
        case.codes.append(75)
        case.identical = True

    kinds = (main.Kind("kill", 3, scenario, "resumes"), main.Kind("full disk", 1, scenario, "says"))
    monkeypatch.setattr(main, "KINDS", kinds)

    def run(*options, version="1"):
        names.clear()
        packages = {"jax": version}
        monkeypatch.setattr(main.record, "versions", lambda: packages)
        arguments = ["drill", "--jobs=1", f"--directory={tmp_path / 'work'}", *options]
        monkeypatch.setattr(sys, "argv", arguments)
        assert main.main() == 0
        path = results / "faults-cpu.json"
        rows = json.loads(path.read_text())["rows"] if path.exists() else []
        return list(names), {row["kind"]: row for row in rows}

    return run


def test_complete_drill_replaces_rows_of_its_kinds(drill):
    assert drill("--quick") == (["kill 0", "full disk 0"], {})
    names, rows = drill()
    assert sorted(names) == ["full disk 0", "kill 0", "kill 1", "kill 2"]
    assert rows["kill"]["codes"] == {"75": 3}
    _, again = drill("--only=full", version="2")
    assert again["kill"] == rows["kill"]
    assert again["full disk"]["versions"] == {"jax": "2"}
    assert list(again) == ["kill", "full disk"]


def test_part_of_drill_continues_counts_of_same_versions(drill):
    names, rows = drill("--quick", "--minutes=1")
    assert rows == {}
    drill("--only=full", version="1")
    names, rows = drill("--minutes=1e-9")
    assert names == []
    assert list(rows) == ["full disk"]
    names, rows = drill("--minutes=1")
    assert names == ["kill 0", "kill 1", "kill 2"]
    assert [(row["count"], row["identical"]) for row in rows.values()] == [(3, 3), (1, 1)]
    assert drill("--minutes=1")[0] == []
    names, rows = drill("--minutes=1", version="2")
    assert len(names) == 4
    assert rows["kill"]["count"] == 3


def test_part_of_drill_continues_with_next_fault_number(drill, monkeypatch):
    main = sys.modules["benchmarks.faults.__main__"]
    kill, _ = main.KINDS
    monkeypatch.setattr(main, "KINDS", (kill._replace(count=1),))
    drill("--minutes=1")
    monkeypatch.setattr(main, "KINDS", (kill,))
    names, rows = drill("--minutes=1")
    assert names == ["kill 1", "kill 2"]
    assert rows["kill"]["codes"] == {"75": 3}
