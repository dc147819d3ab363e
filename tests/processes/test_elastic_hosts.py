"""An elastic job of real hosts' processes loses hosts, gets them back, and is the same run."""

import signal

import jax
import numpy as np
import pytest

from jaxforge.inference.trained import open_run
from tests.machine import PATIENCE

OVERRIDES = ["--train.max_steps=100000", "--train.global_batch_size=8", "--checkpoint.interval=20",
             "--distributed.dp_shard=-1", "--train.ema_decay=0.9"]  # fmt: skip


def average(run):
    """Return the average of the parameters in the newest checkpoint."""
    with open_run(run, weights="ema").in_use() as params:
        return jax.device_get(params)


@pytest.mark.slow
def test_losses_of_a_job_that_shrinks_twice_and_grows_equal_an_undisturbed_run(new_run, new_hosts):
    run, undisturbed = new_run("elastic"), new_run("undisturbed")
    hosts = new_hosts(run, 4, OVERRIDES)
    hosts.start(0, 1, 2, 3)
    run.wait_for_step(12, hosts.supervisors[0])
    hosts.signal(2, signal.SIGKILL)
    hosts.await_roster(0, 0, 1, 3)
    hosts.await_more_steps()
    stopped = hosts.processes(0)  # with the coordinator
    hosts.signal(0, signal.SIGSTOP)
    hosts.await_roster(1, 1, 3)
    hosts.await_more_steps()
    hosts.start(2)
    for process in stopped:
        process.send_signal(signal.SIGCONT)
    hosts.await_roster(1, 0, 1, 2, 3)
    hosts.await_more_steps()
    for supervisor in hosts.supervisors.values():
        supervisor.terminate()
    assert [hosts.supervisors[host].wait(PATIENCE) for host in range(4)] == [75] * 4
    losses = run.losses()
    last = max(losses)
    assert sorted(losses) == list(range(1, last + 1))
    undisturbed.finish(*OVERRIDES, f"--train.exit_interval={last}", devices=4, code=75)
    assert losses == pytest.approx(undisturbed.losses(), rel=1e-6)
    averages = [average(ours.directory) for ours in (run, undisturbed)]
    for x, y in zip(*map(jax.tree.leaves, averages), strict=True):
        assert np.linalg.norm(x - y) <= 1e-4 * np.linalg.norm(y)
    # The run goes on in the same directory without being elastic.
    run.finish(*OVERRIDES, f"--train.exit_interval={last + 1}", devices=4, code=75)
    assert max(run.losses()) == last + 1
