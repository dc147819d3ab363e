"""Groups of devices that train apart, in processes of their own."""

import signal

import numpy as np
import pytest

from tests.machine import PATIENCE
from tests.processes.launching import finish_both, start_both

GROUPS = ["--distributed.dp_replicate=2", "--train.outer_interval=4", "--train.max_steps=12",
          "--checkpoint.interval=6"]  # fmt: skip
STREAMING = ["--outer_optimizer.fragments=2", "--outer_optimizer.overlap=1",
             "--train.outer_dtype=int4"]  # fmt: skip


def test_two_processes_are_the_run_of_one(new_run):
    """Also if one is killed, and both resume between exchanges."""
    alone, run = new_run("alone"), new_run("apart")
    alone.finish(*GROUPS, *STREAMING, devices=2)
    processes = start_both(run, *GROUPS, *STREAMING, "--train.exit_interval=7")
    finish_both(processes, code=75)
    killed = start_both(run, *GROUPS, *STREAMING, "--train.max_steps=100000")
    run.wait_for_step(9, killed[0])
    killed[1].kill()
    for process in killed:
        process.communicate(timeout=PATIENCE)
    finish_both(start_both(run, *GROUPS, *STREAMING))
    losses = run.losses()
    assert sorted(losses) == list(range(1, 13))
    assert losses == pytest.approx(alone.losses(), rel=1e-6)
    # All counts of the two groups are in the metrics of process 0.
    ends = [lines[-1]["train/tokens"] for lines in
            ([x for x in r.lines() if "train/tokens" in x] for r in (alone, run))]  # fmt: skip
    assert ends == [12 * 8 * 32] * 2


@pytest.mark.slow
def test_lost_group_rejoins_with_the_global_weights(new_run, new_hosts):
    run = new_run()
    overrides = ["--distributed.dp_replicate=2", "--distributed.dp_shard=1",
                 "--train.outer_interval=4", "--train.max_steps=100000",
                 "--checkpoint.interval=10"]  # fmt: skip
    hosts = new_hosts(run, 2, overrides)
    hosts.start(0, 1)
    run.wait_for_step(12, hosts.supervisors[0])
    hosts.signal(1, signal.SIGKILL)
    hosts.await_roster(0, 0)
    hosts.await_more_steps()
    assert "is of 2 groups that train apart, this run has 1" in hosts.log(0)
    hosts.start(1)
    hosts.await_roster(0, 0, 1)
    hosts.await_more_steps()
    assert "is of 1 groups that train apart, this run has 2" in hosts.log(0)
    for supervisor in hosts.supervisors.values():
        supervisor.terminate()
    assert [hosts.supervisors[host].wait(PATIENCE) for host in (0, 1)] == [75, 75]
    losses = run.losses()
    assert sorted(losses) == list(range(1, max(losses) + 1))
    assert np.isfinite(list(losses.values())).all()
    # Each group keeps its 4 sequences: an update of one has half of the tokens.
    tokens = [line["train/tokens"] for line in run.lines() if "train/tokens" in line]
    assert set(np.diff(tokens)) == {4 * 32, 8 * 32}
