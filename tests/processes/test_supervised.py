"""A process of a job dies: the others notice, and the supervisor's restart is the same run."""

import itertools
import json
import signal
import subprocess
import sys

import psutil
import pytest

from jaxforge.exit_codes import Exit
from tests.machine import PATIENCE
from tests.processes.conftest import ROOT, environment
from tests.processes.launching import finish_both, free_port, start_both

OVERRIDES = ["--train.max_steps=40", "--checkpoint.interval=10", "--distributed.dp_shard=2"]


@pytest.mark.slow
def test_one_of_two_processes_is_killed_and_both_run_again(new_run):
    undisturbed, killed = new_run("undisturbed"), new_run("killed")
    others = start_both(undisturbed, *OVERRIDES)
    command = [sys.executable, "-m", "jaxforge", "supervise", "--nproc=2", "--backoff=0.1",
               "--peer-grace=60", "--", *killed.command(*OVERRIDES)]  # fmt: skip
    supervisor = subprocess.Popen(
        command, cwd=ROOT, env=environment(), text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    killed.wait_for_step(15, supervisor)
    (victim,) = (
        child for child in psutil.Process(supervisor.pid).children()
        if child.environ()["JAX_PROCESS_ID"] == "1"
    )  # fmt: skip
    victim.send_signal(signal.SIGKILL)
    output = supervisor.communicate(timeout=PATIENCE)[0]
    assert supervisor.returncode == 0, output
    assert "process 1 ended with 137: killed by SIGKILL" in output
    assert "error: process 1 of the job is gone, or cut off (" in output
    assert "Traceback" not in output
    finish_both(others)
    assert killed.losses() == undisturbed.losses()
    assert sorted(killed.losses()) == list(range(1, 41))
    log = (killed.directory / "supervise.jsonl").read_text().splitlines()
    first, second = map(json.loads, log)
    assert first["code"] == 137
    assert first["steps"][0] == -1
    assert first["steps"][1] in (10, 20, 30)  # it is the manager's directories that are looked at
    assert (second["codes"], second["steps"]) == ([0, 0], [first["steps"][1], 40])


JOB = """
import sys, time, jax
from jaxforge.cli.running import run_main
from jaxforge.errors import UserError
from jaxforge.parallel import multihost

def main():
    multihost.initialize(heartbeat_timeout_sec=10)
    with multihost.exit_at_once_on_failure():
        if jax.process_index() == 1:
            raise {error}("of one process alone")
        time.sleep(36000)

raise SystemExit(run_main(main))
"""


def start_job(error):
    address = f"127.0.0.1:{free_port()}"
    return [
        subprocess.Popen(
            [sys.executable, "-c", JOB.format(error=error)], cwd=ROOT, text=True,
            stderr=subprocess.PIPE,
            env=environment(JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES="2",
                            JAX_PROCESS_ID=str(index)),
        )
        for index in range(2)
    ]  # fmt: skip


@pytest.mark.slow
def test_who_fails_leaves_at_once_and_the_others_notice():
    """Process 0, which neither computes nor looks, is ended by its runtime."""
    codes = {"UserError": Exit.USER_ERROR, "ValueError": Exit.ERROR}
    jobs = {error: start_job(error) for error in codes}  # they wait at the same time
    try:
        ends = {
            error: [(p.communicate(timeout=PATIENCE)[1], p.returncode) for p in job]
            for error, job in jobs.items()
        }
    finally:
        for process in itertools.chain(*jobs.values()):
            process.kill()
    for error, (other, failed) in ends.items():
        assert failed[1] == codes[error].code, failed[0]
        assert "of one process alone" in failed[0]
        assert other[1] == -signal.SIGABRT, other[0]
    assert Exit.ABORTED.code == 128 + signal.SIGABRT
