"""Runs of several processes on this machine."""

import socket

from tests.machine import PATIENCE


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


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
