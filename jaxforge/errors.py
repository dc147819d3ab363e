"""Failures that are not our own mistakes (those are assertions): one message, no traceback."""


class UserError(ValueError):
    """A mistake of the user's: what is wrong, where, and what to change, in one message."""

    exit_code = 2


class StorageError(OSError):
    """A disk that could not take what a run must keep; what was durable before still is."""

    exit_code = 74  # EX_IOERR


class JobStorageError(StorageError):
    """A `StorageError` that every process of a job raises at the same place."""


def printable(message: str) -> str:
    """A message without what a terminal obeys or cannot show, which names in files may have."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in message
    )
