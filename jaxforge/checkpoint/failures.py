"""Errors of saves and restores as one message each, and saves that all processes make or none.

The processes of Orbax wait for one another at barriers, for ten minutes each. A process whose disk
is full waits there, too, before Orbax raises its error. Each process therefore watches Orbax's log
for its own failure, and the training loops, which reach the same points in the same order, exchange
the state of their saves (`await_all`).
"""

import contextlib
import errno
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxforge.errors import FAILING_STORAGE, JobStorageError, StorageError, UserError
from jaxforge.parallel.agreement import gather
from jaxforge.parallel.multihost import peer_lost_error

_ERRNOS = FAILING_STORAGE | {errno.ENOMEM, errno.EMFILE, errno.ENFILE}
_STATUSES = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED", "RESOURCE_EXHAUSTED")
_OS_ERROR = re.compile(r"\[os_error_code='(\d+)'\]")  # in messages of tensorstore


@contextlib.contextmanager
def naming_failed_save(directory: Path) -> Iterator[None]:
    """Rewrite Orbax's errors about failed writes, of any thread, as plain messages.

    Raises:
        StorageError: a checkpoint could not be written to the directory.
        PeerLostError: another process of the job is lost.
    """
    try:
        yield
    except JobStorageError:
        raise  # has its message, which is the same on all processes
    except (OSError, ValueError) as error:
        raise peer_lost_error(error) or StorageError(
            unwritten(directory, summary(error))
        ) from error


def unwritten(directory: Path, why: str) -> str:
    """Return the message about a checkpoint that could not be written."""
    return (
        f"a checkpoint could not be written to {directory} ({why}); existing checkpoints "
        "are complete: fix that, then run the same command to resume"
    )


@contextlib.contextmanager
def naming_damage(path: Path, earlier: Callable[[], int | None]) -> Iterator[None]:
    """Rewrite errors about a checkpoint that cannot be read as plain messages.

    Args:
        path: the checkpoint.
        earlier: returns the newest earlier step, if any.

    Raises:
        StorageError: the storage failed; the checkpoint may be intact.
        UserError: the checkpoint is damaged.
        PeerLostError: another process of the job is lost.
    """
    try:
        yield
    except (UserError, StorageError):
        raise
    except Exception as error:  # Orbax raises plain `Exception` for an unreadable array
        if lost := peer_lost_error(error):
            raise lost from error
        why = summary(error.__cause__ or error)
        # Nobody should delete a sound checkpoint because a disk did not answer.
        if is_storage_failure(error):
            raise StorageError(
                f"{path} could not be read ({why}); nothing was changed: run the "
                "same command again once the storage answers"
            ) from error
        step = earlier()
        hint = f"remove it to go on from step {step}, or " if step is not None else ""
        raise UserError(f"{path} is damaged ({why}); {hint}bring it back from a copy") from error


def is_storage_failure(error: BaseException) -> bool:
    """Return whether a read failed because of the storage: its content may be sound."""
    return any(map(_is_failure, _causes(error)))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error:
        yield error
        error = error.__cause__ or error.__context__


def _is_failure(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in _ERRNOS
    text = str(error)
    code = _OS_ERROR.search(text)
    return text.startswith(_STATUSES) or (code is not None and int(code[1]) in _ERRNOS)


def summary(error: BaseException) -> str:
    """Return the message of the system, or else the end of the text, where libraries put causes."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    text = str(error).split(" [tensorstore_spec=")[0].split(" [os_error_code=")[0]
    return text if len(text) < 160 else "... " + text[-160:]


_PAUSE_SEC = 0.05
_LONGEST_PAUSE_SEC = 0.5
_PENDING, _READY, _FAILED = range(3)

_ORBAX_LOG = logging.getLogger("absl")


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
        # Two managers of a process log to the same logger: the path tells whose save failed.
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
        # Every process sends its state in every turn, so that none waits in vain.
        state = _FAILED if message else _READY if is_ready() else _PENDING
        states = multihost_utils.process_allgather(np.array(state, np.int32))
        if (states == _FAILED).any():
            host = socket.gethostname()
            report = f"process {jax.process_index()} on {host}: {message}" if message else ""
            raise JobStorageError("; ".join(filter(None, gather(report))))
        if (states == _READY).all():
            return
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SEC)
