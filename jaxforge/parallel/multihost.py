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
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxforge.cli import streams
from jaxforge.cli.process import end_now
from jaxforge.errors import JobStorageError, PeerLostError, UserError
from jaxforge.exit_codes import Exit
from jaxforge.parallel import virtual_devices

log = logging.getLogger(__name__)

_EXPLICIT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
_DECIDING = ("MASTER_ADDR", "WORLD_SIZE", "RANK")  # a port alone describes nothing

JOIN_SEC = 300
"""How long a process waits for the others of its job at the start."""

_BROKEN = re.compile(r"Gloo .*gloo/transport/\S+ (.*)")

_KNOCK_SEC = 10.0  # for an answer of a host

_FAREWELL_SEC = 86_400
"""How long processes that are done wait for one another: process 0 may still be exporting, and
should it die meanwhile, its heartbeat tells."""


def initialize(heartbeat_timeout_sec: int = 100, env: Mapping[str, str] = os.environ) -> None:
    """Call `jax.distributed.initialize` if the environment describes several processes.

    Must run before the first JAX computation. Does nothing for a process on its own. From here on
    JAX ends this process (`Exit.ABORTED`) when another one of the job is gone.

    Args:
        heartbeat_timeout_sec: after this many seconds of silence a process is gone; 100 is JAX's
            own. The end of process 0 is seen at once.
        env: where the other processes are described.

    Raises:
        UserError: no device is found, or process 0 is not.
    """
    virtual_devices.enlarge_thread_pool()
    arguments = distributed_arguments(env)
    if arguments is not None:
        _join(arguments, heartbeat_timeout_sec)
    open_devices(env)
    if arguments is None:
        return
    log.info("process %d of %d, %d local devices", jax.process_index(), jax.process_count(),
             jax.local_device_count())  # fmt: skip


def _join(arguments: dict[str, Any], heartbeat_timeout_sec: int) -> None:
    """`jax.distributed.initialize`, which of itself waits without a word, and then aborts."""
    awaited = _awaited(arguments)
    log.info("waiting for %s, up to %g s", awaited, JOIN_SEC)
    if arguments.get("process_id"):
        _await_port(arguments["coordinator_address"], awaited)
    giving_up = threading.Timer(JOIN_SEC, _give_up, [awaited])
    giving_up.daemon = True
    giving_up.start()
    try:
        jax.distributed.initialize(
            **arguments,
            initialization_timeout=JOIN_SEC + 60,  # we are first, as JAX would abort the process
            heartbeat_timeout_seconds=heartbeat_timeout_sec,
            shutdown_timeout_seconds=_FAREWELL_SEC,
        )
    except jax.errors.JaxRuntimeError as error:
        if "RPC server" not in str(error):
            raise
        raise UserError(
            f"process 0 cannot listen at {arguments.get('coordinator_address', 'its port')}: the "
            "port is in use, by another job or by what is left of one, or the address is not of "
            "this host; name another to all processes"
        ) from error
    finally:
        giving_up.cancel()


def _awaited(arguments: dict[str, Any]) -> str:
    """Whom a process waits for."""
    if not arguments:
        return "the other processes of the job"  # which the scheduler knows, and JAX asks it
    address, count = arguments["coordinator_address"], arguments["num_processes"]
    if arguments["process_id"] == 0:
        others = "process 1" if count == 2 else f"processes 1 to {count - 1}"
        return f"{others} to come to process 0 at {address}"
    return f"process 0 of {count} at {address}"


