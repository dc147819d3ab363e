"""`kill -9` at random moments: the run that is started again is the run undisturbed."""

import functools
import json
import random
import signal
import time

STEPS = 450
OVERRIDES = [f"--train.max_steps={STEPS}", "--checkpoint.interval=3", "--data.num_workers=2"]


def test_killed_at_ten_random_moments(new_run):
    """Five kills anywhere, five while a checkpoint is being written."""
    undisturbed, killed = new_run("undisturbed"), new_run("killed")
    undisturbed.finish(*OVERRIDES)
    rng, torn = random.Random(0), 0
    for kill in range(10):
        process = killed.start(*OVERRIDES)
        wait_until(functools.partial(written_since, killed, time.time() + 0.1), process)
        time.sleep(rng.uniform(0.0, 0.3))
        if kill % 2:
            wait_until(lambda: saving(killed), process)
        process.send_signal(signal.SIGKILL)
        process.wait()
        torn += saving(killed)
    killed.finish(*OVERRIDES)
    assert torn >= 3, "hardly any kill fell into a save"
    assert killed.losses() == undisturbed.losses()
    assert sorted(killed.losses()) == list(range(1, STEPS + 1))
    assert not saving(killed)


def written_since(run, moment):
    """Whether a step was logged after `moment` (a resumed run first cuts the file)."""
    path = run.directory / "metrics.jsonl"
    last = path.read_bytes().splitlines()[-1:] if path.exists() else []
    return bool(last) and last[0].endswith(b"}") and json.loads(last[0])["time"] > moment


def saving(run):
    """Whether a checkpoint is half written."""
    return any(".orbax-checkpoint-tmp" in p.name for p in (run.directory / "checkpoints").glob("*"))


def wait_until(true, process):
    deadline = time.monotonic() + 60
    while not true():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.002)
