"""Connection of the processes of one job: SLURM, Open MPI, Cloud TPU, GKE, or explicit variables.

Explicit variables take precedence: those of JAX (`JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES`,
`JAX_PROCESS_ID`), then those of torchrun (`MASTER_ADDR`, `MASTER_PORT`, `WORLD_SIZE`, `RANK`).
Otherwise `jax.distributed` detects the cluster.
"""

import atexit
import contextlib
import dataclasses
import importlib.util
import logging
import os
import re
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils

from jaxforge.cli import streams
from jaxforge.cli.process import end_now
from jaxforge.errors import JobStorageError, PeerLostError, UserError, exit_code_of
from jaxforge.exit_codes import Exit

log = logging.getLogger(__name__)

_EXPLICIT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
_DECIDING = ("MASTER_ADDR", "WORLD_SIZE", "RANK")  # a port alone does not describe a job

JOIN_SEC = 300
"""Time in seconds that a process waits for the others of its job at the start."""

_BROKEN_CONNECTION = re.compile(r"Gloo .*gloo/transport/\S+ (.*)")

_AGENT_JOB_PORTS = range(20_000, 30_000)
CONNECT_SEC = 10.0  # timeout of one attempt to reach process 0

_THREADS = 4  # of XLA's pool for each virtual device of a CPU

_SHUTDOWN_SEC = 86_400
"""Time in seconds that finished processes wait for the others: process 0 may still be exporting.
If it dies meanwhile, its missing heartbeat ends the wait."""


def initialize(heartbeat_timeout_sec: int = 100, env: Mapping[str, str] = os.environ) -> None:
    """Call `jax.distributed.initialize` if the environment describes several processes.

    Must run before the first JAX computation. Has no effect for a single process. Afterwards, JAX
    ends this process (`Exit.ABORTED`) when another process of the job is lost.

    Args:
        heartbeat_timeout_sec: time without a heartbeat, in seconds, after which a process is lost;
            JAX's default is 100. The end of process 0 is noticed at once.
        env: environment variables that describe the job.

    Raises:
        UserError: there is no device, or process 0 cannot be reached.
    """
    enlarge_thread_pool()
    arguments = distributed_arguments(env)
    if arguments is not None:
        _join(arguments, heartbeat_timeout_sec)
    open_devices(env)
    if arguments is None:
        return
    log.info("process %d of %d, %d local devices", jax.process_index(), jax.process_count(),
             jax.local_device_count())  # fmt: skip


@dataclasses.dataclass(frozen=True)
class JoinedJob:
    """A job of several processes, as this process sees it.

    Attributes:
        index: index of this process.
        count: number of processes.
        address: address of the coordination service, in process 0.
        client: client of the coordination service, with the methods `key_value_*`.
    """

    index: int
    count: int
    address: str
    client: Any


def joined_job() -> JoinedJob | None:
    """Return the job that this process has joined; None for a single process."""
    # JAX has no public name for the client of the service, which is JAX's only key-value store.
    state = multihost_utils.distributed.global_state
    if state.client is None or state.num_processes == 1:
        return None
    address = state.coordinator_address or "an unknown address"
    return JoinedJob(state.process_id, state.num_processes, address, state.client)


def _join(arguments: dict[str, Any], heartbeat_timeout_sec: int) -> None:
    """Call `jax.distributed.initialize`, with messages instead of a silent wait and an abort."""
    for name in _EXPLICIT:  # an empty variable counts as unset, but JAX would read it
        if not os.environ.get(name, "unset"):
            del os.environ[name]
    awaited = _describe_awaited(arguments)
    log.info("waiting for %s, up to %g s", awaited, JOIN_SEC)
    if arguments.get("process_id"):
        _await_port(arguments["coordinator_address"], awaited)
    timeout = threading.Timer(JOIN_SEC, _exit_on_timeout, [awaited])
    timeout.daemon = True
    timeout.start()
    try:
        jax.distributed.initialize(
            **arguments,
            initialization_timeout=JOIN_SEC + 60,  # later than our timer: JAX aborts the process
            heartbeat_timeout_seconds=heartbeat_timeout_sec,
            shutdown_timeout_seconds=_SHUTDOWN_SEC,
        )
    except jax.errors.JaxRuntimeError as error:
        if "RPC server" not in str(error):
            raise
        raise UserError(
            f"process 0 cannot listen at {arguments.get('coordinator_address', 'its port')}: the "
            "port is in use by another job or by a process of an earlier one, or the address does "
            "not belong to this host. Give all processes another address"
        ) from error
    finally:
        timeout.cancel()


