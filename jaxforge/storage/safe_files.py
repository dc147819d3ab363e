"""Writing files where somebody else may have put links: run directories, temporary directories.

A run directory may be a stranger's, and a temporary directory belongs to all users of the machine.
New files are created under random names and moved into place by a rename, which replaces a link and
never follows it. Files that grow are opened without following links.
"""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_LINK = "this is a link or no regular file, and nothing is written through it; remove it"
_NOT_OURS = "this is no directory that belongs to this user alone; remove it"


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[BinaryIO]:
    """Write a file that takes its name when it is whole, in the place of an older one.

    Args:
        path: the file. A link of this name is replaced, and its target stays as it is.
        durable: its content is on the disk before it takes its name.

    Raises:
        OSError: the file cannot be written; nothing of it is left.
    """
    partial = beside(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(partial, flags, 0o666), "wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str) -> None:
    """Write a text file (UTF-8) as `replacing` does."""
    with replacing(path) as file:
        file.write(text.encode())


def beside(path: Path) -> Path:
    """Return an unpredictable name in the directory of `path`, which ends in `.partial`."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")


def open_to_append(path: Path) -> BinaryIO:
    """Open a file without a buffer, to write at its end; it is created if need be.

    Raises:
        OSError: it is a link, a pipe or a device, or cannot be written.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a pipe that nobody reads
            raise OSError(error.errno, _LINK, str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, _LINK, str(path))
    return os.fdopen(descriptor, "ab", buffering=0)


def make_directory(path: Path) -> None:
    """Make a directory within a run directory, unless it exists.

    Raises:
        OSError: it is a link or a file, or cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
    if path.is_symlink():
        raise OSError(errno.ELOOP, _LINK, str(path))


def private_directory(path: Path) -> None:
    """Make a directory that only this user can look into, unless it exists.

    One of this user's that others could read, and not write, is closed to them.

    Raises:
        OSError: it is a link, another user's, or one that others can write to; or it cannot be
            made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        status = os.lstat(path)
        is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
        if is_ours and not status.st_mode & 0o022:
            os.chmod(path, 0o700)
    if not is_private(path):
        raise OSError(errno.EPERM, _NOT_OURS, str(path))


def is_private(path: Path) -> bool:
    """Return whether a path is a directory, no link, that only this user can look into."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    is_ours = status.st_uid == os.getuid() and not status.st_mode & 0o077
    return stat.S_ISDIR(status.st_mode) and is_ours
