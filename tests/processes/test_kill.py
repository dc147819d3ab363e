"""`kill -9` at random moments: the run that is started again is the run undisturbed."""

import contextlib
import functools
import json
import os
import random
import signal
import time

import pytest

from jaxforge.runs import attempts
from tests.machine import wait_until
from tests.processes.launching import check_account, finish_both, start_both

pytestmark = pytest.mark.usefixtures("one_device")

KILLS, STEPS = 2, 60
OVERRIDES = [f"--train.max_steps={STEPS}", "--checkpoint.interval=3", "--data.num_workers=2"]


def test_killed_at_random_moments(new_run):
    """Half of the kills anywhere, half while a checkpoint is half written: it is stopped there."""
    undisturbed, killed = new_run("undisturbed"), new_run("killed")
    undisturbed.finish_here(*OVERRIDES)
    rng, torn, moments = random.Random(0), 0, []
    for kill in range(KILLS):
        moments.append(time.time())
        process = killed.start(*OVERRIDES)
        wait_until(functools.partial(written_since, killed, time.time() + 0.1), process)
        time.sleep(rng.uniform(0.0, 0.3))
        if kill % 2:
            wait_until(functools.partial(stopped_in_a_save, killed, process), process)
        process.send_signal(signal.SIGKILL)
        process.wait()
        moments.append(time.time())
        torn += saving(killed)
    killed.finish_here(*OVERRIDES)
    assert torn >= KILLS // 2
    assert killed.losses() == undisturbed.losses()
    assert sorted(killed.losses()) == list(range(1, STEPS + 1))
    assert not saving(killed)
    check_time(killed, moments)


@pytest.mark.slow  # quick: training/test_lora_runs.py and step/test_lora_dropout.py
def test_killed_processes_resume_adapters_bit_exactly(new_run):
    base, undisturbed, killed = (new_run(name) for name in ("base", "undisturbed", "killed"))
    base.finish_here("--train.max_steps=2")
    settings = [
        *OVERRIDES, "--checkpoint.interval=5", f"--checkpoint.load_path={base.directory}",
        "--distributed.dp_shard=2", "--lora.rank=2", "--lora.dropout=0.2",
    ]  # fmt: skip
    finish_both(start_both(undisturbed, *settings))
    processes = start_both(killed, *settings)
    killed.wait_for_step(14, processes[0])
    for process in processes:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    last = max(killed.losses())
    assert killed.steps()
    assert last < STEPS
    finish_both(start_both(killed, *settings))
    assert killed.losses() == undisturbed.losses()
    assert len(set(killed.losses().values())) == STEPS
    paths = [run.directory / "checkpoints" / f"step_{STEPS}" for run in (killed, undisturbed)]
    sums = [json.loads((path / "checksums" / "metadata").read_text()) for path in paths]
    assert sums[0] == sums[1]


def check_time(run, moments):
    """All time between the first start and the last end is accounted for, and none twice."""
    (seconds,) = check_account(run, 1, [None] * KILLS + [0])
    assert seconds["down"] > 0
    times = [
        time for item in attempts.read(run.directory)[0][0] for time in (item.began, item.seen)
    ]
    for i in range(0, 2 * KILLS, 2):  # a process begins after its command, and dies seen
        assert moments[i] - 0.02 <= times[i] <= times[i + 1] <= moments[i + 1]
    last = [line for line in run.lines() if "goodput/ratio" in line][-1]
    assert last["goodput/down_sec"] == pytest.approx(seconds["down"], abs=0.01)  # is not lost
    assert 0 < last["goodput/ratio"] < 1


@pytest.mark.slow  # quick: tests/telemetry/test_goodput.py and tests/training/test_rollback.py
def test_repeated_steps_of_a_killed_run_are_rework(new_run):
    run = new_run()
    process = run.start("--train.max_steps=1000000", "--checkpoint.interval=1000000")
    path = run.directory / attempts.file_names(0)[1]
    wait_until(lambda: path.exists() and json.loads(path.read_text())["step"] > 5, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (killed,) = attempts.read(run.directory)[0][0]
    run.finish_here(f"--train.max_steps={killed.step + 20}", "--checkpoint.interval=1000000")
    (seconds,) = check_account(run, 1, [None, 0])
    again = attempts.read(run.directory)[0][0][1].seconds
    assert again["rework"] == seconds["rework"] > 0
    assert again["step"] > 0


def written_since(run, moment):
    """Return whether a step was logged after `moment` (a resumed run first cuts the file)."""
    last = []
    with contextlib.suppress(FileNotFoundError):  # not begun yet, or just set aside
        last = (run.directory / "metrics.jsonl").read_bytes().splitlines()[-1:]
    return bool(last) and last[0].endswith(b"}") and json.loads(last[0])["time"] > moment


def saving(run):
    """Return whether a checkpoint is half written."""
    return any(".orbax-checkpoint-tmp" in p.name for p in (run.directory / "checkpoints").glob("*"))


def stopped_in_a_save(run, process):
    """Return whether a checkpoint stays half written because the process is gone."""
    if not saving(run):
        return False
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    if saving(run):
        return True
    process.send_signal(signal.SIGCONT)
    return False
