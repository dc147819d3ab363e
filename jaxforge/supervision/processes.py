"""Processes of a supervised command."""

import contextlib
import dataclasses
import os
import queue
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence

from jaxforge import exit_codes
from jaxforge.cli.process import stop_with_parent
from jaxforge.errors import UserError
from jaxforge.exit_codes import Exit


@dataclasses.dataclass(frozen=True)
class Ended:
    """End of a process of the command.

    Attributes:
        index: index of the process.
        code: exit code, as in a shell.
    """

    index: int
    code: int


Event = Ended | signal.Signals
"""Event for the supervisor: the end of a process, or a signal to the supervisor."""


class Group:
    """The processes of one start, each in its own process group together with its children.

    Args:
        events: queue that receives the end of each process.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        events: "queue.SimpleQueue[Event]",
    ) -> None:
        self._events = events
        self._running = dict(enumerate(_start(command, env) for env in environments))
        for item in self._running.items():  # only now: a fork with threads may deadlock
            threading.Thread(target=self._wait_for, args=item, daemon=True).start()
        self.codes: list[int | None] = [None] * len(environments)
        self._cause: int | None = None
        self._is_killed = False

    def _wait_for(self, index: int, process: subprocess.Popen[bytes]) -> None:
        # WNOWAIT leaves a zombie, so that its pid, the group id, is not reused before killpg.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # children, such as data workers
        self._events.put(Ended(index, exit_codes.exit_code(process.wait())))

    def ended(self, event: Ended) -> None:
        """Record the end of a process."""
        del self._running[event.index]
        self.codes[event.index] = event.code
        peer_lost_error = self._cause == Exit.ABORTED.code and not self._is_killed
        # The first failure is the cause, unless it only reports the loss of another process.
        if event.code and (self._cause is None or peer_lost_error):
            self._cause = event.code

    @property
    def running(self) -> bool:
        """True if any process is left."""
        return bool(self._running)

    @property
    def code(self) -> int:
        """Exit code of the process that failed first; the others failed because of it.

        A process that detects the loss of a peer may end before the kernel has cleaned up the peer.
        Its exit code (`Exit.ABORTED`) is then replaced by that of the peer.
        """
        return self._cause or 0

    def send(self, sig: signal.Signals) -> None:
        """Send a signal to each process, but not to its children."""
        # Data workers must live until their parent has saved.
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, sig)

    def kill(self) -> None:
        """Kill each process together with its children."""
        self._is_killed = True
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def environments(
    env: Mapping[str, str], coordinator: str, first: int, count: int, total: int
) -> list[dict[str, str]]:
    """Return the environment of each process on this machine: JAX's variables for a job.

    Args:
        env: environment of all processes.
        coordinator: address of process 0 of the job.
        first: index of the first process on this machine.
        count: number of processes on this machine.
        total: number of processes in the job.
    """
    local = [{"JAX_LOCAL_DEVICE_IDS": str(i)} if count > 1 else {} for i in range(count)]
    job = {"JAX_COORDINATOR_ADDRESS": coordinator, "JAX_NUM_PROCESSES": str(total)}
    return [  # JAX_LOCAL_DEVICE_IDS: one GPU per process
        {**ids, **env, **job, "JAX_PROCESS_ID": str(first + i)} for i, ids in enumerate(local)
    ]


def free_port(host: str = "") -> int:
    """Return a free TCP port of this machine."""
    with socket.socket() as free:
        free.bind((host, 0))
        return free.getsockname()[1]


def _start(command: Sequence[str], env: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    try:
        # Its own process group: Ctrl-C reaches the supervisor alone, which forwards it.
        return subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, process_group=0,
            preexec_fn=stop_with_parent,
        )  # fmt: skip
    except OSError as error:
        raise UserError(f"cannot run {command[0]}: {error.strerror}") from error
