"""Safe writing in directories where other users may create links.

A run directory may come from another user, and a temporary directory is shared by all users. New
files are created under random names and renamed, which replaces a link and never follows it. Files
that grow are opened without following links.
"""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from jaxforge.storage import urls

_LINK = "this is a link or not a regular file, which is never written to; remove it"
_NOT_PRIVATE = "this is not a private directory of this user; remove it"


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[BinaryIO]:
    """Write a file atomically, replacing an existing one when the content is complete.

    Args:
        path: the file. A link of this name is replaced, and its target is unchanged.
        durable: sync the content to the disk before the rename.

    Raises:
        OSError: the file cannot be written; no partial file remains.
    """
    partial = temporary_path(path)
    # O_EXCL with a random name: nobody can have put a link there.
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


def temporary_path(path: Path) -> Path:
    """Return an unpredictable name in the directory of `path`, which ends in `.partial`."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")


def open_to_append(path: Path) -> BinaryIO:
    """Open a file unbuffered for appending, and create it if it does not exist.

    Raises:
        OSError: the path is a link, a pipe or a device, or cannot be written.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a pipe without a reader
            raise OSError(error.errno, _LINK, str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, _LINK, str(path))
    return os.fdopen(descriptor, "ab", buffering=0)


class IrregularFileError(OSError):
    """Error for a path that is not a regular file, or not as large as expected."""


def read_regular(path: Path, most: int, *, end: bytes = b"") -> bytes:
    """Return the content of a file from a stranger; a pipe would block, and a vast file not fit.

    Args:
        path: the file, or an object of a bucket, which is always regular.
        most: largest number of bytes of a local file.
        end: last bytes of a complete local file.

    Raises:
        IrregularFileError: the file is not a regular file, is larger, or has another end.
        OSError: the file does not exist, or cannot be read.
    """
    if urls.in_bucket(path):
        return path.read_bytes()
    # O_NONBLOCK: opening a pipe would wait for its writer. All checks are of the open file, which
    # nobody can exchange.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise IrregularFileError(errno.EINVAL, "it is not a regular file", str(path))
        if status.st_size > most:
            raise IrregularFileError(errno.EFBIG, f"it has {status.st_size:,} bytes", str(path))
        if end and os.pread(descriptor, len(end), max(0, status.st_size - len(end))) != end:
            raise IrregularFileError(errno.EINVAL, "its end is missing", str(path))
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Create a directory in a run directory, unless it exists.

    Raises:
        OSError: the path is a link or a file, or the directory cannot be created.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
    if path.is_symlink():
        raise OSError(errno.ELOOP, _LINK, str(path))


def private_directory(path: Path) -> None:
    """Create a directory that only this user can read, unless it exists.

    If others can read but not write an existing directory of this user, the permissions are fixed.

    Raises:
        OSError: the path is a link, belongs to another user, is writable by others, or cannot be
            created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        # Not by a later chmod: others could open the directory in between.
        path.mkdir(mode=0o700)
    except FileExistsError:
        status = os.lstat(path)
        is_of_user = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
        if is_of_user and not status.st_mode & 0o022:
            os.chmod(path, 0o700)
    if not is_private(path):
        raise OSError(errno.EPERM, _NOT_PRIVATE, str(path))


def is_private(path: Path) -> bool:
    """Return whether a path is a directory, not a link, that only this user can read."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    is_of_user = status.st_uid == os.getuid() and not status.st_mode & 0o077
    return stat.S_ISDIR(status.st_mode) and is_of_user
