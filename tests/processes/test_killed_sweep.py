"""`kill -9` of a sweep: its run saves and ends, and the same command finishes what is left."""

import json
import subprocess
import sys

import pytest

from tests.machine import PATIENCE, wait_until
from tests.processes.conftest import BASE, ROOT, environment

STEPS = 300  # far more than pass while the sweep is being killed


@pytest.mark.slow
def test_killed_sweep_goes_on(tmp_path):
    config, runs = tmp_path / "base.toml", tmp_path / "runs"
    config.write_text(BASE)
    command = [
        sys.executable, "-m", "jaxforge", "sweep", "--config", str(config), "--devices=1",
        "--grid", "train.seed=1,2", f"--checkpoint.dir={runs}", "--checkpoint.interval=150",
        f"--train.max_steps={STEPS}", "--scheduler.decay_steps=8",
        f"--train.compilation_cache_dir={tmp_path / 'cache'}",
    ]  # fmt: skip
    env, first = environment(), runs / "seed=1"
    with (tmp_path / "said").open("w") as said:
        sweep = subprocess.Popen(command, cwd=ROOT, env=env, stdout=said, stderr=said)
    wait_until(lambda: len(steps(first)) > 1, sweep)
    sweep.kill()
    sweep.wait()
    assert not (first / "finished.json").exists()
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[1/2] seed=1: resumes" in done.stdout
    for run in (first, runs / "seed=2"):
        assert steps(run) == list(range(1, STEPS + 1))
        assert (run / "finished.json").exists()
    assert "resuming from step" in (first / "logs" / "process_0.log").read_text()


def steps(run):
    path = run / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []  # the last may be torn
    return [line["step"] for line in map(json.loads, lines) if "train/loss" in line]
