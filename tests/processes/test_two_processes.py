"""Two real processes over loopback, joined by jax.distributed, are one run."""

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest

from tests.processes.conftest import ROOT, environment
from tests.processes.launching import check_account, finish_both, free_port, start_both
from tests.tasks import core_bundle
from torch_compat.formats.ocdbt import open_arrays

pytestmark = pytest.mark.usefixtures("one_device")

OVERRIDES = ["--train.max_steps=20", "--checkpoint.interval=10"]
WATCH = ["--train.nccl_health_check_interval=1", "--metrics.straggler_report_interval=1",
         "--train.check_weight_hash_across_dp_replicas_interval=1"]  # fmt: skip


MESHES = [
    (2, ["--distributed.dp_shard=2", "--metrics.max_attention_logit_interval=1"], "dp_shard 2"),
    pytest.param(  # two processes have a sequence
        4, ["--distributed.dp_shard=2", "--distributed.cp=2", "--distributed.cp_strategy=ring"],
        "dp_shard 2 x cp 2", marks=pytest.mark.slow,
    ),
    pytest.param(
        2, ["--distributed.pp=2", "--train.grad_accum_steps=2"], "pp 2", marks=pytest.mark.slow
    ),
]  # fmt: skip


@pytest.mark.parametrize(("count", "mesh", "named"), MESHES)
def test_number_of_processes_does_not_change_the_run(new_run, count, mesh, named):
    """Some, and one that goes on from their checkpoint.

    The first end because their time is up, and capture activations. Where a process is alone, it
    has one program.
    """
    alone, run = new_run("alone"), new_run("handed_on")
    np.save(alone.directory.with_name("held_out.npy"), np.arange(3 * 33, dtype=np.uint16))
    capture = [f"--eval.dataset_path={alone.directory.parent}", "--eval.activations_interval=1",
               "--eval.activations_sequences=2", "--train.verify_interval=1"]  # fmt: skip
    alone.finish_here(*OVERRIDES, *capture)
    limit = "--train.exit_duration_in_mins=0.001"
    port = free_port()
    metrics = f"--metrics.prometheus_port={port}"
    started = start_both(
        run, *OVERRIDES, *mesh, *capture, *WATCH, limit, metrics, torchrun=True, count=count
    )
    outputs = finish_both(started, code=75)
    check_all_say_that_their_time_is_up(run, outputs)
    check_both_capture_the_same(run, alone)
    check_account(run, count, [75])
    for index, output in enumerate(outputs):  # processes of one host have ports of their own
        assert f"http://0.0.0.0:{port + index}/metrics" in output
    assert named in outputs[0]
    assert "[step 1]" in outputs[0]
    assert not any("[step 1]" in output for output in outputs[1:])
    assert "Weight hashes match after 0 iterations" in outputs[0]
    assert "milliseconds for matrix products, min/median/max of" in outputs[0]
    run.finish_here(*OVERRIDES)
    losses = [list(item.losses().values()) for item in (run, alone)]
    np.testing.assert_allclose(*losses, rtol=2e-6)


@pytest.mark.slow  # quick: training/test_branches.py and checkpoint/test_saved_ema.py
def test_branch_of_two_processes_starts_an_average(new_run):
    parent, alone, both = (new_run(name) for name in ("parent", "alone", "both"))
    parent.finish_here("--train.max_steps=4")
    settings = ["--train.max_steps=8", "--train.ema_decay=0.8",
                f"--branch-from={parent.directory}@latest"]  # fmt: skip
    alone.finish_here(*settings)
    outputs = finish_both(start_both(both, *settings, "--distributed.dp_shard=2"))
    assert "has no average of the parameters: train.ema_decay starts it" in outputs[0]
    states = [
        open_arrays(run.directory / "checkpoints" / "step_8" / "state") for run in (alone, both)
    ]
    names = [name for name in states[0] if name.startswith("ema.")]
    assert names
    for name in names:
        expected, result = (state[name].all() for state in states)
        np.testing.assert_allclose(result, expected, atol=2e-5, err_msg=name)
        assert (expected != states[0][name.replace("ema.", "params.", 1)].all()).any()


