"""Start time, signals and immediate exit of this process."""

import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxforge.exit_codes import STOP_SIGNALS

ROSTER_VARIABLE = "JAXFORGE_ROSTER"
"""Variable of processes of elastic jobs: identifier of the job, number of its list of hosts."""

# The C library that is already loaded: only Linux has prctl.
_LIBC = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
_PR_SET_PDEATHSIG = 1  # prctl(2)
_BEGAN = "JAXFORGE_BEGAN"  # in seconds of the monotonic clock, common to a host
_IMPORTED = time.monotonic()
_process_start: float | None = None


def _end(number: int, _: object) -> None:
    os._exit(128 + number)


DEFAULT_ACTION: Any = _end if os.getpid() == 1 else signal.SIG_DFL
"""Handler of signals that end the process at once.

The first process of a container is PID 1. Linux discards signals to PID 1 that have no handler, so
that there the default action, the end of the process, must be a handler of Python.
"""


def end_at_signals() -> None:
    """Let signals end a command at once.

    Commands can be ended at any time without loss. Python's default handler of Ctrl-C raises an
    exception inside some library, which not all libraries survive, and not while compiled code
    runs. `training.preemption`, `listening` and `cli.running` install other handlers.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, DEFAULT_ACTION)
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, DEFAULT_ACTION)


def began_env() -> dict[str, str]:
    """Return the environment variable with the start time of this command.

    A supervised command has the start time of its supervisor, so that the time limit of a job does
    not restart when the command fails.
    """
    return {_BEGAN: os.environ.get(_BEGAN) or repr(time.monotonic() - _age())}


def new_command_env() -> dict[str, str]:
    """Return the environment for a process with a start time of its own."""
    return {name: value for name, value in os.environ.items() if name != _BEGAN}


def began() -> float:
    """Return the start time of the command in `time.monotonic` seconds; now, if unknown."""
    return float(os.environ.get(_BEGAN) or time.monotonic())


def note_process_start() -> None:
    """Record that the command of this process trains, for `process_start`."""
    global _process_start
    _process_start = time.perf_counter() - _age()


def process_start() -> float:
    """Return the start of this process in `time.perf_counter` seconds.

    A process that does more than the training, such as a notebook, has none: then return now.
    """
    return time.perf_counter() if _process_start is None else _process_start


def _age() -> float:
    """Return the age of this process in seconds; without /proc, the time since the import."""
    try:
        status = Path("/proc/self/stat").read_text()
    except OSError:
        return time.monotonic() - _IMPORTED
    # Field 22 of proc(5); the name of the program may contain blanks and parentheses.
    since_boot = int(status.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot


def is_interactive() -> bool:
    """Return whether the process belongs to an interactive prompt or notebook."""
    return hasattr(sys, "ps1")  # also set by IPython kernels


def end_now(code: int, *, flush: bool = True) -> None:
    """End the process without waiting for its threads; return if it is interactive.

    Args:
        code: exit code.
        flush: flush logs and standard streams first; false if a disk or a lock may hang.
    """
    if is_interactive():
        return
    if flush:
        # `os._exit` runs no exit handlers, which would flush these.
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # closed by the reader
                stream.flush()
    os._exit(code)


def stop_with_parent() -> None:
    """Send SIGTERM to this process when its parent ends, even by SIGKILL (Linux only)."""
    if _LIBC:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def stop_signals() -> list[signal.Signals]:
    """Return the signals that request a stop of this process.

    `nohup` makes a process ignore SIGHUP, so that it survives its terminal.
    """
    survives_terminal = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [sig for sig in STOP_SIGNALS if not (sig is signal.SIGHUP and survives_terminal)]


def stop_message(sig: signal.Signals, action: str) -> str:
    """Return the message about a signal that requests a stop.

    Args:
        sig: the signal.
        action: effect of the signal.
    """
    second = ". A second Ctrl-C ends the run at once, without this checkpoint"
    return f"{sig.name}: {action}{second if sig is signal.SIGINT else ''}"


@contextlib.contextmanager
def listening(receive: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Call `receive` for each signal that requests a stop; restore the handlers on exit.

    Args:
        receive: handler of a signal. It interrupts the main thread, which may hold the lock of a
            stream or of the log. So it must neither print nor log, nor wait for a lock.
    """
    previous = {
        sig: signal.signal(sig, lambda number, _: receive(signal.Signals(number)))
        for sig in stop_signals()
    }
    try:
        yield
    finally:
        for sig, handler in previous.items():
            signal.signal(sig, handler)
