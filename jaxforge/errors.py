"""Failures that are not our own mistakes (those are assertions): one message, no traceback."""


class UserError(ValueError):
    """A mistake of the user's: what is wrong, where, and what to change, in one message."""

    exit_code = 2


class StorageError(OSError):
    """A disk that could not take what a run must keep; what was durable before still is."""

    exit_code = 74  # EX_IOERR


class JobStorageError(StorageError):
    """A `StorageError` that every process of a job raises at the same place."""


class PeerLostError(RuntimeError):
    """Another process of the job is gone: another start of all of them goes on."""

    exit_code = 134  # as of processes that the JAX runtime ends for that reason


def printable(message: str) -> str:
    """A message without what a terminal obeys or cannot show, which names in files may have."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in message
    )
