"""`benchmarks/gpu.py` and `tpu.py`: a failed or hanging check does not affect the others."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.machine import PATIENCE

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
ROWS = "[dataclasses.asdict(results.Claim('a', 1))]"
WRITES = f"""
import dataclasses, json, os, pathlib, sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import results
where = pathlib.Path(os.environ["JAXFORGE_RESULTS"])
where.mkdir(parents=True)
content = {{"name": "a", "rows": {ROWS}, "notes": ["n"]}}
(where / "a-gpu.json").write_text(json.dumps(content))
"""


def load(name, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    path = BENCHMARKS / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{name}_of_benchmarks", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def gpu(monkeypatch):
    return load("device_checks", monkeypatch)


def python(code):
    return ["-c", code]


def test_one_that_fails_or_hangs_costs_the_others_nothing(gpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAXFORGE_RESULTS", str(tmp_path / "results"))
    child = tmp_path / "child"
    hangs = (
        "import subprocess, sys, time, pathlib\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(10**6)'])\n"
        f"pathlib.Path({str(child)!r}).write_text(str(child.pid))\n"
        "print('so far', flush=True)\n"
        "time.sleep(10**6)"
    )
    every = [
        gpu.Check("fails", python("print('before'); raise ValueError('no such thing')"), PATIENCE),
        gpu.Check("hangs", python(hangs), 3),
        gpu.Check("dies", python("import os; os.abort()"), PATIENCE),
        gpu.Check("passes", python(WRITES), PATIENCE),
        gpu.Check("passes too", python(WRITES), PATIENCE),
    ]
    saved = []

    def save(ended):
        saved.append(len(ended))
        gpu.save_all(tmp_path / "checks", {"kind": "A GPU", "platform": "gpu"}, ended)

    ended = gpu.run_checks(every, PATIENCE, tmp_path / "checks", save)

    assert [item.ended for item in ended] == [
        "failed with exit code 1", "stopped after 3 s", f"failed with exit code {-signal.SIGABRT}",
        "passed", "passed",
    ]  # fmt: skip
    assert saved == [1, 2, 3, 4, 5]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(every)
    assert lines[0].endswith("fails: failed with exit code 1: ValueError: no such thing")
    assert lines[3].endswith("passes: passed: a: 1")
    assert not child.exists() or not is_running(int(child.read_text()))

    checks = json.loads((tmp_path / "results" / "checks-gpu.json").read_text())
    assert checks["device"] == "A GPU"
    assert [row["ended"] for row in checks["rows"]] == [item.ended for item in ended]
    assert "before" in checks["said"]["fails"]
    assert checks["said"]["hangs"] in ("so far", "")  # a busy machine may not have begun
    both = json.loads((tmp_path / "results" / "a-gpu.json").read_text())
    assert (len(both["rows"]), both["notes"]) == (2, ["n"])


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # one that nobody has looked at yet


def test_no_check_begins_when_time_is_up(gpu, tmp_path):
    ended = gpu.run_checks([gpu.Check("a", python(""), PATIENCE)], 0, tmp_path, lambda _: None)
    assert [item.ended for item in ended] == ["left out: no time"]
    assert not ended[0].passed


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_every_check_is_a_script_that_is_there_and_has_its_options(platform, monkeypatch):
    module = load(platform, monkeypatch)
    for check in [*module.checks(True), *module.checks(False)]:
        files = [word for word in check.command if word.endswith(".py")]
        assert all(Path(file).is_file() for file in files)
    names = [check.name for check in module.checks(True)]
    assert len(set(names)) == len(names)
    assert names[0] == {"gpu": "step: Qwen3-30B-A3B", "tpu": "device_train: resume"}[platform]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(10))
def test_first_checks_of_a_gpu_pass_in_miniature(number, gpu, monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    check = load("gpu", monkeypatch).checks(False)[number]
    ended = gpu.run_check(check._replace(command=gpu._miniature(check.command)), 600, tmp_path)
    assert ended.passed, f"{check.name}: {ended.said}"
    (result,) = gpu.read(tmp_path)
    assert result["rows"]


@pytest.mark.parametrize("platform", ["gpu", pytest.param("tpu", marks=pytest.mark.slow)])
def test_missing_device_is_reported(platform):
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{platform}.py")],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        text=True, capture_output=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert f"no {platform.upper()}: JAX has cpu (cpu)" in done.stderr
    assert done.stdout.startswith("missing: ")


def test_missing_packages_are_named(gpu, monkeypatch):
    monkeypatch.setattr(gpu, "NEEDS", ("json", "nowhere", "nowhere.inside"))
    device = gpu.Accelerator("gpu", "cuda", ("jax_cuda13_plugin",), lambda _: [])
    assert gpu.missing(device, on_cpu=True) == ["nowhere", "nowhere.inside"]
    there = gpu.missing(device, on_cpu=False)
    assert there == ["nowhere", "nowhere.inside", "jax_cuda13_plugin"]