def _describe_awaited(arguments: dict[str, Any]) -> str:
    """Describe the processes that this one waits for."""
    if not arguments:
        return "the other processes of the job"  # JAX gets their address from the scheduler
    address, count = arguments["coordinator_address"], arguments["num_processes"]
    if arguments["process_id"] == 0:
        awaited = "process 1" if count == 2 else f"processes 1 to {count - 1}"
        return f"{awaited} to come to process 0 at {address}"
    return f"process 0 of {count} at {address}"


def _await_port(address: str, awaited: str) -> None:
    """Wait until process 0 listens. Hosts may start, and get their names, in any order."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + JOIN_SEC
    while True:
        try:
            address_port = (host.strip("[]"), int(port))
            socket.create_connection(address_port, timeout=CONNECT_SEC).close()
            return
        except ValueError:
            raise UserError(
                f"the coordinator address {address!r} must be a host and a port: host:port"
            ) from None
        except OSError as error:
            if time.monotonic() > deadline:
                message = _timeout_message(awaited, error.strerror or str(error))
                raise UserError(message) from error
        time.sleep(CONNECT_SEC / 10)


def _exit_on_timeout(awaited: str) -> None:
    stderr = streams.tolerant(sys.stderr)  # a broken pipe must not keep the process from ending
    message = _timeout_message(awaited, "some did not connect")
    print(f"error: {message}", file=stderr, flush=True)
    end_now(Exit.USER_ERROR.code, flush=False)


def _timeout_message(awaited: str, reason: str) -> str:
    return (
        f"waited {JOIN_SEC:g} s for {awaited}: {reason}. Check that all processes of the job are "
        "running with the same address, and that no firewall blocks this host. Then start them "
        "all again"
    )


def open_devices(env: Mapping[str, str] = os.environ) -> None:
    """Open the devices of this process.

    Args:
        env: environment variables; the message shows `JAX_PLATFORMS`.

    Raises:
        UserError: there are no devices, or the host's name has no address.
    """
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter for a platform without a plugin
        if "in use" in str(error):
            raise  # a process that is ending may hold them: a restart may succeed
        if "/gloo/" in str(error) and not _has_address(host := socket.gethostname()):
            raise UserError(
                f"{host}, the name of this host, has no address, at which the other processes "
                "reach this one: add it to /etc/hosts"
            ) from error
        platforms = env.get("JAX_PLATFORMS")
        prefix = f"JAX_PLATFORMS={platforms}: " if platforms else ""
        reason = str(error).partition(" (set JAX_PLATFORMS")[0].rstrip(".")
        reason = reason or "the platform does not exist on this machine"
        raise UserError(
            f"{prefix}JAX finds no devices: {reason}. Install the plugin of the platform (pip "
            "install '.[cuda]' or '.[tpu]'), or change JAX_PLATFORMS (unset: the fastest platform; "
            "cpu: works on every machine)"
        ) from error


def _has_address(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


@contextlib.contextmanager
def exit_at_once_on_failure(
    note_failure: Callable[[BaseException], None] | None = None,
) -> Iterator[None]:
    """End a process of several that fails within the block, without waiting for the others.

    At exit, JAX would wait for all processes, and these wait in a collective for this one: the job
    would hang. So this process ends as soon as its message is printed, and the others notice its
    loss. After a `JobStorageError`, which all processes raise, they end together.

    Args:
        note_failure: called with the failure before the process ends.
    """
    try:
        yield
    except JobStorageError as error:
        if jax.process_count() > 1:
            atexit.register(_exit_together, error.exit_code)
        raise
    except BaseException as error:
        if jax.process_count() == 1:
            raise
        failure = peer_lost_error(error) or error
        if note_failure is not None:
            note_failure(failure)
        code = exit_code_of(failure)
        atexit.register(end_now, code)  # runs before JAX's handler, which was registered earlier
        if failure is error:
            raise
        raise failure from error


def peer_lost_error(error: BaseException) -> PeerLostError | None:
    """Return the error for a connection that broke in a collective on CPU; None for other errors.

    JAX raises a `ValueError` if the collective runs in the call that starts it, and a
    `JaxRuntimeError` if a later call waits for its result.
    """
    is_from_jax = isinstance(error, jax.errors.JaxRuntimeError | ValueError)
    broken = _BROKEN_CONNECTION.search(str(error)) if is_from_jax else None
    if not broken:
        return None
    peers = [i for i in range(jax.process_count()) if i != jax.process_index()]
    peer = f"process {peers[0]}" if len(peers) == 1 else "another process"
    return PeerLostError(
        f"{peer} of the job is gone, or cut off ({broken[1].strip()}). The cause is at the end of "
        "the log that ends first (logs/process_<i>.log), or a signal ended the process. Start all "
        "processes again to resume from the newest checkpoint, as `jaxforge supervise` does"
    )


def _exit_together(code: int) -> None:
    """End the process when the other processes of the job end, too.

    Threads in compiled code may still wait for other processes, and the interpreter cannot end
    them.
    """
    with contextlib.suppress(RuntimeError):  # a process is lost
        jax.distributed.shutdown()
    end_now(code)


def distributed_arguments(env: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the arguments of `jax.distributed.initialize`; None for a single process.

    An empty mapping means that `jax.distributed` detects the cluster.

    Raises:
        UserError: some of the variables that belong together are missing, or are not numbers.
    """
    if any(env.get(name) for name in _EXPLICIT):
        address, count, index = _values(env, _EXPLICIT)
    elif env.get("WORLD_SIZE") == "1" and env.get("MASTER_ADDR"):
        return None
    elif env.get("WORLD_SIZE") == "1" or not any(env.get(name) for name in _DECIDING):
        return {} if _cluster(env) else None
    elif _cluster(env) and not all(env.get(name) for name in _TORCHRUN):
        return {}  # scripts often set some of torchrun's variables: the scheduler is reliable
    else:
        host, port, count, index = _values(env, _TORCHRUN)
        holds_port = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        address = f"{host}:{_port_of_agent_job(env) if holds_port else port}"
    try:
        explicit: dict[str, Any] = {"num_processes": int(count), "process_id": int(index)}
    except ValueError:
        raise UserError(f"process count {count!r} and index {index!r} must be integers") from None
    if not 0 <= explicit["process_id"] < explicit["num_processes"]:
        raise UserError(f"process index {index} must be at least 0 and below the count, {count}")
    if explicit["num_processes"] == 1:
        return None
    if _number(env, "LOCAL_WORLD_SIZE") > 1 and not env.get("JAX_LOCAL_DEVICE_IDS"):
        explicit["local_device_ids"] = [_number(env, "LOCAL_RANK")]  # of torchrun: a GPU each
    return {"coordinator_address": address, **explicit}


