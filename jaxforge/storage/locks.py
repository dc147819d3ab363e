"""File locks that end with their process, even by kill -9.

The locks work across hosts on file systems that propagate them, such as NFS, GPFS and Lustre
(mounted with `flock`). `run_lock` is for other file systems and for buckets.

A process holds the lock of `path` if it has locked the inode that `path` names at that time:

    holder   open(path) ─ lock ─ is path still this inode? yes ─ work ─ unlink(path) ─ close
    waiter   open(path) ─ lock (fails until close) ───────────────────────────────── lock
                          is path still this inode? no, it was unlinked ─ start again

`filelock` provides only the lock of a descriptor. Its `FileLock` does not remove the file. It also
mistakes a removed file that NFS keeps under another name for the locked file.
"""

import contextlib
import errno
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import lock_descriptor

log = logging.getLogger(__name__)

_UNSUPPORTED = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK)
_POLL_SEC = 0.05


@contextlib.contextmanager
def hold(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Create and lock a file, and remove it on exit.

    After kill -9 the file remains, but the kernel releases the lock for the next process.

    Args:
        path: the lock file.
        wait: wait until another process has released the lock.

    Yields:
        Whether this process holds the lock.
    """
    while (descriptor := _lock(path)) is None and wait:
        time.sleep(_POLL_SEC)
    if descriptor is None:
        yield False
        return
    try:
        yield True
    finally:
        # Unlink while the lock is held. After `close`, the path could already name the locked file
        # of another process, which must not be removed.
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _lock(path: Path) -> int | None:
    """Return a descriptor with the lock, and write the holder to the file; None if it is locked."""
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
            # Some mounts support no locks: continue without one.
            log.warning("%s: locks are not supported (%s); allow only one writer", path, error)
        # The previous holder may have unlinked the file between our open and our lock. Then the
        # lock is on an inode without a name, and another process may lock a new file of this name.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return descriptor
        os.close(descriptor)  # lock of a removed file: try again


def holder(path: Path) -> str:
    """Return the process and host that hold a lock, for messages."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_text() or "another process"
    return "another process"
