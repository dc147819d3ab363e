"""Errors that are not bugs (bugs are assertions): commands print a message without a traceback."""

import errno
import traceback

FAILING_STORAGE = {
    errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN,
    errno.EHOSTDOWN, errno.EHOSTUNREACH,
}  # fmt: skip
"""Numbers of system errors that are no mistake of the user: the disk is full or does not answer."""


class UserError(ValueError):
    """A mistake of the user. The message says what is wrong, where, and what to change."""

    exit_code = 2


class StorageError(OSError):
    """A failed write of data that a run must keep. Data that were durable before still are."""

    exit_code = 74  # EX_IOERR


class JobStorageError(StorageError):
    """A `StorageError` that every process of a job raises at the same point."""


class PeerLostError(RuntimeError):
    """The loss of another process of the job. A restart of all processes resumes the run."""

    exit_code = 134  # the code of processes that the JAX runtime ends for this reason


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a process that an error ends.

    A disk that is full or does not answer has the code of `StorageError`, whatever error it became.
    """
    cause = error if isinstance(error, OSError) else error.__cause__ or error.__context__
    if isinstance(cause, OSError) and cause.errno in FAILING_STORAGE:
        return StorageError.exit_code
    code: int = getattr(error, "exit_code", 1)
    return code


def file_error(location: object, error: OSError) -> UserError | StorageError:
    """Return the error for a file that a command needs, with one message.

    Args:
        location: the file or the setting that names it.
        error: the error of the system.
    """
    if isinstance(error, StorageError):
        return error  # of a bucket, with its location
    kind = StorageError if error.errno in FAILING_STORAGE else UserError
    return kind(f"{location}: {error.strerror or error}")


def reason_and_line(error: BaseException) -> str:
    """Describe an error of a user's code, with the line that raised it or cannot be parsed."""
    reason = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, SyntaxError) and error.filename:
        return f"{reason} ({error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    while len(frames) > 1 and frames[-1].filename.startswith("<frozen importlib"):
        frames.pop()  # a failed import inside the user's code
    return f"{reason} ({frames[-1].filename}:{frames[-1].lineno})"


def printable(message: str) -> str:
    """Escape unprintable characters of a message, which names in files may contain."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in message
    )
