"""Comparison of the processes of a job: reported differences, and settings that may differ."""

import re

import pytest

from jaxforge.config.reading.load import load_unresolved
from jaxforge.errors import StorageError, UserError
from jaxforge.parallel import agreement
from jaxforge.parallel.agreement import check, differences
from jaxforge.runs import starts

FILE = """
[optimizer]
lr = 3e-4
[train]
max_steps = "2ep"
"""


@pytest.fixture
def facts(tmp_path):
    """Return a function from overrides of `FILE` to the facts of a start."""
    path = tmp_path / "run.toml"
    path.write_text(FILE)
    return lambda *settings: starts.facts_of_start(load_unresolved(path, settings))


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        (
            "--optimizer.lr=1e-3",
            "optimizer.lr differs between the processes of this job: 0.0003",
        ),
        (
            "--train.seed=7",
            r"train.seed differs .*: 42 on process 0 \(a\); 7 on process 1 \(b\)",
        ),
        ("--train.grad_clip_norm=0.5", "train.grad_clip_norm differs"),
        ("--data.dataset_path=/elsewhere", 'data.dataset_path differs .*: "" on .*"/elsewhere" on'),
        ("--checkpoint.interval=7", "checkpoint.interval differs .*: 1000 on .*; 7 on"),
        ("--checkpoint.interval=10%", 'checkpoint.interval differs .*: 1000 on .*; "10%" on'),
        ("--train.max_steps=3ep", 'train.max_steps differs .*: "2ep" on .*; "3ep" on'),
        ("--model.n_layers=2", "model.n_layers differs"),
        ('--plugins.modules=["json"]', "code of json .* differs .*: null on"),
    ],
)
def test_differing_setting_is_reported_with_values_and_hosts(facts, setting, line):
    result = differences([("a", facts()), ("b", facts(setting))])
    assert re.search(line, result)
    assert result.endswith("start all processes with the same command, config, code and data")


def test_differing_versions_code_and_environment_are_reported(facts, monkeypatch):
    original = facts()
    monkeypatch.setattr("jaxforge.runs.starts.version", lambda name: "0.0.1")
    monkeypatch.setattr("jaxforge.runs.starts.source_hash", lambda location: "1234")
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    lines = differences([("a", original), ("b", facts())]).splitlines()
    for name in ("version of jaxlib", "version of numpy", "version of grain", "code of jaxforge",
                 "JAX_ENABLE_X64"):  # fmt: skip
        assert any(line.startswith(name) for line in lines), name


@pytest.mark.parametrize(
    "setting",
    [
        "--train.compilation_cache_dir=/fast",
        "--train.executable=/fast/step",
        "--checkpoint.non_persistent_dir=/fast",
        "--checkpoint.replica_dir=/memory",
        "--profiling.enable=true",
        "--profiling.trace_dir=/fast",
    ],
)
def test_host_specific_paths_are_not_compared(facts, setting):
    assert facts() == facts(setting)


def test_differences_abbreviate_many_processes():
    processes = [(f"host{i}", {"x": int(i == 6), "y": 0}) for i in range(9)]
    assert differences(processes).splitlines()[0] == (
        "x differs between the processes of this job: 0 on processes 0 (host0), 1 (host1), "
        "2 (host2), 3 (host3) and 4 more; 1 on process 6 (host6)"
    )


def test_differences_abbreviate_many_facts():
    processes = [("a", {f"k{i}": 0 for i in range(14)}), ("b", {f"k{i}": 1 for i in range(14)})]
    lines = differences(processes).splitlines()
    assert [line.split()[0] for line in lines[:10]] == [f"k{i}" for i in range(10)]
    assert lines[10] == "and 4 more differ"


def test_check_passes_for_single_process(monkeypatch):
    monkeypatch.setattr("jax.experimental.multihost_utils.process_allgather", pytest.fail)
    check({"x": 1})


@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("error", [UserError("in üse"), StorageError("full")])
def test_error_of_process_0_is_raised_on_all(monkeypatch, process, error):
    monkeypatch.setattr("jax.process_count", lambda: 2)
    monkeypatch.setattr("jax.process_index", lambda: process)
    monkeypatch.setattr("jax.distributed.shutdown", lambda: None)
    report = f"{type(error).__name__} {error}"
    monkeypatch.setattr(agreement, "gather", lambda text: [report, ""])
    calls = []

    def fail():
        calls.append(process)
        raise error

    with pytest.raises(type(error), match=str(error)):
        agreement.call_on_first(fail)
    assert calls == [0] * (process == 0)
