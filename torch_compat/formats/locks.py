"""Locks on files, which end with the process that has them, however it ends.

They hold among the machines of a file system that hands them on, as NFS, GPFS and Lustre (mounted
with `flock`) do.
"""

import errno
import fcntl
import logging
import os
import socket
from pathlib import Path

log = logging.getLogger(__name__)

_NONE_HERE = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK)


class Lock:
    """A lock that this process has.

    Args:
        path: the file that stands for it.
        descriptor: of the open file.
        shared: whether others may have it too.
    """

    def __init__(self, path: Path, descriptor: int, *, shared: bool) -> None:
        self._path, self._descriptor, self._shared = path, descriptor, shared

    def release(self) -> None:
        """Lets others have it; who has it alone removes the file."""
        if not self._shared:
            self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


def take(path: Path, *, shared: bool = False) -> Lock | None:
    """Takes a lock; None if somebody has it.

    Args:
        path: the file that stands for it; it is made.
        shared: for several at a time, as long as nobody takes it alone.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError as error:
            if error.errno not in _NONE_HERE:
                os.close(descriptor)
                raise
            log.warning("%s: no locks (%s); see that nothing else writes there", path, error)
        if _is_still(path, descriptor):
            break
        os.close(descriptor)  # who had it before has removed the file
    if not shared:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
    return Lock(path, descriptor, shared=shared)


def holder(path: Path) -> str:
    """Who has taken a lock alone: process and host."""
    try:
        return path.read_text() or "another process"
    except FileNotFoundError:
        return "another process"


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