def _await_port(address: str, awaited: str) -> None:
    """Returns once somebody listens there; hosts may get their names and start in any order."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + JOIN_SEC
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_SEC).close()
            return
        except ValueError:
            raise UserError(f"no host and port: coordinator address {address!r}") from None
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(_lonely(awaited, error.strerror or str(error))) from error
        time.sleep(_KNOCK_SEC / 10)


def _give_up(awaited: str) -> None:
    said = streams.tolerant(sys.stderr)  # nothing may keep the process from its end
    print(f"error: {_lonely(awaited, 'some did not come')}", file=said, flush=True)
    end_now(Exit.USER_ERROR.code, flush=False)


def _lonely(awaited: str, why: str) -> str:
    return (
        f"waited {JOIN_SEC:g} s for {awaited}: {why}. Is it running, under the same address, and "
        "does a firewall let this host through? Start all processes of the job, then this again"
    )


def open_devices(env: Mapping[str, str] = os.environ) -> None:
    """Open the devices of this process.

    Args:
        env: says which platform is wanted.

    Raises:
        UserError: there are none.
    """
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter for a platform without a plugin
        if "in use" in str(error):
            raise  # a process that is about to end may hold them: another start may go better
        platforms = env.get("JAX_PLATFORMS")
        wanted = f"JAX_PLATFORMS={platforms}: " if platforms else ""
        why = str(error).partition(" (set JAX_PLATFORMS")[0].rstrip(".")
        why = why or "there is no such platform here"
        raise UserError(
            f"{wanted}JAX finds no devices: {why}. Install what they need (pip install '.[cuda]' "
            "or '.[tpu]'), or change JAX_PLATFORMS (unset: the best there is; cpu: always there)"
        ) from error


@contextlib.contextmanager
def exit_at_once_on_failure() -> Iterator[None]:
    """Among several processes, one that fails within the block ends without waiting for the rest.

    At its end JAX would wait for all processes, which wait in a collective for this one: a job that
    hangs. So this one leaves as soon as its message is out, and the others notice. After a failure
    that all processes share, they end together.
    """
    try:
        yield
    except JobStorageError as error:
        if jax.process_count() > 1:
            atexit.register(_leave_together, error.exit_code)
        raise
    except BaseException as error:
        if jax.process_count() == 1:
            raise
        failure = peer_lost_error(error) or error
        code = getattr(failure, "exit_code", Exit.ERROR.code)
        atexit.register(end_now, code)  # runs before JAX's, which was there first
        if failure is error:
            raise
        raise failure from error


def peer_lost_error(error: BaseException) -> PeerLostError | None:
    """Return the message for a connection that broke in a collective of CPUs; else None.

    JAX raises such an error as a `ValueError` where the collective runs in the call that starts it,
    and as a `JaxRuntimeError` where a later call waits for its result.
    """
    is_of_jax = isinstance(error, jax.errors.JaxRuntimeError | ValueError)
    broken = _BROKEN.search(str(error)) if is_of_jax else None
    if not broken:
        return None
    others = [i for i in range(jax.process_count()) if i != jax.process_index()]
    peer = f"process {others[0]}" if len(others) == 1 else "another process"
    return PeerLostError(
        f"{peer} of the job is gone, or cut off ({broken[1].strip()}). The log that ends first "
        "has the cause: logs/process_<i>.log, or what ended the process. Start all processes again "
        "to go on from the newest checkpoint, as `jaxforge supervise` does"
    )


def _leave_together(code: int) -> None:
    """End the process once the others of the job are at their end, too.

    Threads may still wait for other processes, in compiled code: the interpreter cannot end them.
    """
    with contextlib.suppress(RuntimeError):  # a process is gone
        jax.distributed.shutdown()
    end_now(code)


def distributed_arguments(env: Mapping[str, str]) -> dict[str, Any] | None:
    """Arguments for `jax.distributed.initialize`; None for a single process.

    Raises:
        UserError: some of a set of variables are there and others are missing, or not numbers.
    """
    if any(env.get(name) for name in _EXPLICIT):
        address, count, index = _values(env, _EXPLICIT)
    elif env.get("WORLD_SIZE") == "1" and env.get("MASTER_ADDR"):
        return None
    elif env.get("WORLD_SIZE") == "1" or not any(env.get(name) for name in _DECIDING):
        return {} if _cluster(env) else None
    elif _cluster(env) and not all(env.get(name) for name in _TORCHRUN):
        return {}  # scripts often set some of torchrun's; the scheduler knows better
    else:
        host, port, count, index = _values(env, _TORCHRUN)
        address = f"{host}:{port}"
    try:
        explicit = {"num_processes": int(count), "process_id": int(index)}
    except ValueError:
        raise UserError(f"process count {count!r} and index {index!r} must be integers") from None
    if not 0 <= explicit["process_id"] < explicit["num_processes"]:
        raise UserError(f"process index {index} must be at least 0 and below the count, {count}")
    return None if explicit["num_processes"] == 1 else {"coordinator_address": address, **explicit}


def _values(env: Mapping[str, str], names: tuple[str, ...]) -> list[str]:
    missing = [name for name in names if not env.get(name)]
    if missing:
        there = ", ".join(name for name in names if env.get(name))
        raise UserError(
            f"set {', '.join(missing)} too: {', '.join(names)} go together and describe a job of "
            f"several processes. For a single process unset {there}"
        )
    return [env[name] for name in names]


def _cluster(env: Mapping[str, str]) -> str | None:
    """The scheduler that started this job with several processes, if any."""
    if _number(env, "OMPI_COMM_WORLD_SIZE") > 1:
        return "Open MPI"
    if _number(env, "SLURM_STEP_NUM_TASKS") > 1:  # set by srun, not by a bare sbatch script
        return "SLURM"
    if len(env.get("TPU_WORKER_HOSTNAMES", "localhost").split(",")) > 1:
        return "GKE"
    if env.get("JAX_PLATFORMS", "tpu").startswith("tpu") and _on_tpu_vm():
        return "Cloud TPU"  # whose metadata server knows the rest, for one host as for many
    return None


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env.get(name) or "1")
    except ValueError:
        raise UserError(f"{name}={env[name]} must be an integer: correct or unset it") from None


def _on_tpu_vm() -> bool:
    has_chips = any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))
    return has_chips and importlib.util.find_spec("libtpu") is not None
