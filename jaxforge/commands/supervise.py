"""`python -m jaxforge.supervise [options] -- COMMAND`: runs a command, and again when it fails.

    python -m jaxforge.supervise -- python -m jaxforge.train --config FILE ...
    python -m jaxforge.supervise -- --config FILE ...        the same

The exit code decides (`jaxforge.exit_codes`). Waits before each further start, twice as long each
time, until a start makes progress: it leaves a newer checkpoint than it found. SIGTERM, SIGINT and
SIGUSR1 are passed on to the command; its code is then the supervisor's, and it is not run again.
With `--nproc N` there are N processes on this machine, joined through the variables that
`parallel.multihost` reads; when one fails, the others are ended, and all run again. Nothing that
was started outlives the supervisor.
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
from jaxforge.checkpoint.paths import is_whole
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
    """A process of the command ended.

    Attributes:
        index: which of them.
        code: its exit code, as a shell gives it.
    """

    index: int
    code: int


Event = Ended | signal.Signals
"""What the supervisor waits for: the end of a process, or a signal to itself."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """Restart policy: exit codes that lead to a restart, and waiting times.

    Attributes:
        max_restarts: restarts in a row without progress.
        backoff: seconds before the first of them; twice as many before each one after it.
        backoff_cap: at most this many seconds.
        grace: seconds from a signal that is passed on to SIGKILL.
        peer_grace: seconds that the other processes have when one failed.
        again: exit codes to run again after, in addition to those of `exit_codes`.
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
    """The processes of one start, each in a process group of its own with what it starts itself.

    Args:
        command: what to run.
        count: how many times, as the processes of one job.
        events: where the end of each is announced.
        env: the environment of each.
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
        for item in self._running.items():  # threads only now: a fork with threads may deadlock
            threading.Thread(target=self._await, args=item, daemon=True).start()
        self.codes: list[int | None] = [None] * count
        self._cause: int | None = None
        self._is_killed = False

    def _await(self, index: int, process: subprocess.Popen[bytes]) -> None:
        # Left a zombie for a moment, so that its number, which is its group's, is still its own.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # its data workers, say
        self._events.put(Ended(index, exit_codes.exit_code(process.wait())))

    def ended(self, event: Ended) -> None:
        """Takes note of an end."""
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

        A process that noticed the loss of another one may end before the kernel has taken all from
        the lost one, and so before that one's end is seen: its own code is no cause.
        """
        return self._cause or 0

    def send(self, sig: signal.Signals) -> None:
        """Sends a signal to each process, but not to what it started."""
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, sig)

    def kill(self) -> None:
        """Ends each process with all that it started."""
        self._is_killed = True
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


