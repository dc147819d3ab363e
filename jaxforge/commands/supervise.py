"""`python -m jaxforge.supervise [options] -- COMMAND`: run a command and restart it on failure.

    python -m jaxforge.supervise -- python -m jaxforge.train --config FILE ...
    python -m jaxforge.supervise -- --config FILE ...        short form

The exit code decides about a restart (`jaxforge.exit_codes`). The pause before a restart doubles
until a start makes progress, which means that it writes a newer checkpoint. SIGTERM, SIGINT and
SIGUSR1 are forwarded to the command. The supervisor then exits with the code of the command,
without a restart. With `--nproc N`, N processes run on this machine, connected by the variables
that `parallel.multihost` reads. If one of them fails, the others are stopped and all are restarted.
No started process outlives the supervisor.
"""

import argparse
import contextlib
import dataclasses
import json
import logging
import math
import os
import queue
import random
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxforge import exit_codes
from jaxforge.checkpoint.paths import is_durable
from jaxforge.cli.process import began_env, listening, new_command_env, stop_with_parent
from jaxforge.cli.running import run_main
from jaxforge.commands.command_line import CommandParser
from jaxforge.errors import UserError
from jaxforge.exit_codes import AGREED, Exit
from jaxforge.storage import safe_files, trust, urls

log = logging.getLogger("jaxforge.supervise")

_LOG_FILE = "supervise.jsonl"
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_HEALTHY_SEC = 3600.0


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


@dataclasses.dataclass(frozen=True)
class Policy:
    """Restart policy: exit codes that lead to a restart, and waiting times.

    Attributes:
        max_restarts: consecutive restarts without progress.
        backoff: seconds before the first restart, doubled before each further restart.
        backoff_cap: maximum of these seconds.
        grace: seconds between a forwarded signal and SIGKILL.
        peer_grace: seconds until the other processes are killed after one has failed.
        again: further exit codes that lead to a restart, in addition to those of `exit_codes`.
    """

    max_restarts: int
    backoff: float
    backoff_cap: float
    grace: float
    peer_grace: float
    again: frozenset[int] = frozenset()

    def runs_again(self, code: int) -> bool:
        """Return whether a restart may help after an exit code."""
        return code in self.again or exit_codes.again(code)

    def delay(self, failures: int) -> float:
        """Return the pause in seconds after this many failures in a row, before jitter."""
        return min(self.backoff_cap, self.backoff * 2 ** (failures - 1))


class Group:
    """The processes of one start, each in its own process group together with its children.

    Args:
        command: command of each process.
        count: number of processes in the job.
        events: queue that receives the end of each process.
        env: environment of each process.
    """

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        events: "queue.SimpleQueue[Event]",
        env: Mapping[str, str],
    ) -> None:
        self._events = events
        self._running = dict(
            enumerate(_start(command, environment) for environment in _environments(count, env))
        )
        for item in self._running.items():  # only now: a fork with threads may deadlock
            threading.Thread(target=self._wait_for, args=item, daemon=True).start()
        self.codes: list[int | None] = [None] * count
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
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, sig)

    def kill(self) -> None:
        """Kill each process together with its children."""
        self._is_killed = True
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


