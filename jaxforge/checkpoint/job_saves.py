"""Saves of a job with several processes: all processes succeed, or all fail.

The processes of Orbax wait for one another at barriers, for ten minutes each. A process whose disk
is full waits there, too, before Orbax raises its error. Each process therefore watches Orbax's log
for its own failure, and the training loops, which reach the same points in the same order, exchange
the state of their saves (`await_all`).
"""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from jaxforge.errors import JobStorageError
from jaxforge.parallel.agreement import gather

_PAUSE_SEC = 0.05
_LONGEST_PAUSE_SEC = 0.5
_PENDING, _READY, _FAILED = range(3)

_ORBAX_LOG = logging.getLogger("absl")


def multiprocessing_options(directory: Path) -> ocp.options.MultiprocessingOptions:
    """Return options for barriers that any thread may use, separate for each directory.

    By default, Orbax uses device collectives, which would have to keep the order of the training
    loop's collectives.
    """
    if jax.process_count() == 1:
        return ocp.options.MultiprocessingOptions()
    return ocp.options.MultiprocessingOptions(
        active_processes=set(range(jax.process_count())), barrier_sync_key_prefix=str(directory)
    )


@contextlib.contextmanager
def watch_failures(directory: Path, note: Callable[[Exception], None]) -> Iterator[None]:
    """Call `note` with the error of a save into a directory as soon as Orbax logs it."""
    listener = _Listener(directory, note)
    _ORBAX_LOG.addHandler(listener)
    try:
        yield
    finally:
        _ORBAX_LOG.removeHandler(listener)


class _Listener(logging.Handler):
    def __init__(self, directory: Path, note: Callable[[Exception], None]) -> None:
        super().__init__(logging.ERROR)
        self._directory, self._note = f"{directory}{os.sep}", note

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, Exception) and self._directory in record.getMessage():
            self._note(error)


def await_all(is_ready: Callable[[], bool], failure: Callable[[], str]) -> None:
    """Return once every process is ready. All processes call this at the same point.

    Args:
        is_ready: returns whether this process is ready.
        failure: returns the error message of this process; empty if nothing has failed.

    Raises:
        JobStorageError: a process failed. Every process raises the same message.
    """
    # On CPU, collectives of concurrent programs could mix their messages, so steps must end first.
    jax.block_until_ready(jax.live_arrays())
    pause = _PAUSE_SEC
    while True:
        message = failure()
        state = _FAILED if message else _READY if is_ready() else _PENDING
        states = multihost_utils.process_allgather(np.array(state, np.int32))
        if (states == _FAILED).any():
            host = socket.gethostname()
            own = f"process {jax.process_index()} on {host}: {message}" if message else ""
            raise JobStorageError("; ".join(filter(None, gather(own))))
        if (states == _READY).all():
            return
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SEC)
