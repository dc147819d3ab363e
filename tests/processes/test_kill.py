"""`kill -9` at random moments: the run that is started again is the run undisturbed."""

import functools
import json
import os
import random
import signal
import time

import pytest

from tests.machine import wait_until

pytestmark = pytest.mark.usefixtures("one_device")

KILLS, STEPS = 2, 60
OVERRIDES = [f"--train.max_steps={STEPS}", "--checkpoint.interval=3", "--data.num_workers=2"]


def test_killed_at_random_moments(new_run):
    """Half of the kills anywhere, half while a checkpoint is half written: it is stopped there."""
    undisturbed, killed = new_run("undisturbed"), new_run("killed")
    undisturbed.finish_here(*OVERRIDES)
    rng, torn = random.Random(0), 0
    for kill in range(KILLS):
        process = killed.start(*OVERRIDES)
        wait_until(functools.partial(written_since, killed, time.time() + 0.1), process)
        time.sleep(rng.uniform(0.0, 0.3))
        if kill % 2:
            wait_until(functools.partial(stopped_in_a_save, killed, process), process)
        process.send_signal(signal.SIGKILL)
        process.wait()
        torn += saving(killed)
    killed.finish_here(*OVERRIDES)
    assert torn >= KILLS // 2
    assert killed.losses() == undisturbed.losses()
    assert sorted(killed.losses()) == list(range(1, STEPS + 1))
    assert not saving(killed)


def written_since(run, moment):
    """Return whether a step was logged after `moment` (a resumed run first cuts the file)."""
    path = run.directory / "metrics.jsonl"
    last = path.read_bytes().splitlines()[-1:] if path.exists() else []
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
