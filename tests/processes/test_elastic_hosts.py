"""An elastic job of real hosts' processes loses hosts, gets them back, and is the same run."""

import signal
import subprocess
import sys

import jax
import numpy as np
import psutil
import pytest

from jaxforge.inference.trained import open_run
from tests.machine import PATIENCE, wait_until
from tests.processes.conftest import ROOT, environment
from tests.processes.launching import free_port

OVERRIDES = ["--train.max_steps=100000", "--train.global_batch_size=8", "--checkpoint.interval=20",
             "--distributed.dp_shard=-1", "--train.ema_decay=0.9"]  # fmt: skip


class Hosts:
    """Supervisors of the hosts of a job, each with a process of one device."""

    def __init__(self, run, count, directory):
        self.run, self.directory, self.supervisors = run, directory, {}
        self.peers = ",".join(f"127.0.0.1:{free_port()}" for _ in range(count))

    def start(self, *hosts):
        for host in hosts:
            command = [sys.executable, "-m", "jaxforge", "supervise", "--elastic", "--peers",
                       self.peers, f"--host-index={host}", "--hang-timeout=15",
                       "--peer-grace=5", "--", *self.run.command(*OVERRIDES)]  # fmt: skip
            with (self.directory / f"host-{host}").open("ab") as log:
                self.supervisors[host] = subprocess.Popen(
                    command, cwd=ROOT, env=environment(), stdout=log, stderr=subprocess.STDOUT
                )

    def processes(self, host):
        supervisor = psutil.Process(self.supervisors[host].pid)
        return [*supervisor.children(recursive=True), supervisor]

    def signal(self, host, number):
        for process in self.processes(host):
            process.send_signal(number)

    def log(self, host):
        return (self.directory / f"host-{host}").read_text()

    def await_roster(self, host, *hosts):
        """Wait until a host runs in a roster of these hosts."""
        text = f"hosts {', '.join(map(str, hosts))} of" if len(hosts) > 1 else f"host {hosts[0]} of"
        wait_until(lambda: text in self.log(host).rpartition("roster ")[2])

    def await_more_steps(self):
        first = self.latest_step()
        wait_until(lambda: self.latest_step() > first + 2)

    def latest_step(self):
        try:
            return max(self.run.losses(), default=0)
        except FileNotFoundError:  # a restart without a checkpoint renames the file
            return 0


@pytest.fixture
def new_hosts(tmp_path):
    started = []

    def new(run, count):
        started.append(Hosts(run, count, tmp_path))
        return started[-1]

    yield new
    for hosts in started:
        for supervisor in hosts.supervisors.values():
            if supervisor.poll() is None:
                for process in [*psutil.Process(supervisor.pid).children(recursive=True),
                                supervisor]:  # fmt: skip
                    process.send_signal(signal.SIGKILL)
            supervisor.wait()


def average(run):
    """Return the average of the parameters in the newest checkpoint."""
    with open_run(run, weights="ema").in_use() as params:
        return jax.device_get(params)


@pytest.mark.slow
def test_losses_of_a_job_that_shrinks_twice_and_grows_equal_an_undisturbed_run(new_run, new_hosts):
    run, undisturbed = new_run("elastic"), new_run("undisturbed")
    hosts = new_hosts(run, 4)
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
