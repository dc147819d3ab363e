"""Two real processes over loopback, joined by jax.distributed, are one run."""

import re
import signal
import socket

import numpy as np
import pytest

from tests.machine import PATIENCE

pytestmark = pytest.mark.usefixtures("one_device")

OVERRIDES = ["--train.max_steps=20", "--checkpoint.interval=10"]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start_both(run, *overrides, devices=1, torchrun=False, count=2):
    port = free_port()
    processes = []
    for index in range(count):
        if torchrun:
            env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count),
                   "RANK": str(index)}  # fmt: skip
        else:
            env = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(count),
                   "JAX_PROCESS_ID": str(index)}  # fmt: skip
        processes.append(run.start(*overrides, devices=devices, **env))
    return processes


def finish_both(processes, code=0):
    outputs = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    assert {p.returncode for p in processes} == {code}, "\n=====\n".join(outputs)
    return outputs


SHARED = ["--distributed.cp=2", "--distributed.cp_strategy=ring"]  # two processes have a sequence


@pytest.mark.parametrize(
    ("count", "mesh"), [(2, []), pytest.param(4, SHARED, marks=pytest.mark.dear)]
)
def test_it_does_not_matter_how_many_processes_begin_go_on_and_end(new_run, count, mesh):
    """Some, two that are stages, and one: each goes on from the others' checkpoint.

    The first capture activations at their end. The stages end because their time is up. Where a
    process is alone, it has one program.
    """
    alone, run = new_run("alone"), new_run("handed_on")
    np.save(alone.directory.with_name("held_out.npy"), np.arange(3 * 33, dtype=np.uint16))
    capture = [f"--eval.dataset_path={alone.directory.parent}", "--eval.activations_interval=5",
               "--eval.activations_sequences=2"]  # fmt: skip
    alone.finish_here(*OVERRIDES, *capture)
    mesh = ["--distributed.dp_shard=2", *mesh, "--train.max_steps=5"]
    outputs = finish_both(start_both(run, *OVERRIDES, *mesh, *capture, count=count))
    check_both_capture_the_same(run, alone)
    assert ("dp_shard 2 x cp 2" if count == 4 else "dp_shard 2") in outputs[0]
    assert "[step 5]" in outputs[0]
    assert not any("[step 5]" in output for output in outputs[1:])
    assert run.steps() == [5]
    stages = ["--distributed.pp=2", "--train.grad_accum_steps=2"]
    limit = "--train.exit_duration_in_mins=0.001"
    both = start_both(run, *OVERRIDES, *stages, limit, torchrun=True)
    outputs = finish_both(both, code=75)
    assert "pp 2" in outputs[0]
    check_both_say_that_their_time_is_up(run, outputs)
    run.finish_here(*OVERRIDES)
    losses = [list(one.losses().values()) for one in (run, alone)]
    np.testing.assert_allclose(*losses, rtol=2e-6)


def check_both_capture_the_same(run, alone):
    """After step 5; of several processes, by the first of them alone."""
    of_both = [one.directory / "activations" / "step_5" for one in (run, alone)]
    assert [path.name for path in of_both[0].parent.iterdir()] == ["step_5"]
    assert (
        np.load(of_both[0] / "tokens.npy").tolist() == np.arange(66).reshape(2, -1)[:, :-1].tolist()
    )
    residuals = [np.load(one / "residual.npy") for one in of_both]
    np.testing.assert_allclose(*residuals, rtol=1e-4, atol=1e-6)


def check_both_say_that_their_time_is_up(run, outputs):
    assert 5 < run.steps()[-1] < 20
    for index in (0, 1):
        log = (run.directory / "logs" / f"process_{index}.log").read_text()
        assert re.search(r"\[exiting program after [\d.]+ minutes\]", log), outputs


@pytest.mark.dear
def test_a_signal_to_one_stops_both_at_the_same_step(new_run):
    """Each has experts of its own; what they saved, one process goes on from."""
    alone, run = new_run("alone"), new_run("stopped")
    overrides = ["--checkpoint.interval=100000", "--model.num_experts=4",
                 "--model.moe_router=sigmoid_topk"]  # fmt: skip
    mesh = ["--distributed.ep=2", "--train.max_steps=100000"]
    processes = start_both(run, *overrides, *mesh)
    run.wait_for_step(10, processes[0])
    processes[1].send_signal(signal.SIGTERM)  # jax.distributed watches it too
    outputs = finish_both(processes, code=75)
    assert "ep 2" in outputs[0]
    (step,) = run.steps()
    for one in (run, alone):
        one.finish_here(*overrides, f"--train.max_steps={step + 2}")
    losses = [list(one.losses().values()) for one in (run, alone)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
