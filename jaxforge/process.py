"""Ending this process: at once where it is ours, never where somebody sits at it; with another."""

import contextlib
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence

_LIBC = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
_PR_SET_PDEATHSIG = 1  # prctl(2)


def is_interactive() -> bool:
    """Whether somebody sits at a prompt or a notebook: then the process is theirs."""
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