class Supervisor:
    """Runs a command until it is done, is told to stop, or fails too often.

    Args:
        command: what to run.
        count: how many processes, on this machine.
        policy: when to run it again.
        run: the run directory, where progress shows and the log is kept; None where unknown.
    """

    def __init__(
        self, command: Sequence[str], count: int, policy: Policy, run: Path | None
    ) -> None:
        self._command, self._count, self._policy, self._run = command, count, policy, run
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._stopping: signal.Signals | None = None
        self._starts = self._failures = 0
        # The time limit of a job is that of all starts, unless another start is what follows it.
        has_limit = Exit.DURATION.code not in policy.again
        self._env = {**new_command_env(), **(began_env() if has_limit else {})}

    def run(self) -> int:
        """Starts the command as often as need be.

        Returns:
            The exit code of its last end; when told to stop between two starts, that of a stop.
        """
        with listening(_FORWARDED, self._events.put):
            while True:
                began, clock, step = time.time(), time.monotonic(), self._newest_step()
                group = self._one_start()
                progress = self._progressed(step, time.monotonic() - clock)
                self._failures = 1 if progress else self._failures + 1
                code = self._code(group)
                delay = self._decide(code)
                self._record(began, step, group, delay)
                if delay is None:
                    return code
                if not self._pause(delay):
                    return self._stop_code()

    def _one_start(self) -> Group:
        self._starts += 1
        log.info("start %d: %s", self._starts, shlex.join(self._command))
        group = Group(self._command, self._count, self._events, self._env)
        deadline = math.inf
        while group.running:
            deadline = self._handle(self._next(deadline), group, deadline)
        return group

    def _handle(self, event: Event | None, group: Group, deadline: float) -> float:
        """Returns when those that still run are to be killed."""
        match event:
            case Ended():
                group.ended(event)
                self._announce(event)
                if event.code not in {exit_.code for exit_ in AGREED}:
                    return min(deadline, time.monotonic() + self._policy.peer_grace)
                return deadline
            case signal.Signals():
                self._stopping = event
                log.info("%s: passed on; SIGKILL in %g s", event.name, self._policy.grace)
                group.send(event)
                return min(deadline, time.monotonic() + self._policy.grace)
            case None:
                log.warning("still running: SIGKILL")
                group.kill()
                return math.inf

    def _next(self, deadline: float) -> Event | None:
        """The next event, or None once it is `deadline`."""
        left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        try:
            return self._events.get(timeout=left)
        except queue.Empty:
            return None

    def _announce(self, end: Ended) -> None:
        which = f"process {end.index}" if self._count > 1 else "the command"
        log.info("%s ended with %d: %s", which, end.code, exit_codes.meaning(end.code))

    def _code(self, group: Group) -> int:
        """The code of a start; a process that the signal ended before it was ready stopped too."""
        died_of_it = self._stopping and group.code == 128 + self._stopping
        return self._stop_code() if died_of_it else group.code

    def _stop_code(self) -> int:
        return (Exit.INTERRUPT if self._stopping is signal.SIGINT else Exit.SIGNAL).code

    def _decide(self, code: int) -> float | None:
        """Seconds until the next start; None for none."""
        if self._stopping or not self._policy.runs_again(code):
            log.info("done: exit code %d", code)
            return None
        if self._failures > self._policy.max_restarts:
            log.error("%d starts in a row without progress, --max-restarts %d: exit code %d",
                      self._failures, self._policy.max_restarts, code)  # fmt: skip
            return None
        # Scattered, so that many of these do not come back at the same moment.
        delay = self._policy.delay(self._failures) * random.uniform(0.5, 1.0)
        log.info("running again in %.1f s (restart %d of %d without progress)",
                 delay, self._failures, self._policy.max_restarts)  # fmt: skip
        return delay

    def _pause(self, seconds: float) -> bool:
        """Wait; return whether no signal to stop arrived meanwhile."""
        event = self._next(time.monotonic() + seconds)
        if isinstance(event, signal.Signals):
            self._stopping = event
            log.info("%s: not running again", event.name)
        return event is None

    def _newest_step(self) -> int:
        """-1 for none; a checkpoint has its name once it is whole (`checkpoint.manager`)."""
        names = filter(is_whole, (self._run / "checkpoints").glob("step_*")) if self._run else ()
        steps = [int(number) for p in names if (number := p.name.partition("_")[2]).isdigit()]
        return max(steps, default=-1)

    def _progressed(self, step_before: int, seconds: float) -> bool:
        """Return whether a start left a newer checkpoint, or ran for an hour (other commands)."""
        if self._run is None:
            return seconds >= _HEALTHY_SEC
        return self._newest_step() > step_before

    def _record(self, began: float, step: int, group: Group, delay: float | None) -> None:
        """A line in the run directory, once there is one; objects cannot be appended to."""
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
        except OSError as error:  # a full disk is no reason not to run again
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
            "JAX_LOCAL_DEVICE_IDS": str(index),  # on GPUs, one each
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
    """Parses the command line, supervises, returns the exit code."""
    args = parser().parse_args(argv)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise UserError("say what to run: -- python -m jaxforge.train --config FILE ...")
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
        UserError: its config does not load.
    """
    arguments = _arguments_of_train(command)
    if arguments is None:
        return None
    from jaxforge.commands import train  # here, with all of the config: half a second
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
    """Its options."""
    parser = CommandParser(
        "supervise", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--max-restarts", type=int, default=10, metavar="N",
        help="restarts in a row without a newer checkpoint (10)")  # fmt: skip
    add("--backoff", type=float, default=5.0, metavar="SEC",
        help="seconds before the first of them, then doubled (5)")  # fmt: skip
    add("--backoff-cap", type=float, default=300.0, metavar="SEC",
        help="longest of these (300)")  # fmt: skip
    add("--grace", type=float, default=630.0, metavar="SEC",
        help="seconds from a signal that is passed on to SIGKILL (630, a little more than "
        "train.shutdown_timeout_sec)")  # fmt: skip
    add("--peer-grace", type=float, default=30.0, metavar="SEC",
        help="seconds left to the other processes when one failed (30)")  # fmt: skip
    add("--nproc", type=int, default=1, metavar="N",
        help="processes on this machine, with one GPU each (1)")  # fmt: skip
    add("--restart-on", type=int, action="append", default=[], metavar="CODE",
        help="run again after this exit code too, such as 75; may be repeated")  # fmt: skip
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def entry() -> int:
    """The command as this process was called; its exit code."""
    return run_main(main, outlives_reader=True)


if __name__ == "__main__":
    raise SystemExit(entry())
