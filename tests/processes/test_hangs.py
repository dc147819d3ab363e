"""Jobs that hang: each living process names the culprit, and the job ends.

Faults: a process is suspended, killed or cut off from the network, fails, or acts alone.
"""

import itertools
import os
import re
import signal
import subprocess
import sys

import pytest

from benchmarks.faults.network import Network, can_make_networks
from jaxforge.exit_codes import Exit
from tests.machine import PATIENCE, wait_until
from tests.processes.conftest import ROOT, environment
from tests.processes.launching import free_port, start_both

JOB = """
import sys, jax, numpy as np
from jax.experimental import multihost_utils
from jaxforge.cli.running import run_main
from jaxforge.parallel import multihost
from jaxforge.telemetry.console import setup_logging
from jaxforge.cli.running import wide_console
from jaxforge.training.health.watchdog import Limits, Watchdog

def main():
    setup_logging(wide_console(sys.stdout))
    with Watchdog(Limits(0, 0), lambda message: dog.die(message, linger=2)) as dog:
        multihost.initialize()
        with dog.watching_peers(10), multihost.exit_at_once_on_failure(dog.note_failure):
            for step in range(10**9):
                multihost_utils.process_allgather(np.zeros(1))
                dog.tick(step)
                print("step", step, flush=True)

raise SystemExit(run_main(main))
"""


def start_job(count):
    address = f"127.0.0.1:{free_port()}"
    return [
        subprocess.Popen(
            [sys.executable, "-c", JOB], cwd=ROOT, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment(JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES=str(count),
                            JAX_PROCESS_ID=str(index)),
        )
        for index in range(count)
    ]  # fmt: skip


@pytest.mark.slow
def test_suspended_process_is_named_and_ends_the_job():
    job = start_job(2)
    try:
        while "step 3" not in job[1].stdout.readline():
            assert job[1].poll() is None
        job[1].send_signal(signal.SIGSTOP)
        output = job[0].communicate(timeout=PATIENCE)[0]
    finally:
        for process in job:
            process.kill()
    assert job[0].returncode == Exit.HUNG.code, output
    (line,) = re.findall("^.*exiting with code 70.*$", output, re.MULTILINE)
    assert re.search(r"culprit: process 1 \(.+\), silent: no heartbeat for \d+ s", line)
    assert "Process 0 of 2 waits after launching step" in line
    assert "in process_allgather" in output


CALLBACK = """
import threading
import jax
import jaxforge as jf

class Alone(jf.Callback):
    def on_step_end(self, context):
        if jax.process_index() == {rank} and context.step == 12:
            {action}
"""
SLEEPS = CALLBACK.replace("{action}", "threading.Event().wait()")
FAILS = CALLBACK.replace("{action}", 'raise ValueError("a bug of one process")')
WAITS_FOR_DATA = """
import itertools
import threading
import jax
import jaxforge as jf
from jaxforge.training.training_data import TrainingData

numbers, following = itertools.count(1), TrainingData.__next__

def read(self):
    if jax.process_index() == {rank} and next(numbers) == 13:
        threading.Event().wait()
    return following(self)

TrainingData.__next__ = read

class Alone(jf.Callback):
    pass
"""


class Job:
    """Processes of a run that does not end by itself; one of them may behave differently."""

    def __init__(self, run, folder, count, *overrides, rank=0, plugin=""):
        if plugin:
            (folder / "acts_alone.py").write_text(plugin.replace("{rank}", str(rank)))
            overrides = ["--plugins.callbacks=acts_alone.Alone", *overrides]
        path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.run = run
        self.processes = start_both(
            run, f"--distributed.dp_shard={count}", f"--train.global_batch_size={4 * count}",
            "--train.max_steps=100000", "--checkpoint.interval=100000", "--train.hang_timeout=10",
            *overrides, count=count, env={"PYTHONPATH": path},
        )  # fmt: skip
        run.wait_for_step(10, self.processes[0])

    def log(self, index):
        return (self.run.directory / "logs" / f"process_{index}.log").read_text()

    def stacks(self, index):
        return (self.run.directory / "logs" / f"stacks_{index}.txt").read_text()

    def finish(self, index):
        self.processes[index].communicate(timeout=PATIENCE)
        return self.processes[index].returncode