def _port_of_agent_job(env: Mapping[str, str]) -> int:
    """Return a port for process 0 if torchrun's agent listens on MASTER_PORT itself.

    All processes of the job compute the same port, and another one after each restart. It is below
    the range from which systems take ports for outgoing connections.
    """
    names = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    job = " ".join(env.get(name, "") for name in names)
    return _AGENT_JOB_PORTS[zlib.crc32(job.encode()) % len(_AGENT_JOB_PORTS)]


def _values(env: Mapping[str, str], names: tuple[str, ...]) -> list[str]:
    missing = [name for name in names if not env.get(name)]
    if missing:
        present = ", ".join(name for name in names if env.get(name))
        raise UserError(
            f"set {', '.join(missing)} too: {', '.join(names)} go together and describe a job of "
            f"several processes. For a single process unset {present}"
        )
    return [env[name] for name in names]


def _cluster(env: Mapping[str, str]) -> str | None:
    """Return the name of the scheduler that started a job of several processes, or None."""
    if _number(env, "OMPI_COMM_WORLD_SIZE") > 1:
        return "Open MPI"
    if _number(env, "SLURM_STEP_NUM_TASKS") > 1:  # set by srun, not by a bare sbatch script
        return "SLURM"
    if len(env.get("TPU_WORKER_HOSTNAMES", "localhost").split(",")) > 1:
        return "GKE"
    if env.get("JAX_PLATFORMS", "tpu").startswith("tpu") and on_tpu_vm():
        return "Cloud TPU"  # JAX asks its metadata server, for one host as for many
    return None


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env.get(name) or "1")
    except ValueError:
        raise UserError(f"{name}={env[name]} must be an integer: correct or unset it") from None


def on_tpu_vm() -> bool:
    """Return whether this machine has TPU chips and the library that drives them."""
    has_chips = any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))
    return has_chips and importlib.util.find_spec("libtpu") is not None


def enlarge_thread_pool(env: MutableMapping[str, str] = os.environ) -> None:
    """Give XLA:CPU more threads than can wait for each other at the same time.

    By default, its pool has one thread for each device. A device may be in several collectives at
    once, and each blocks a thread. Programs with independent collectives, such as pipelines,
    deadlocked (docs/upstream.md). Must be called before JAX opens its devices.

    Args:
        env: environment variables with XLA's flags. `NPROC`, the size of the pool, is set unless it
            exists.
    """
    counted = re.findall(r"xla_force_host_platform_device_count=(\d+)", env.get("XLA_FLAGS", ""))
    if counted and int(counted[-1]) > 1:
        env.setdefault("NPROC", str(_THREADS * int(counted[-1])))
