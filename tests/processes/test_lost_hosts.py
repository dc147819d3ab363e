"""Recovery of a job from the memory of its hosts. Each process has a host, which is a directory."""

import json
import os
import re
import shutil
import time

import jax
import numpy as np
import pytest

from jaxforge.checkpoint.restore import Saved, start_from
from jaxforge.config.reading.load import load_config
from jaxforge.parallel.mesh import make_mesh
from jaxforge.program import Program
from jaxforge.storage.run_lock import RunLock
from jaxforge.training.saving import Saver
from tests.helpers import flip_bit
from tests.machine import PATIENCE
from tests.processes.launching import finish_both, free_port

pytestmark = pytest.mark.usefixtures("one_device")

SETTINGS = ["--train.max_steps=100000", "--checkpoint.interval=4", "--checkpoint.keep_last_n=0",
            "--checkpoint.replica_interval=4"]  # fmt: skip


class Job:
    """A job with one process on each host."""

    def __init__(self, run, tmp_path):
        self.run, self.tmp_path = run, tmp_path

    def host(self, index):
        return self.tmp_path / f"host_{index}"

    def start(self, hosts, *overrides, run=None):
        job = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
               "JAX_NUM_PROCESSES": str(len(hosts))}  # fmt: skip
        return [
            (run or self.run).start(
                *overrides, f"--checkpoint.replica_dir={self.host(host)}",
                JAX_PROCESS_ID=str(index), **job,
            )
            for index, host in enumerate(hosts)
        ]  # fmt: skip

    def kill_once_saved(self, processes):
        """Kill all processes; return the newest step with a checkpoint and a replica.

        A step has both from the first save on: before a replica is removed, the next checkpoint is
        durable and the next replica complete.
        """
        hosts, deadline = range(len(processes)), time.monotonic() + PATIENCE
        try:
            while not self.common_steps(hosts):
                assert time.monotonic() < deadline, "nothing is saved"
                assert processes[0].poll() is None, processes[0].communicate()[0]
                time.sleep(0.05)
        finally:
            for process in processes:
                process.kill()
        for process in processes:
            process.communicate(timeout=PATIENCE)
        return max(self.common_steps(hosts))

    def files(self, host, sender, step):
        (path,) = self.host(host).rglob(f"step_{step}.*/{sender}.data")
        return path

    def common_steps(self, hosts):
        """Return the steps with a checkpoint and with the files of two senders on each host."""
        steps = [
            {int(os.path.basename(folder).split(".")[0][5:])
             for folder, _, names in os.walk(self.host(host))  # some are removed meanwhile
             if sum(name[0].isdigit() and name.endswith(".json") for name in names) == 2}
            for host in hosts
        ]  # fmt: skip
        return set.intersection(set(self.run.steps()), *steps)


@pytest.fixture
def job(new_run, tmp_path):
    return Job(new_run(), tmp_path)


def restored(job, host, step):
    """Return states and progress from memory of a host and from disk, in this process."""
    overrides = [*SETTINGS, f"--checkpoint.replica_dir={job.host(host)}"]
    config = load_config(job.run.config, [f"--checkpoint.dir={job.run.directory}", *overrides])
    program = Program(config, make_mesh(config, jax.devices()[:1]))
    with RunLock(job.run.directory), program.context():
        saver = Saver.of_run(config, program.model, None)
        (replica,) = [source for source in saver.replicas.sources if source.step == step]
        results = [start_from(s, program) for s in (replica, Saved(saver.permanent, step))]
        saver.close()
    return results


def test_lost_host_is_replaced_by_copy_of_its_peer(job):
    """A single process restores the bits of the checkpoint of the same step."""
    step = job.kill_once_saved(job.start([0, 1], *SETTINGS, "--distributed.dp_shard=2"))
    shutil.rmtree(job.host(0))
    (state, progress), (saved, saved_progress) = restored(job, 1, step)
    jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, (state, saved)))
    assert progress == saved_progress
    assert progress.step == step


FOUR = ["--distributed.dp_shard=4", "--train.global_batch_size=12"]
THREE = ["--distributed.dp_shard=3", "--train.global_batch_size=12"]


@pytest.mark.slow
def test_three_of_four_hosts_continue_as_from_a_checkpoint(job, new_run):
    """Host 2 is lost, and a copy on host 1 is damaged."""
    step = job.kill_once_saved(job.start(range(4), *SETTINGS, *FOUR))
    for path in (job.run.directory / "checkpoints").glob("step_*"):
        if path.name != f"step_{step}":
            shutil.rmtree(path)
    copy = new_run("copy")
    shutil.copytree(job.run.directory, copy.directory)
    last = [*SETTINGS, *THREE, f"--train.max_steps={step + 2}"]
    finish_both(job.start([0, 1, 3], *last, "--checkpoint.replica_interval=0", run=copy))
    shutil.rmtree(job.host(2))
    flip_bit(job.files(1, 1, step))
    outputs = finish_both(job.start([0, 1, 3], *last))
    taken = rf"restored step {step} from memory: .* own hosts, ([\d.]+) MB from other hosts"
    assert float(re.search(taken, outputs[0])[1]) > 0, outputs[0]
    assert "files of process 1 on the host of process 1 (a part of" in outputs[0]
    assert final_checksums(job.run, step + 2) == final_checksums(copy, step + 2)


def final_checksums(run, step):
    path = run.directory / "checkpoints" / f"step_{step}" / "checksums" / "metadata"
    return json.loads(path.read_text())


@pytest.mark.slow
def test_loss_of_both_copies_falls_back_to_checkpoint(job):
    job.kill_once_saved(job.start([0, 1], *SETTINGS, "--distributed.dp_shard=2"))
    for host in (0, 1):
        for path in job.host(host).rglob("0.data"):
            flip_bit(path)
    step = job.run.steps()[-1]
    outputs = finish_both(
        job.start([0, 1], *SETTINGS, "--distributed.dp_shard=2", f"--train.max_steps={step + 1}")
    )
    assert re.search(
        r"cannot be used \(process \d: no copy of the files of process 0 is intact\)", outputs[0]
    )
    assert f"resuming from step {step} of {job.run.directory}" in outputs[0]


@pytest.mark.slow
def test_one_of_two_groups_continues_from_replicas(job):
    """Groups that train apart: the copy of the lost one is in memory, and is left out."""
    apart = [*SETTINGS, "--distributed.dp_replicate=2", "--distributed.dp_shard=1",
             "--train.outer_interval=3", "--distributed.elastic_processes=2"]  # fmt: skip
    step = job.kill_once_saved(job.start([0, 1], *apart))
    shutil.rmtree(job.run.directory / "checkpoints" / f"step_{step}")  # replicas alone have it
    [output] = finish_both(job.start([0], *apart, f"--train.exit_interval={step + 4}"), code=75)
    assert f"step {step}" in output.partition("is of 2 groups that train apart, this run has 1")[0]
    assert job.run.losses().keys() >= set(range(step + 1, step + 5))
