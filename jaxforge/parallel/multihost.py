"""Joins the processes of one job: SLURM, Open MPI, Cloud TPU, GKE, or explicit variables.

Explicit variables come first. JAX's own: `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES`,
`JAX_PROCESS_ID`. Those that torchrun sets are understood too: `MASTER_ADDR`, `MASTER_PORT`,
`WORLD_SIZE`, `RANK`. Otherwise `jax.distributed` finds the cluster by itself.
"""

import atexit
import contextlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxforge.errors import UserError
from jaxforge.exit_codes import Exit

log = logging.getLogger(__name__)

_EXPLICIT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")

_FAREWELL_SEC = 86_400
"""How long processes that are done wait for one another: process 0 may still be exporting, and
should it die meanwhile, its heartbeat tells."""


def initialize(heartbeat_timeout_sec: int = 100, env: Mapping[str, str] = os.environ) -> None:
    """Calls `jax.distributed.initialize` when the environment describes several processes.

    Must run before the first JAX computation. Does nothing for a process on its own. From here on
    JAX ends this process (`Exit.ABORTED`) when another one of the job is gone.

    Args:
        heartbeat_timeout_sec: after so many seconds of silence a process is gone; 100 is JAX's own.
            The end of process 0 is seen at once.
        env: where the other processes are described.
    """
    arguments = distributed_arguments(env)
    if arguments is None:
        return
    jax.distributed.initialize(
        **arguments,
        heartbeat_timeout_seconds=heartbeat_timeout_sec,
        shutdown_timeout_seconds=_FAREWELL_SEC,
    )
    log.info("process %d of %d, %d local devices", jax.process_index(), jax.process_count(),
             jax.local_device_count())  # fmt: skip


@contextlib.contextmanager
def leaving_at_once_on_failure() -> Iterator[None]:
    """Among several processes, one that fails within the block ends without waiting for the rest.

    At its end JAX would wait for all processes, which wait in a collective for this one: a job that
    hangs. So this one leaves as soon as its message is out, and the others notice.
    """
    try:
        yield
    except BaseException as error:
        if jax.process_count() > 1:
            code = getattr(error, "exit_code", Exit.ERROR.code)
            atexit.register(_leave, code)  # runs before JAX's, which was there first
        raise


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def distributed_arguments(env: Mapping[str, str]) -> dict[str, Any] | None:
    """Arguments for `jax.distributed.initialize`; None for a single process.

    Raises:
        UserError: some of a set of variables are there and others are missing, or not numbers.
    """
    if any(name in env for name in _EXPLICIT):
        address, count, index = _values(env, _EXPLICIT)
    elif "MASTER_ADDR" in env and "WORLD_SIZE" in env:
        host, port, count, index = _values(env, _TORCHRUN)
        address = f"{host}:{port}"
    else:
        return {} if _cluster(env) else None
    try:
        explicit = {"num_processes": int(count), "process_id": int(index)}
    except ValueError:
        raise UserError(f"process count {count!r} and index {index!r} must be integers") from None
    return None if explicit["num_processes"] == 1 else {"coordinator_address": address, **explicit}


def _values(env: Mapping[str, str], names: tuple[str, ...]) -> list[str]:
    missing = [name for name in names if name not in env]
    if missing:
        raise UserError(f"set {', '.join(missing)} too: {', '.join(names)} go together")
    return [env[name] for name in names]


def _cluster(env: Mapping[str, str]) -> str | None:
    """The scheduler that started this job with several processes, if any."""
    if int(env.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        return "Open MPI"
    if int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:  # set by srun, not by a bare sbatch script
        return "SLURM"
    if len(env.get("TPU_WORKER_HOSTNAMES", "localhost").split(",")) > 1:
        return "GKE"
    if env.get("JAX_PLATFORMS", "tpu").startswith("tpu") and _on_tpu_vm():
        return "Cloud TPU"  # whose metadata server knows the rest, for one host as for many
    return None


def _on_tpu_vm() -> bool:
    has_chips = any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))
    return has_chips and importlib.util.find_spec("libtpu") is not None
