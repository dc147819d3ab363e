"""Record of the fault drill, to which several drills contribute."""

import importlib
import sys

import pytest

from jaxforge.config.reading.load import load_config


@pytest.fixture
def drill(monkeypatch, tmp_path):
    """Return a function that runs the drill with two kinds and returns the names of its faults."""
    monkeypatch.setattr(sys, "path", [*sys.path])  # benchmarks add their directory
    main = importlib.import_module("benchmarks.faults.__main__")
    monkeypatch.setenv("JAXFORGE_RESULTS", str(tmp_path / "results"))
    monkeypatch.setenv(main._INSIDE, "no")
    monkeypatch.setattr(main, "can_make_networks", lambda: False)
    names = []

    def run(*options, version="1", counts=(3, 1), broken=()):
        def scenario(case):
            names.append(case.name)
            case.codes.append(75)
            case.identical = True
            if case.name in broken:
                raise main.Broken("another curve")

        kinds = (main.Kind("kill", counts[0], scenario, "resumes"),
                 main.Kind("full disk", counts[1], scenario, "says"))  # fmt: skip
        names.clear()
        monkeypatch.setattr(main, "KINDS", kinds)
        monkeypatch.setattr(main.record, "versions", lambda: {"jax": version})
        arguments = ["drill", "--jobs=1", f"--directory={tmp_path / 'work'}", *options]
        monkeypatch.setattr(sys, "argv", arguments)
        assert main.main() == bool(broken)
        return sorted(names)

    return run


def counted():
    """Return the numbers of the faults that count, by kind."""
    record = importlib.import_module("benchmarks.faults.record")
    faults = record.counted(record.read())
    return {kind: sorted(n for name, n in faults if name == kind) for kind, _ in faults}


def test_drill_continues_its_record(drill):
    assert drill("--quick") == ["full disk 0", "kill 0"]
    assert counted() == {}
    assert drill("--only=full") == ["full disk 0"]
    assert drill("--minutes=1e-9") == []
    assert drill("--minutes=1", counts=(2, 1)) == ["kill 0", "kill 1"]
    assert drill() == ["kill 2"]
    assert drill() == []
    assert counted() == {"full disk": [0], "kill": [0, 1, 2]}


def test_drill_repeats_faults_of_other_versions(drill):
    drill()
    assert drill("--only=full", version="2") == ["full disk 0"]
    assert drill(version="2") == ["kill 0", "kill 1", "kill 2"]
    assert drill("--again", "--only=full", version="2") == ["full disk 0"]
    assert counted() == {"full disk": [0], "kill": [0, 1, 2]}


def test_failure_annuls_earlier_faults_of_its_kind(drill):
    drill(broken=("kill 1",))
    assert counted() == {"full disk": [0], "kill": [2]}
    assert drill() == ["kill 0", "kill 1"]
    record = importlib.import_module("benchmarks.faults.record")
    [failed] = [fault for fault in record.read() if fault.failure]
    assert (failed.kind, failed.number, failed.failure) == ("kill", 1, "another curve")
    assert (failed.codes, failed.identical) == ((75,), True)


def test_settings_of_jobs_are_valid(monkeypatch, tmp_path):
    """No settings of a job are unknown, of a wrong type, or in contradiction to others."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    case = importlib.import_module("benchmarks.faults.case")
    job_kinds = importlib.import_module("benchmarks.faults.job_kinds")
    jobs = [job for job in vars(job_kinds).values() if isinstance(job, job_kinds.JobSettings)]
    assert len({job.name for job in jobs}) == len(jobs) > 10
    for job in jobs:
        run = case.Run(tmp_path / job.name / "run", tmp_path, tmp_path / "tokens")
        run.job = job.settings
        _, _, _, _, path, *overrides = run._command(["jaxforge.train"], [])
        assert "{tokens}" not in " ".join(overrides)
        load_config(path, overrides)
