"""Runs of several processes on this machine."""

import pytest

from jaxforge.runs import attempts
from jaxforge.supervision.processes import free_port
from jaxforge.telemetry.goodput import account
from tests.machine import PATIENCE


def check_account(run, processes, codes):
    """Check the account of a run against the wall clock; return the accounts of all processes.

    Args:
        run: the run.
        processes: number of processes of the job.
        codes: exit code of each attempt of process 0; None for a killed process.
    """
    by_process, damage = attempts.read(run.directory)
    assert (sorted(by_process), damage) == (list(range(processes)), [])
    assert [attempt.code for attempt in by_process[0]] == codes
    accounts = []
    for of_process in by_process.values():
        seconds, wall = account(of_process), of_process[-1].seen - of_process[0].began
        assert sum(seconds.values()) == pytest.approx(wall, rel=0.01)
        assert all(seconds[name] > 0 for name in ("start", "compile", "step", "save"))
        accounts.append(seconds)
    return accounts


def start_both(run, *overrides, torchrun=False, count=2, of_last=(), env=None):
    port = free_port()
    processes = []
    for index in range(count):
        if torchrun:
            job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count),
                   "RANK": str(index)}  # fmt: skip
        else:
            job = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(count),
                   "JAX_PROCESS_ID": str(index)}  # fmt: skip
        processes.append(
            run.start(*overrides, *of_last * (index == count - 1), **job, **(env or {}))
        )
    return processes


def finish_both(processes, code=0):
    outputs = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    assert {p.returncode for p in processes} == {code}, "\n=====\n".join(outputs)
    return outputs
