"""Joins the processes of one job: SLURM, Open MPI, Cloud TPU, GKE, or explicit variables.

Explicit variables come first. JAX's own: `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES`,
`JAX_PROCESS_ID`. Those that torchrun sets are understood too: `MASTER_ADDR`, `MASTER_PORT`,
`WORLD_SIZE`, `RANK`. Otherwise `jax.distributed` finds the cluster by itself.
"""

import importlib.util
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxforge.errors import UserError

log = logging.getLogger(__name__)

_EXPLICIT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")


def initialize(env: Mapping[str, str] = os.environ) -> None:
    """Calls `jax.distributed.initialize` when the environment describes several processes.

    Must run before the first JAX computation. Does nothing for a process on its own.
    """
    arguments = distributed_arguments(env)
    if arguments is None:
        return
    jax.distributed.initialize(**arguments)
    log.info("process %d of %d, %d local devices", jax.process_index(), jax.process_count(),
             jax.local_device_count())  # fmt: skip


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
