"""Locks on files that end with the process that holds them, however it ends.

They hold among the machines of a file system that passes them on, as NFS, GPFS and Lustre (mounted
with `flock`) do. `run_lock` is for file systems and buckets that do not.

`filelock` locks the descriptor, not the path: its own `FileLock` leaves the file behind, and takes
a removed file that NFS keeps under another name for the locked one.
"""

import contextlib
import errno
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from filelock import lock_descriptor

from jaxforge.errors import UserError

log = logging.getLogger(__name__)

T = TypeVar("T")

_UNSUPPORTED = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK)
_POLL_SEC = 0.05


@contextlib.contextmanager
def hold(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Lock a file, which is created, and remove it at the end.

    Args:
        path: the file.
        wait: until another process has released it.

    Yields:
        False if another process holds the lock.
    """
    while (descriptor := _lock(path)) is None and wait:
        time.sleep(_POLL_SEC)
    if descriptor is None:
        yield False
        return
    try:
        yield True
    finally:
        path.unlink(missing_ok=True)  # before others can lock it
        os.close(descriptor)


def _lock(path: Path) -> int | None:
    """Return a descriptor that locks the file and names its holder; None if another one does."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            if not lock_descriptor(descriptor, blocking=False):
                os.close(descriptor)
                return None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                os.close(descriptor)
                raise
            log.warning("%s: no locks (%s); see that nothing else writes there", path, error)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return descriptor
        os.close(descriptor)  # its holder has removed the file since it was opened


def holder(path: Path) -> str:
    """Return the process and the host that hold a lock."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_text() or "another process"
    return "another process"


def wait_until(condition: Callable[[], T | None], seconds: float, what: str) -> T:
    """Return the first true value of a condition.

    Raises:
        UserError: it stayed false for `seconds`; `what` names it.
    """
    deadline = time.monotonic() + seconds
    while not (met := condition()):
        if time.monotonic() > deadline:
            raise UserError(f"waited {seconds / 60:g} minutes {what}, in vain")
        time.sleep(_POLL_SEC)
    return met
