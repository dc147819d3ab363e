"""Two real processes over loopback, joined by jax.distributed, are one run."""

import re
import signal
import socket

import numpy as np
import pytest

from tests.machine import PATIENCE
from tests.processes.conftest import Run

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


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("alone"), "alone")
    run.finish(*OVERRIDES)
    return np.array([run.losses()[step] for step in range(1, 21)])


def test_begun_by_two_processes_ended_by_one(new_run, alone):
    run = new_run("both")
    mesh = ["--distributed.dp_replicate=2", "--distributed.tp=2"]
    outputs = finish_both(start_both(run, *OVERRIDES, *mesh, "--train.max_steps=10", devices=4))
    assert "[step 10]" in outputs[0]
    assert "[step 10]" not in outputs[1]
    assert run.steps() == [10]
    run.finish(*OVERRIDES)
    np.testing.assert_allclose(list(run.losses().values()), alone, rtol=2e-6)


def test_begun_by_one_process_ended_by_two(new_run, alone):
    run = new_run("taken_over")
    run.finish(*OVERRIDES, "--train.max_steps=10")
    finish_both(start_both(run, *OVERRIDES, torchrun=True))
    np.testing.assert_allclose(list(run.losses().values()), alone, rtol=2e-6)


def test_begun_by_four_processes_ended_by_two(new_run, alone):
    run = new_run("four")
    mesh = ["--distributed.dp_replicate=2", "--distributed.dp_shard=2"]
    finish_both(start_both(run, *OVERRIDES, *mesh, "--train.max_steps=10", count=4))
    finish_both(start_both(run, *OVERRIDES))
    np.testing.assert_allclose(list(run.losses().values()), alone, rtol=2e-6)


def test_stages_in_two_processes_and_then_none(new_run, alone):
    run = new_run("stages")
    stages = ["--distributed.pp=2", "--distributed.tp=2", "--train.grad_accum_steps=4"]
    outputs = finish_both(start_both(run, *OVERRIDES, *stages, "--train.max_steps=10", devices=2))
    assert "pp 2 x tp 2" in outputs[0]
    run.finish(*OVERRIDES)
    np.testing.assert_allclose(list(run.losses().values()), alone, rtol=2e-6)


def test_a_signal_to_one_stops_both_at_the_same_step(new_run):
    run = new_run("stopped")
    overrides = ["--train.max_steps=100000", "--checkpoint.interval=100000"]
    processes = start_both(run, *overrides)
    run.wait_for_step(10, processes[0])
    processes[1].send_signal(signal.SIGTERM)  # jax.distributed watches it too
    finish_both(processes, code=75)
    assert len(run.steps()) == 1


def test_both_say_that_their_time_is_up(new_run):
    run = new_run("limited")
    outputs = finish_both(start_both(run, "--train.exit_duration_in_mins=0.001"), code=75)
    assert len(run.steps()) == 1
    for index in (0, 1):
        log = (run.directory / "logs" / f"process_{index}.log").read_text()
        assert re.search(r"\[exiting program after [\d.]+ minutes\]", log), outputs
