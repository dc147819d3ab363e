"""Plans for target hardware; `make test-gpu-compiler` installs the compiler for GPUs."""

import json
import subprocess
import sys

import pytest

from jaxforge.parallel import targets
from tests.machine import PATIENCE
from tests.processes.conftest import ROOT, environment

MODEL = """
[model]
dim = 512
n_layers = 4
n_heads = 4
vocab_size = 4096
max_seq_len = 512
[train]
batch_size = 1
seq_len = 512
max_steps = 1000
[scheduler]
warmup_steps = 10
"""
needs_gpu = pytest.mark.skipif(
    not targets.has_gpu_compiler(), reason="needs XLA's compiler for GPUs: pip install .[cuda]"
)
needs_tpu = pytest.mark.skipif(
    not targets.has_tpu_compiler(), reason="needs XLA's compiler for TPUs: pip install .[tpu]"
)


def planned(tmp_path, topology, *overrides, code=0):
    path = tmp_path / "run.toml"
    path.write_text(MODEL)
    done = subprocess.run(
        [sys.executable, "-m", "jaxforge.plan", f"--config={path}", f"--topology={topology}",
         f"--checkpoint.dir={tmp_path}", "--json", *overrides],
        cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def check(report, devices):
    step, memory = report["step"], report["memory_per_device"]
    assert report["fits"]
    assert 0 < step["mfu"] < 1
    assert step["tokens"] == devices * 512
    assert step["seconds"] == pytest.approx(
        sum(step["seconds_by_kind"].values()) + step["waited_seconds"]
    )
    assert step["seconds_by_kind"]["products"] > 0
    assert step["seconds_by_kind"]["attention"] > 0
    parts = sum(v for k, v in memory.items() if k not in ("peak_bytes", "capacity_bytes"))
    assert memory["peak_bytes"] <= parts * 1.01
    assert any(item["axes"] == ["dp_shard"] for item in report["collectives"])


@needs_gpu
@pytest.mark.parametrize("topology", ["h100:1x8", "h200:2x4", "b200:1x8", "gb200:1x8", "gb300:2x4"])
def test_plan_for_gpus_is_consistent(tmp_path, topology):
    check(planned(tmp_path, topology), 8)


@needs_tpu
@pytest.mark.parametrize("topology", ["v5e:2x4", "v6e:2x4", "v5p:2x2x2", "tpu7x:2x2x1"])
def test_plan_for_tpus_is_consistent(tmp_path, topology):
    check(planned(tmp_path, topology, "--model.n_heads=4"), 8)


@needs_tpu
def test_oversized_model_reports_peak_on_tpu(tmp_path):
    large = ["--model.dim=8192", "--model.n_layers=16", "--model.n_heads=64"]
    report = planned(tmp_path, "v5e:2x2", *large, code=2)
    memory = report["memory_per_device"]
    assert not report["fits"]
    assert memory["peak_bytes"] > memory["capacity_bytes"]
    assert report["advice"]


@pytest.mark.skipif(targets.has_gpu_compiler(), reason="the compiler is here")
def test_missing_compiler_is_named(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(MODEL)
    done = subprocess.run(
        [sys.executable, "-m", "jaxforge.plan", f"--config={path}", "--topology=h100:1x8"],
        cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 2
    assert "plan-gpu" in done.stderr
