"""Ending this process: at once where it is ours, never where somebody sits at it; with another."""

import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

_LIBC = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
_PR_SET_PDEATHSIG = 1  # prctl(2)
_BEGAN = "JAXFORGE_BEGAN"  # seconds by the monotonic clock, which all processes of a host share
_IMPORTED = time.monotonic()


def began_env() -> dict[str, str]:
    """Return the environment variable that says when this command began.

    A command that a supervisor starts has begun when the supervisor did: a job's time limit does
    not start anew when the command fails.
    """
    return {_BEGAN: os.environ.get(_BEGAN) or repr(time.monotonic() - _age())}


def new_command_env() -> dict[str, str]:
    """Return the environment of a process whose time begins when it starts."""
    return {name: value for name, value in os.environ.items() if name != _BEGAN}


def began() -> float:
    """Return when the command began, by `time.monotonic`: now, where none was started."""
    return float(os.environ.get(_BEGAN) or time.monotonic())


def _age() -> float:
    """Return the seconds since this process was started; where /proc is missing, since imports."""
    try:
        status = Path("/proc/self/stat").read_text()
    except OSError:
        return time.monotonic() - _IMPORTED
    since_boot = int(status.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot


def is_interactive() -> bool:
    """Return whether the process belongs to an interactive prompt or notebook."""
    return hasattr(sys, "ps1")  # IPython's kernels set it, too


def end_now(code: int, *, flush: bool = True) -> None:
    """Ends the process, whatever its threads do; returns where it is not ours to end.

    Args:
        code: exit code.
        flush: write out first what was said; not where a disk or a lock may be what hangs.
    """
    if is_interactive():
        return
    if flush:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # gone, as who read it may be
                stream.flush()
    os._exit(code)


def stop_with_parent() -> None:
    """In a new process: SIGTERM as soon as who started it is gone, however it went (Linux)."""
    if _LIBC:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextlib.contextmanager
def listening(
    signals: Sequence[signal.Signals], receive: Callable[[signal.Signals], None]
) -> Iterator[None]:
    """Calls `receive` with each of these signals that comes; afterwards they are as they were."""
    previous = {
        sig: signal.signal(sig, lambda number, _: receive(signal.Signals(number)))
        for sig in signals
    }
    try:
        yield
    finally:
        for sig, handler in previous.items():
            signal.signal(sig, handler)
