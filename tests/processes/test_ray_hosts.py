"""An elastic job on a Ray cluster loses a node, gets one back, and is the same run."""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.machine import PATIENCE, wait_until
from tests.processes.conftest import ROOT, environment
from tests.processes.launching import free_port

pytest.importorskip("ray")

OVERRIDES = ["--train.max_steps=100000", "--train.global_batch_size=12", "--checkpoint.interval=20",
             "--distributed.dp_shard=-1"]  # fmt: skip


class Cluster:
    """Nodes with room for one host each. The first one also has the table of the cluster."""

    def __init__(self):
        self.directory = Path(tempfile.mkdtemp(prefix="jfray"))  # paths of sockets must be short
        self.address, self.nodes = f"127.0.0.1:{free_port()}", []
        self.env = {**environment(), "RAY_DEDUP_LOGS": "0", "RAY_ADDRESS": self.address}
        self.add(f"--head --port={self.address.rpartition(':')[2]} --include-dashboard=false "
                 f"--temp-dir={self.directory}")  # fmt: skip
        for _ in range(2):
            self.add(f"--address={self.address}")

    def add(self, options):
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1",
                   "--object-store-memory=80000000", "--disable-usage-stats"]  # fmt: skip
        env = {name: value for name, value in self.env.items() if name != "RAY_ADDRESS"}
        with (self.directory / "nodes").open("ab") as log:
            self.nodes.append(subprocess.Popen(
                [*command, *options.split()], env=env, stdout=log, stderr=subprocess.STDOUT
            ))  # fmt: skip

        count = len(self.nodes)
        wait_until(lambda: self.output().count("Ray runtime started") == count)

    def output(self):
        return (self.directory / "nodes").read_text()

    def processes(self, node):
        process = psutil.Process(node.pid)
        return [*process.children(recursive=True), process]

    def kill(self, node):
        for process in self.processes(node):
            process.kill()
        node.wait()

    def close(self):
        for node in self.nodes:
            if node.poll() is None:
                self.kill(node)
        shutil.rmtree(self.directory, ignore_errors=True)


@pytest.fixture
def cluster():
    cluster = Cluster()
    yield cluster
    cluster.close()


@pytest.mark.slow
def test_losses_of_a_job_that_loses_and_regains_a_node_equal_an_undisturbed_run(
    new_run, cluster, tmp_path
):
    run, undisturbed = new_run("elastic"), new_run("undisturbed")
    output = tmp_path / "driver"
    command = [sys.executable, "-m", "jaxforge", "supervise", "--elastic", "--engine=ray",
               "--hosts=2:3", "--host-resources=CPU=1", "--hang-timeout=15", "--peer-grace=5",
               "--", *run.command(*OVERRIDES)]  # fmt: skip

    def roster():
        return re.findall(r"roster \d+: hosts ([\d, ]+) of 3", output.read_text())[-1:]

    def latest_step():
        try:
            return max(run.losses(), default=0)
        except FileNotFoundError:  # a restart without a checkpoint renames the file
            return 0

    def await_more_steps():
        first = latest_step()
        wait_until(lambda: latest_step() > first + 2)

    with output.open("wb") as file:
        driver = subprocess.Popen(
            command, cwd=ROOT, env=cluster.env, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        run.wait_for_step(12, driver)
        assert roster() == ["0, 1, 2"]
        cluster.kill(cluster.nodes[2])
        wait_until(lambda: roster() and len(roster()[0]) == len("0, 1"))
        await_more_steps()
        cluster.add(f"--address={cluster.address}")
        wait_until(lambda: roster() == ["0, 1, 2"])
        await_more_steps()
        driver.terminate()
        assert driver.wait(PATIENCE) == 75
    finally:
        driver.kill()
        print(output.read_text())
    losses = run.losses()
    last = max(losses)
    assert sorted(losses) == list(range(1, last + 1))
    undisturbed.finish(*OVERRIDES, f"--train.exit_interval={last}", devices=3, code=75)
    assert losses == pytest.approx(undisturbed.losses(), rel=1e-6)
