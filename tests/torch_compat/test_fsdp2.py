"""Runs that move between real FSDP2 jobs and jaxforge in the middle of training."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxforge.commands import train
from tests.helpers import cli
from tests.machine import PATIENCE
from tests.processes.conftest import ROOT
from tests.processes.launching import free_port

pytest.importorskip("torch")
pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("two_devices")]

MODEL = {"dim": 48, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 101,
         "ffn_hidden_dim": 80}  # fmt: skip
ROWS, SEQ, WARMUP, TOTAL = 12, 32, 4, 60
TOLERANCE = 1e-4  # relative: fp32, other kernels, up to 60 steps

CONFIG = f"""
[model]
KEYS
max_seq_len = {SEQ}
[train]
global_batch_size = {ROWS}
seq_len = {SEQ}
max_steps = {TOTAL}
mixed_precision = "fp32"
[optimizer]
lr = 3e-3
[scheduler]
warmup_steps = {WARMUP}
[data]
dataset_path = "DATA"
order = "torch"
[metrics]
log_interval = 1
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Learnable tokens; an epoch is 41 steps."""
    directory = tmp_path_factory.mktemp("tokens")
    rng = np.random.default_rng(0)
    steps = rng.integers(0, 4, 500 * (SEQ + 1)).cumsum() % MODEL["vocab_size"]
    np.save(directory / "tokens.npy", steps.astype(np.uint16))
    return directory


@pytest.fixture(scope="module")
def config(data, tmp_path_factory):
    return config_of(MODEL, data, tmp_path_factory.mktemp("config") / "run.toml")


def config_of(model, data, path):
    keys = "\n".join(f"{key} = {json.dumps(value)}" for key, value in model.items())
    path.write_text(CONFIG.replace("DATA", str(data)).replace("KEYS", keys))
    return path


def torch_job(tmp_path, data, ranks, steps, load=None, saves=(), flat=False, model=MODEL):
    """Return losses and gradient norms of a torch job with this many processes."""
    name = f"torch{ranks}-{steps}-{flat}"
    out = tmp_path / f"{name}.out.json"
    settings = {
        "model": model, "tokens": str(data / "tokens.npy"), "rows": ROWS, "seq_len": SEQ,
        "warmup": WARMUP, "total": TOTAL, "steps": steps, "flat": flat,
        "load": load and str(load), "saves": [(str(path), flat) for path, flat in saves],
        "out": str(out),
    }  # fmt: skip
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(settings))
    script = Path(__file__).with_name("torch_job.py")
    command = [sys.executable, str(script), str(path), str(ranks), str(free_port())]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return np.array(json.loads(out.read_text()))


def jaxforge(config, run_directory, steps, *, load=None, interval=1000):
    """Return losses and gradient norms of a run on two devices up to a step."""
    command = ["--config", str(config),
               f"--checkpoint.dir={run_directory}", f"--train.max_steps={steps}",
               f"--checkpoint.interval={interval}",
               f"--scheduler.decay_steps={TOTAL - WARMUP}"]  # fmt: skip
    if load:
        command.append(f"--checkpoint.load_path={load}")
    assert train.main(command) == 0
    lines = (run_directory / "metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line) for line in lines if "train/loss" in line]
    return np.array([[e["step"], e["train/loss"], e["train/grad_norm"]] for e in logged])


def compat(*arguments):
    assert cli([*map(str, arguments)]) == 0


@pytest.fixture(scope="module")
def jax_run(config, tmp_path_factory):
    """A run of 20 steps with a checkpoint of step 10, and its last ten steps."""
    directory = tmp_path_factory.mktemp("jax")
    return directory, jaxforge(config, directory, 20, interval=10)[10:]


@pytest.fixture(scope="module")
def torch_run(data, tmp_path_factory):
    """60 steps of an uninterrupted job, and its nested and flat checkpoints."""
    directory = tmp_path_factory.mktemp("torch")
    nested, flat = directory / "nested", directory / "flat"
    saves = [(nested / "step_20", False), (flat / "step_10", True)]
    return torch_job(directory, data, 2, 60, saves=saves), nested, flat


@pytest.mark.slow  # the round trip below covers all but the flat layout
def test_fsdp2_resumes_jaxforge_export(jax_run, data, tmp_path):
    run, expected = jax_run
    # `--ranks`: KempnerForge's position is in batches per rank.
    compat("convert", run / "checkpoints/step_10", tmp_path / "dcp", "--to=dcp", "--layout=flat",
           "--ranks=2")  # fmt: skip
    source = tmp_path / "dcp" / "latest"
    continued = torch_job(tmp_path, data, 2, 10, load=source, flat=True)
    np.testing.assert_array_equal(continued[:, 0], expected[:, 0])
    np.testing.assert_allclose(continued[:, 1:], expected[:, 1:], rtol=TOLERANCE)


def test_round_trip_through_jaxforge_matches_torch_run(config, data, torch_run, tmp_path):
    expected, nested, _ = torch_run
    compat("convert", "--to=jaxforge", nested, tmp_path / "run", f"--config={config}")
    middle = jaxforge(config, tmp_path / "run", 40)
    compat("convert", tmp_path / "run", tmp_path / "back", "--to=dcp", "--ranks=3")
    last = torch_job(tmp_path, data, 3, 20, load=tmp_path / "back" / "latest")
    steps = np.concatenate([middle, last])
    np.testing.assert_array_equal(steps[:, 0], expected[20:, 0])
    np.testing.assert_allclose(steps[:, 1:], expected[20:, 1:], rtol=TOLERANCE)


def test_load_path_resumes_torch_run_on_mesh(config, torch_run, tmp_path):
    expected, _, flat = torch_run
    resumed = jaxforge(config, tmp_path / "run", 20, load=flat / "step_10")
    np.testing.assert_array_equal(resumed[:, 0], expected[10:20, 0])
    np.testing.assert_allclose(resumed[:, 1:], expected[10:20, 1:], rtol=TOLERANCE)


# Other kinds of experts are tested in test_expert_checkpoints.py.
MIXTURE = {
    **MODEL, "num_experts": 4, "moe_top_k": 2, "moe_expert_dim": 32, "moe_router": "sigmoid_topk",
    "moe_packed_experts": True, "feed_forward_pattern": ("dense", "experts"),
    "moe_shared_experts": 1, "n_layers": 3,
}  # fmt: skip
QUIET = {"moe_aux_loss_weight": 0.0, "moe_bias_update_rate": 0.0}  # cross-entropy moves the bias


@pytest.mark.slow
def test_expert_run_round_trip_matches_torch_run(data, tmp_path):
    config = config_of({**MIXTURE, **QUIET}, data, tmp_path / "run.toml")
    job = functools.partial(torch_job, tmp_path, data, model=MIXTURE)
    expected = job(2, 30, saves=[(tmp_path / "torch" / "step_10", False)])
    compat("convert", "--to=jaxforge", tmp_path / "torch", tmp_path / "run", f"--config={config}")
    middle = jaxforge(config, tmp_path / "run", 20)
    compat("convert", tmp_path / "run", tmp_path / "back", "--to=dcp", "--ranks=3")
    last = job(3, 10, load=tmp_path / "back" / "latest")
    steps = np.concatenate([middle, last])
    np.testing.assert_array_equal(steps[:, 0], expected[10:, 0])
    np.testing.assert_allclose(steps[:, 1:], expected[10:, 1:], rtol=TOLERANCE)