@pytest.fixture
def new_job(new_run, tmp_path):
    jobs = []

    def start(*arguments, **keywords):
        jobs.append(Job(new_run(), tmp_path, *arguments, **keywords))
        return jobs[-1]

    yield start
    for process in itertools.chain(*(job.processes for job in jobs)):
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_all_processes_name_suspended_process(new_job, victim):
    job = new_job(4)
    job.processes[victim].send_signal(signal.SIGSTOP)
    survivors = [i for i in range(4) if i != victim]
    assert [job.finish(i) for i in survivors] == [Exit.HUNG.code] * 3
    for i in survivors:
        assert f"culprit: process {victim}" in job.log(i)
        assert f"culprit: process {victim}" in job.stacks(i)
        assert "most recent call first" in job.stacks(i)


@pytest.mark.slow
def test_log_names_killed_process_at_once(new_job):
    """JAX itself notices the loss only after 100 seconds."""
    job = new_job(3)
    job.processes[1].send_signal(signal.SIGKILL)
    assert [job.finish(i) for i in (0, 2)] == [Exit.ABORTED.code] * 2
    for i in (0, 2):
        assert re.search(r"a connection broke; .* culprit: process 1 \(.+\), silent", job.log(i))


@pytest.mark.slow
def test_log_has_error_of_failed_process(new_job):
    job = new_job(3, rank=2, plugin=FAILS)
    assert [job.finish(i) for i in range(3)] == [Exit.ABORTED.code] * 2 + [Exit.ERROR.code]
    for i in range(2):
        assert re.search(
            r"culprit: process 2 \(.+\), failed: ValueError: a bug of one process", job.log(i)
        )


@pytest.mark.slow
def test_all_processes_name_living_process_before_the_limit_ends_them(new_job):
    job = new_job(3, "--train.watchdog_step_sec=60", rank=1, plugin=SLEEPS)
    assert [job.finish(i) for i in range(3)] == [Exit.HUNG.code] * 3
    for i in range(3):
        early, end = re.findall(r"^.* culprit: process 1 \(.*$", job.log(i), re.MULTILINE)
        for line in (early, end):
            assert "behind: alive" in line
            assert "acts_alone.py:9 (on_step_end). Processes 0, 2 of 3 wait" in line
        assert "may hang: no progress" in early
        assert "train.watchdog_step_sec = 60" in end
        assert "exiting with code 70" in end


@pytest.mark.slow
def test_all_processes_name_process_that_waits_for_data(new_job):
    job = new_job(2, rank=1, plugin=WAITS_FOR_DATA)
    wait_until(lambda: all("may hang" in job.log(i) for i in range(2)), job.processes[0])
    for i in range(2):
        assert re.search(r"culprit: process 1 \(.*training: waiting for data", job.log(i))


NUMBERS = itertools.count()  # the kernel frees names some time after they are deleted


@pytest.fixture
def network():
    if not can_make_networks():
        pytest.skip("needs the permission to create network namespaces")
    with Network(f"jf{os.getpid() % 1000}n{next(NUMBERS)}", 3) as network:
        yield network


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_host_that_is_cut_off_is_named(new_run, network, victim):
    """Process 0 without a network finds that nobody answers; a cut-off process blames process 0."""
    run = new_run()
    overrides = ["--distributed.dp_shard=3", "--train.global_batch_size=12",
                 "--train.max_steps=100000", "--checkpoint.interval=100000",
                 "--train.hang_timeout=10"]  # fmt: skip
    job = {"JAX_COORDINATOR_ADDRESS": f"{network.address(0)}:{free_port()}",
           "JAX_NUM_PROCESSES": "3"}  # fmt: skip
    processes = [
        subprocess.Popen(
            network.command(i, *run.command(*overrides)), cwd=ROOT, text=True,
            env=environment(**job, JAX_PROCESS_ID=str(i)),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for i in range(3)
    ]  # fmt: skip
    try:
        run.wait_for_step(10, processes[0])
        network.connect(victim, is_connected=False)
        for process in processes:
            process.communicate(timeout=PATIENCE)
    finally:
        for process in processes:
            process.kill()
    assert {process.returncode for process in processes} == {Exit.HUNG.code}
    for i in range(3):
        log = (run.directory / "logs" / f"process_{i}.log").read_text()
        if victim == 0:
            name = "this process, process 0" if i == 0 else "process 0: its coordination service"
        else:
            name = "process 0: its coordination service" if i == 2 else "process 2"
        assert f"culprit: {name}" in log