class Supervisor:
    """Runs a command until it succeeds, is stopped, or fails too often.

    Args:
        command: command to run.
        count: number of processes on this machine.
        policy: restart policy.
        run: run directory, for progress and the log; None if unknown.
    """

    def __init__(
        self, command: Sequence[str], count: int, policy: Policy, run: Path | None
    ) -> None:
        self._command, self._count, self._policy, self._run = command, count, policy, run
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._stopping: signal.Signals | None = None
        self._starts = self._failures = 0
        # The time limit of a job covers all starts, unless reaching it leads to a restart.
        has_limit = Exit.DURATION.code not in policy.again
        self._env = {**new_command_env(), **(began_env() if has_limit else {})}

    def run(self) -> int:
        """Start the command as often as necessary.

        Returns:
            The exit code of the last start, or of a stop if stopped between two starts.
        """
        with listening(_FORWARDED, self._events.put):
            while True:
                began, clock, step = time.time(), time.monotonic(), self._newest_step()
                group = self._run_once()
                progress = self._progressed(step, time.monotonic() - clock)
                self._failures = 1 if progress else self._failures + 1
                code = self._code(group)
                delay = self._decide(code)
                self._record(began, step, group, delay)
                if delay is None:
                    return code
                if not self._pause(delay):
                    return self._stop_code()

    def _run_once(self) -> Group:
        self._starts += 1
        log.info("start %d: %s", self._starts, shlex.join(self._command))
        group = Group(self._command, self._count, self._events, self._env)
        deadline = math.inf
        while group.running:
            deadline = self._handle(self._next(deadline), group, deadline)
        return group

    def _handle(self, event: Event | None, group: Group, deadline: float) -> float:
        """Handle an event; return the time at which the remaining processes are killed."""
        match event:
            case Ended():
                group.ended(event)
                self._log_end(event)
                if event.code not in {exit_.code for exit_ in AGREED}:
                    return min(deadline, time.monotonic() + self._policy.peer_grace)
                return deadline
            case signal.Signals():
                self._stopping = event
                log.info("%s: forwarded; SIGKILL in %g s", event.name, self._policy.grace)
                group.send(event)
                return min(deadline, time.monotonic() + self._policy.grace)
            case None:
                log.warning("still running: SIGKILL")
                group.kill()
                return math.inf

    def _next(self, deadline: float) -> Event | None:
        """Return the next event, or None at the deadline."""
        left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        try:
            return self._events.get(timeout=left)
        except queue.Empty:
            return None

    def _log_end(self, end: Ended) -> None:
        which = f"process {end.index}" if self._count > 1 else "the command"
        log.info("%s ended with %d: %s", which, end.code, exit_codes.meaning(end.code))

    def _code(self, group: Group) -> int:
        """Return the exit code of a start; death by the stop signal counts as a stop."""
        is_stopped = self._stopping and group.code == 128 + self._stopping
        return self._stop_code() if is_stopped else group.code

    def _stop_code(self) -> int:
        return (Exit.INTERRUPT if self._stopping is signal.SIGINT else Exit.SIGNAL).code

    def _decide(self, code: int) -> float | None:
        """Return the seconds until the next start, or None for no restart."""
        if self._stopping or not self._policy.runs_again(code):
            log.info("done: exit code %d", code)
            return None
        if self._failures > self._policy.max_restarts:
            log.error("%d consecutive starts without progress, --max-restarts %d: exit code %d",
                      self._failures, self._policy.max_restarts, code)  # fmt: skip
            return None
        # Jitter, so that many supervisors do not restart at the same time.
        delay = self._policy.delay(self._failures) * random.uniform(0.5, 1.0)
        log.info("restarting in %.1f s (restart %d of %d without progress)",
                 delay, self._failures, self._policy.max_restarts)  # fmt: skip
        return delay

    def _pause(self, seconds: float) -> bool:
        """Wait; return False if a stop signal arrived."""
        event = self._next(time.monotonic() + seconds)
        if isinstance(event, signal.Signals):
            self._stopping = event
            log.info("%s: no restart", event.name)
        return event is None

    def _newest_step(self) -> int:
        """Return the step of the newest complete checkpoint, or -1."""
        names = filter(is_durable, (self._run / "checkpoints").glob("step_*")) if self._run else ()
        steps = [int(number) for p in names if (number := p.name.partition("_")[2]).isdigit()]
        return max(steps, default=-1)

    def _progressed(self, step_before: int, seconds: float) -> bool:
        """Return whether a start wrote a newer checkpoint; for other commands, ran for an hour."""
        if self._run is None:
            return seconds >= _HEALTHY_SEC
        return self._newest_step() > step_before

    def _record(self, began: float, step: int, group: Group, delay: float | None) -> None:
        """Append a line to the log in the run directory, if it exists and is local."""
        if self._run is None or urls.in_bucket(self._run) or not self._run.is_dir():
            return
        record: dict[str, Any] = {
            "host": socket.gethostname(),
            "start": self._starts,
            "began": began,
            "ended": time.time(),
            "codes": group.codes,
            "code": group.code,
            "meaning": exit_codes.meaning(group.code),
            "steps": [step, self._newest_step()],
            "signal": self._stopping.name if self._stopping else None,
            "again_in_sec": delay,
        }
        try:
            with safe_files.open_to_append(self._run / _LOG_FILE) as file:
                file.write(f"{json.dumps(record)}\n".encode())
        except OSError as error:  # a full disk does not prevent a restart
            log.warning("cannot write %s: %s", self._run / _LOG_FILE, error.strerror)