def test_processes_that_differ_are_refused_on_each(new_run):
    other = ["--optimizer.lr=1e-4", "--checkpoint.interval=7"]
    started = start_both(new_run(), "--distributed.dp_shard=2", of_last=other)
    for output in finish_both(started, code=2):
        line = r"checkpoint\.interval differs .*: 5 on process 0 \(.+\); 7 on process 1 \(.+\)\n"
        assert re.search(line, output), output
        assert "optimizer.lr differs between the processes of this job: 0.003 on" in output
        assert "[step 1]" not in output


def check_both_capture_the_same(run, alone):
    """After step 1; of several processes, by the first of them alone."""
    of_both = [item.directory / "activations" / "step_1" for item in (run, alone)]
    captured = {path.name for path in of_both[0].parent.iterdir()}
    assert captured == {f"step_{step}" for step in range(1, run.steps()[-1] + 1)}
    assert (
        np.load(of_both[0] / "tokens.npy").tolist() == np.arange(66).reshape(2, -1)[:, :-1].tolist()
    )
    residuals = [np.load(item / "residual.npy") for item in of_both]
    np.testing.assert_allclose(*residuals, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("agents", [1, 2])
def test_torchrun_starts_the_processes_of_a_job(new_run, agents):
    """The agent of torchrun holds MASTER_PORT itself."""
    run = new_run()
    job = [f"--nnodes={agents}", f"--nproc_per_node={2 // agents}", "--rdzv_backend=c10d",
           f"--rdzv_endpoint=127.0.0.1:{free_port()}", "--local_addr=127.0.0.1"]  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", *(job if agents > 1 else
               ["--standalone", "--nproc_per_node=2"]), *run.command(*OVERRIDES)[1:]]  # fmt: skip
    processes = [
        subprocess.Popen(
            command, cwd=ROOT, env=environment(), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for _ in range(agents)
    ]  # fmt: skip
    output = "".join(finish_both(processes))
    assert "2 process(es)" in output
    assert run.steps() == [10, 20]


def check_all_say_that_their_time_is_up(run, outputs):
    assert 0 < run.steps()[-1] < 20
    for index in range(len(outputs)):
        log = (run.directory / "logs" / f"process_{index}.log").read_text()
        assert re.search(r"\[exiting program after [\d.]+ minutes\]", log), outputs


@pytest.mark.slow  # one process: test_exits.py; messages of several: checkpoint/test_job_saves.py
def test_full_disk_of_one_process_ends_both_with_its_host_and_path(new_run):
    """Orbax alone would have both wait for each other, twice for ten minutes."""
    run = new_run()
    started = start_both(run, "--distributed.dp_shard=2", "--train.max_steps=10")
    limit = 30_000  # bytes of a file, less than its part of the arrays
    resource.prlimit(started[1].pid, resource.RLIMIT_FSIZE, (limit, limit))
    where = re.escape(f"{run.directory}/checkpoints (process 1 on {socket.gethostname()}: ")
    for output in finish_both(started, code=74):
        (error,) = re.findall("^error: .*", output, re.MULTILINE)
        assert re.search(rf"could not be written to {where}.*process_1/.*: File too large", error)
    assert run.steps() == []


REQUESTS = """
import jax
import jaxforge as jf

class Requests(jf.Callback):
    calls = 0

    def on_step_end(self, context):
        self.calls += 1
        if jax.process_index() == 1 and context.step == 4:
            context.control.request_evaluation()
        if jax.process_index() == 1 and context.step == 13:
            raise SystemExit(9)

    def state_dict(self):
        return {"calls": self.calls}
"""


@pytest.mark.slow  # one process: callbacks/test_control.py; agreement of both: the next test
def test_requests_of_one_process_take_effect_on_both_after_same_step(new_run, tmp_path):
    run = new_run()
    (tmp_path / "requests_of_one.py").write_text(REQUESTS)
    np.save(tmp_path / "held_out.npy", np.arange(9 * 33, dtype=np.uint16) % 256)
    sets = ["--eval.enabled=true", f"--eval.dataset_path={tmp_path}", "--eval.functions=accuracy",
            "--eval.interval=1000", "--checkpoint.interval=1000",
            "--plugins.callbacks=requests_of_one.Requests"]  # fmt: skip
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    started = start_both(run, "--distributed.dp_shard=2", *sets, env={"PYTHONPATH": path})
    finish_both(started, code=9)
    evaluated = [line for line in run.lines() if "eval/loss" in line]
    assert [line["step"] for line in evaluated] == [10]
    assert 0 <= evaluated[0]["eval/accuracy"] <= 1
    assert run.steps() == [20]
    progress = run.directory / "checkpoints" / "step_20" / "progress" / "metadata"
    states = json.loads(progress.read_text())["callbacks"]
    assert states == {"requests_of_one.Requests": {"calls": 20}}


EXPERTS = ["--model.n_layers=1", "--model.num_experts=4", "--model.moe_router=sigmoid_topk"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axis", "model"), [("dp_shard", []), pytest.param("ep", EXPERTS, marks=pytest.mark.slow)]
)
def test_signal_to_one_stops_both_at_the_same_step(new_run, axis, model):
    """One process goes on from the checkpoint. With `ep`, each process has its own experts."""
    alone, run = new_run("alone"), new_run("stopped")
    overrides = ["--checkpoint.interval=100000", *model]
    mesh = [f"--distributed.{axis}=2", "--train.max_steps=100000"]
    processes = start_both(run, *overrides, *mesh)
    run.wait_for_step(10, processes[0])
    processes[1].send_signal(signal.SIGTERM)  # jax.distributed watches it too
    outputs = finish_both(processes, code=75)
    assert f"{axis} 2" in outputs[0]
    (step,) = run.steps()
    for item in (run, alone):
        item.finish_here(*overrides, f"--train.max_steps={step + 2}")
    losses = [list(item.losses().values()) for item in (run, alone)]
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.slow  # quick: tasks/test_tasks_in_runs.py and tasks/test_core.py
@pytest.mark.parametrize("mesh", [["--distributed.dp_shard=2"], ["--distributed.tp=2"]], ids=str)
def test_tasks_of_two_processes_equal_those_of_one(new_run, tmp_path, mesh):
    """The first start stops within an evaluation, or between two steps, because time is up."""
    bundle = core_bundle.write_bundle(tmp_path / "bundle", n=20, labels=["copa", "jeopardy"])
    settings = ["--train.max_steps=4", "--eval.enabled=true", "--eval.interval=2",
                f"--eval.tasks_core={bundle}", "--eval.tasks_batch_size=2",
                "--data.tokenizer_path=byte", "--model.vocab_size=264"]  # fmt: skip
    alone, both = new_run("alone"), new_run("both")
    alone.finish_here(*settings)
    limit = "--train.exit_duration_in_mins=0.001"
    finish_both(start_both(both, *settings, *mesh, limit), code=75)
    finish_both(start_both(both, *settings, *mesh))
    logged = [tasks_of(run) for run in (alone, both)]
    assert len(logged[0]) == 2 * 2 * 3
    assert logged[1] == pytest.approx(logged[0])


def tasks_of(run):
    rows = map(json.loads, (run.directory / "metrics.jsonl").read_text().splitlines())
    values = [(f"{row['step']} {key}", value) for row in rows for key, value in row.items()
              if key.startswith("eval/tasks/")]  # fmt: skip
    assert len(dict(values)) == len(values), "a task was logged twice"
    return dict(values)
