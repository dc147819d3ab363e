"""Errors that are not bugs (bugs are assertions): commands print a message without a traceback."""

import errno
import traceback

FAILING_STORAGE = {
    errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN,
    errno.EHOSTDOWN, errno.EHOSTUNREACH,
}  # fmt: skip
"""Numbers of system errors of a disk that is full or does not answer."""


LONGEST_MESSAGE = 4000
"""Largest number of characters of a message; files may contain names and values of any length."""

_END = 500  # characters of the end of a long message, which often says what to do


class UserError(ValueError):
    """A mistake of the user. The message says what is wrong, where, and what to change.

    Args:
        message: the message; from a longer one than `LONGEST_MESSAGE` the middle is left out.
        details: further arguments of a subclass, which other processes need to create it again.
    """

    exit_code = 2

    def __init__(self, message: str = "", *details: object) -> None:
        super().__init__(shortened(message), *details)


class InputChangedError(UserError):
    """An input that changed while it was read, so that work on it cannot be resumed.

    Args:
        message: see `UserError`.
        source: name of the input in the plan of the work.
    """

    def __init__(self, message: str, source: str) -> None:
        super().__init__(message, source)  # both, so that the error can be sent to other processes
        self.source = source

    def __str__(self) -> str:
        return self.args[0]


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
    # Libraries wrap errors of the system: look for the cause.
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


def unreadable(location: object, error: OSError, option: str) -> UserError | StorageError:
    """Return the error for an input that cannot be read.

    Args:
        location: the input.
        error: the error of the system.
        option: what leaves the input out, for a message about missing permissions.
    """
    location = f"cannot read {location}"
    if isinstance(error, PermissionError):
        message = f"{location}: {error.strerror}; let this user read it, or {option}"
        return UserError(message)
    return file_error(location, error)


def shortened(message: str, longest: int = LONGEST_MESSAGE) -> str:
    """Return a message without the middle of a long one; cut between words, if there are any.

    Args:
        message: the message.
        longest: largest number of characters.
    """
    if len(message) <= longest:
        return message
    end = min(_END, longest // 2)
    head, tail = message[: longest - end - 50], message[-end:]
    head = head[: head.rfind(" ", len(head) // 2)] if " " in head[len(head) // 2 :] else head
    tail = tail[tail.find(" ", 0, end // 2) + 1 :]
    left_out = len(message) - len(head) - len(tail)
    return f"{head} ... [{left_out:,} characters left out] ... {tail}"


def reason_and_line(error: BaseException) -> str:
    """Describe an error of a user's code, with the line that raised it or cannot be parsed."""
    reason = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, SyntaxError) and error.filename:
        return f"{reason} ({error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    # Frames of the import system do not help the author of a plugin.
    while len(frames) > 1 and frames[-1].filename.startswith("<frozen importlib"):
        frames.pop()  # a failed import inside the user's code
    return f"{reason} ({frames[-1].filename}:{frames[-1].lineno})"


def quoted(name: object) -> str:
    """Return a name for a message, in quotation marks if blanks at its ends would not be seen."""
    text = str(name)
    return text if text == text.strip() else f"'{text}'"


def printable(message: str) -> str:
    """Escape unprintable characters of a message, which names in files may contain."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in message
    )