def _environments(count: int, env: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield the environment of each process: JAX's variables for the job, with a fresh port."""
    if count == 1:
        yield dict(env)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for index in range(count):
        yield {
            "JAX_LOCAL_DEVICE_IDS": str(index),  # one GPU per process
            **env,
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": str(count),
            "JAX_PROCESS_ID": str(index),
        }


def _start(command: Sequence[str], env: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, process_group=0,
            preexec_fn=stop_with_parent,
        )  # fmt: skip
    except OSError as error:
        raise UserError(f"cannot run {command[0]}: {error.strerror}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Supervise a command; return the exit code."""
    args = parser().parse_args(argv)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise UserError("a command is required: -- python -m jaxforge.train --config FILE ...")
    if command[0].startswith("-"):
        command = [sys.executable, "-m", "jaxforge.train", *command]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s supervise: %(message)s")
    policy = Policy(
        args.max_restarts, args.backoff, args.backoff_cap, args.grace, args.peer_grace,
        frozenset(args.restart_on),
    )  # fmt: skip
    return Supervisor(command, args.nproc, policy, run_directory(command)).run()


def run_directory(command: Sequence[str]) -> Path | None:
    """Return the run directory of a command that trains; None for other commands.

    Raises:
        UserError: the config cannot be loaded.
    """
    arguments = _arguments_of_train(command)
    if arguments is None:
        return None
    from jaxforge.commands import train  # takes half a second to import
    from jaxforge.config.reading.load import load_config

    args, overrides = train.parser().parse(arguments)
    if not args.config:
        return None
    config = load_config(args.config, overrides, trust.never)
    return urls.path(config.checkpoint.dir, "checkpoint.dir")


def _arguments_of_train(command: Sequence[str]) -> Sequence[str] | None:
    """Return the arguments of the supervised `jaxforge train` command, or None."""
    for i, word in enumerate(command):
        if word == "jaxforge.train":
            return command[i + 1 :]
        if Path(word).name == "jaxforge" and command[i + 1 : i + 2] == ["train"]:
            return command[i + 2 :]
    return None


def parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        "supervise", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--max-restarts", type=int, default=10, metavar="N",
        help="consecutive restarts without a newer checkpoint (10)")  # fmt: skip
    add("--backoff", type=float, default=5.0, metavar="SEC",
        help="seconds before the first restart, then doubled (5)")  # fmt: skip
    add("--backoff-cap", type=float, default=300.0, metavar="SEC",
        help="maximum pause before a restart (300)")  # fmt: skip
    add("--grace", type=float, default=630.0, metavar="SEC",
        help="seconds between a forwarded signal and SIGKILL (630, slightly more than "
        "train.shutdown_timeout_sec)")  # fmt: skip
    add("--peer-grace", type=float, default=30.0, metavar="SEC",
        help="seconds until the other processes are killed after one has failed (30)")  # fmt: skip
    add("--nproc", type=int, default=1, metavar="N",
        help="processes on this machine, one GPU each (1)")  # fmt: skip
    add("--restart-on", type=int, action="append", default=[], metavar="CODE",
        help="further exit code that leads to a restart, such as 75; repeatable")  # fmt: skip
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def entry() -> int:
    """Run the command of this process; return its exit code."""
    return run_main(main, outlives_reader=True)


if __name__ == "__main__":
    raise SystemExit(entry())
