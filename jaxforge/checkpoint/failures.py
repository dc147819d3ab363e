"""Errors of saves and restores as one message each, and whether storage or data are at fault."""

import contextlib
import errno
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxforge.errors import FAILING_STORAGE, JobStorageError, StorageError, UserError
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
