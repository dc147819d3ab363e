"""A run with every sink, stopped and resumed by the command."""

import re
import shutil
import types

import numpy as np
import pytest

from jaxforge.storage.requests import Traffic
from jaxforge.telemetry.measures import (
    ROUTER_OUTPUTS,
    StepCost,
    aux_metrics,
    epoch_summary,
    memory,
    moe_metrics,
)
from tests.processes.conftest import ROOT, Run
from tests.telemetry.readers import events, wandb_history, wandb_records
from tests.telemetry.traces import steps_in

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("one_device")]

ALL = [
    "--metrics.log_interval=5", "--profiling.enable", "--profiling.start_step=11",
    "--profiling.end_step=15",
    "--metrics.collect=['params_norm','update_norm','num_zeros_in_grad']",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of 12 steps that loses its last checkpoint and resumes from step 10 to 16."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        run = Run(tmp_path_factory.mktemp("sinks"), "run")
        run.finish_here(*ALL, writers("ours"), "--train.max_steps=12")
        shutil.rmtree(run.directory / "checkpoints" / "step_12")
        run.finish_here(*ALL, writers(""), "--train.max_steps=16")
    return run


def writers(run_id):
    wandb = {"name": "wandb", "interval": 3, "run_id": run_id}
    return f"--metrics.writers={[{'name': 'tensorboard', 'interval': 4}, wandb]}"


def test_sinks_have_steps_of_their_interval(run):
    assert list(run.losses()) == [1, 5, 10, 15, 16]
    assert [step for step, _ in points(run)] == [1, 4, 8, 12, 12, 16]
    assert [
        [step for step, row in wandb_history(records).items() if "train/loss" in row]
        for records in starts(run)
    ] == [[1, 3, 6, 9, 12], [12, 15, 16]]


def test_sinks_receive_durations_of_saves(run):
    assert [x["step"] for x in run.lines() if "checkpoint/blocking_sec" in x] == [5, 10, 15, 16]
    *_, last = durable = [x for x in run.lines() if "checkpoint/save_sec" in x and x["step"] > 10]
    assert len(durable) == 2  # steps 15 and 16
    assert last["step"] == 16
    assert 0 < last["checkpoint/save_sec"] < 60
    row = wandb_history(starts(run)[1])[16]
    assert row["checkpoint/save_sec"] == last["checkpoint/save_sec"]


def test_sinks_have_equal_values(run):
    (line,) = [x for x in run.lines() if x["step"] == 16 and "train/loss" in x]
    _, tensorboard_steps = points(run)[-1]
    row = wandb_history(starts(run)[1])[16]
    for name in ("train/loss", "train/grad_norm", "train/lr", "smoothed/loss", "train/tokens"):
        assert tensorboard_steps[name] == pytest.approx(line[name])
        assert row[name] == line[name]
    assert tensorboard_steps.keys() == line.keys() - {"step", "time"}


def test_resume_continues_wandb_and_rewinds_tensorboard(run):
    ids = [r.run.run_id for records in starts(run) for r in records if r.HasField("run")]
    assert ids == ["ours", "ours"]  # repeated from the checkpoint
    codes = [r.exit.exit_code for records in starts(run) for r in records if r.HasField("exit")]
    assert codes == [0, 0]
    rewinds = [e for e in events(run.directory / "tb_logs") if e.HasField("session_log")]
    assert [e.step for e in rewinds] == [1, 11]


def test_trace_contains_steps_of_window(run):
    traces = (run.directory / "profiler_traces").glob("plugins/profile/*/*.xplane.pb")
    assert sorted(map(steps_in, traces)) == [[11, 12], [11, 12, 13, 14]]


def test_documentation_lists_every_metric(run):
    stats = dict.fromkeys(("bytes_in_use", "peak_bytes_in_use", "pool_bytes", "bytes_limit"), 1)
    device = types.SimpleNamespace(memory_stats=lambda: stats)
    logged = {name for line in run.lines() for name in line} - {"step", "time"}
    assert not any(name.startswith("bucket/") for name in logged)
    logged |= StepCost(1, peak_tflops=1.0).speed(1.0, 1).keys() | memory([device]).keys()
    logged |= epoch_summary(1, 1, 1.0, {"interval/loss": 1.0, "interval/skipped_steps": 0.0}).keys()
    logged |= {
        "train/epoch",
        "train/max_attention_logit",
        "train/mtp_loss",
        "distillation/kl",
    }  # not in this run
    logged |= {"smoothed/mfu", "train/rollbacks", "train/loss_scale"}
    logged |= Traffic(1, 1, 1, 1, 1).since(Traffic()).keys()
    logged |= {"local_checkpoint/blocking_sec", "local_checkpoint/save_sec"}
    logged |= {"replica/blocking_sec", "replica/save_sec", "replica/bytes"}
    logged |= aux_metrics({"logits": {"max_logit": 1.0, "clipped_heads": 1}}).keys()
    reported = {name: np.ones(1) for name in ROUTER_OUTPUTS} | {"expert_counts": np.ones((1, 2))}
    logged |= {name for name in moe_metrics(reported) if "/layers." not in name}
    table = (ROOT / "docs" / "metrics.md").read_text().partition("##")[0]
    logged = {name for name in logged if not re.fullmatch("goodput/(?!total).*_sec", name)}
    listed = set(re.findall(r"^\| `([a-z_/]+)` \|", table, re.MULTILINE))
    assert {name for name in listed if not name.startswith("eval/")} == logged


def points(run):
    """Return steps and values in TensorBoard."""
    result = [
        (e.step, {value.tag: value.simple_value for value in e.summary.value})
        for e in events(run.directory / "tb_logs")
    ]
    return [(step, values) for step, values in result if "train/loss" in values]


def starts(run):
    return [wandb_records(path) for path in sorted(run.directory.glob("wandb/offline-run-*"))]
