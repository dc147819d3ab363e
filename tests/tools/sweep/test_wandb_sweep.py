"""The W&B sweep file yields valid command lines of `train` with separate directories."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

from jaxforge.commands import train

ROOT = Path(__file__).parents[3]
SWEEP = yaml.safe_load((ROOT / "examples" / "wandb_sweep.yaml").read_text())


def of_agent(values):
    """Return the command of W&B's agent for a point (`wandb_agent.Agent._command_run`)."""
    args = {name: {"value": value} for name, value in values.items()}
    flags = create_sweep_command_args({"args": args})["args"]
    known = {"${env}": ["/usr/bin/env"], "${args}": flags}
    command = create_sweep_command(copy.deepcopy(SWEEP["command"]))
    return [part for item in command for part in known.get(item, [item])]


@pytest.fixture
def argv(tmp_path):
    """Return the arguments of `jaxforge` in a run of W&B."""
    stub = tmp_path / "jaxforge"
    stub.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    stub.chmod(0o755)

    def argv(run_id, values):
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "WANDB_RUN_ID": run_id}
        process = subprocess.run(of_agent(values), env=environment, text=True, check=True,
                              stdout=subprocess.PIPE).stdout  # fmt: skip
        return json.loads(process)

    return argv


def test_wandb_run_has_its_values_and_directory(argv, monkeypatch):
    monkeypatch.chdir(ROOT)
    for run_id, lr in (("abc123", 0.00051), ("def456", 1e-05)):
        values = {
            "optimizer.lr": lr, "scheduler.warmup_steps": 20, "data.pack_sequences": False,
            "data.file_pattern": "a b*.npy", "model.n_kv_heads": None,
        }  # fmt: skip
        command, *remaining = argv(run_id, values)
        assert command == "train"
        config = train.parse_command_line(remaining).known
        assert (config.optimizer.lr, config.scheduler.warmup_steps) == (lr, 20)
        assert (config.data.pack_sequences, config.data.file_pattern) == (False, "a b*.npy")
        assert config.model.n_kv_heads is None
        assert config.checkpoint.dir == f"runs/sweep/{run_id}"
        assert config.metrics.required_writer("wandb").run_id == run_id


def test_wandb_sweep_parameters_and_metric_exist(argv, monkeypatch):
    monkeypatch.chdir(ROOT)
    values = {name: p["values"][0] if "values" in p else p["min"]
              for name, p in SWEEP["parameters"].items()}  # fmt: skip
    config = train.parse_command_line(argv("a", values)[1:]).known
    assert SWEEP["metric"]["name"] in config.eval.metric_names()
    assert config.eval.enabled
