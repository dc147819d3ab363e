"""Reading and writing of file ranges, local or by URL (`storage.files`)."""

import contextlib
import errno
import math
import mmap
import os
import posixpath
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxforge.errors import UserError
from jaxforge.storage import files, urls
from jaxforge.storage.untrusted_json import DOCUMENT
from torch_compat.formats.lazy import Index, LazyTensor, index_shape
from torch_compat.formats.limits import shown

_LARGE = 64 << 10  # bytes from which on the kernel copies from file to file
CANNOT_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}


class Bytes(Protocol):
    """File open for reading."""

    size: int

    def __call__(self, start: int, length: int) -> np.ndarray:
        """Return a range as a uint8 array; the caller has checked that it is within the file."""
        ...


class Directory:
    """Directory that is local or has a URL (`storage.files`).

    Args:
        path: a path, or a URL with `://`.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = os.fspath(path)
        if self.path.startswith("file://"):
            self.path = self.path.removeprefix("file://")
        if urls.in_bucket(self.path):
            if "://" not in self.path:
                urls.path(self.path)  # raises: a slash is missing
        else:
            self.path = os.path.abspath(self.path)

    @property
    def _is_remote(self) -> bool:
        return urls.in_bucket(self.path)

    def __str__(self) -> str:
        return self.path

    def __truediv__(self, name: str) -> "Directory":
        return Directory(posixpath.join(self.path, name))

    @property
    def name(self) -> str:
        """Last component of the path."""
        return posixpath.basename(self.path.rstrip("/"))

    def names(self) -> list[str]:
        """Return the sorted names in the directory; empty if it is not a directory."""
        if self._is_remote:
            return files.names(self.path)
        return sorted(os.listdir(self.path)) if os.path.isdir(self.path) else []

    def resolved(self) -> "Directory":
        """Resolve symbolic links such as `latest`."""
        return self if self._is_remote else Directory(os.path.realpath(self.path))

    def stamps(self) -> dict[str, str]:
        """Return file name -> fingerprint (size, time and inode, or the store's metadata)."""
        if self._is_remote:
            entries = files.entries(self.path)
            return {name: f"{size} {version}" for name, size, version in entries if "/" not in name}
        if not os.path.isdir(self.path):
            return {}
        stats = [
            (entry.name, os.stat(entry)) for entry in os.scandir(self.path) if os.path.isfile(entry)
        ]
        return {name: f"{s.st_size} {s.st_mtime_ns} {s.st_ino}" for name, s in stats}

    def has(self, name: str) -> bool:
        """Return whether the directory has an entry of this name."""
        return name in self.names() if self._is_remote else os.path.exists(f"{self.path}/{name}")

    def read(self, name: str, most: int = DOCUMENT) -> bytes:
        """Read a small file as a whole; see `view` for arguments and errors."""
        return self.view(name, most).tobytes()

    def view(self, name: str, most: int) -> memoryview:
        """Return a file's content, memory-mapped if the file is local.

        Args:
            name: name of the file.
            most: largest size in bytes.

        Raises:
            UserError: the file cannot be read or is larger.
        """
        file = self.open(name)
        if file.size > most:
            raise UserError(f"{self}/{name}: {file.size} bytes, more than such a file can have")
        return file(0, file.size).data

    def open(self, name: str) -> Bytes:
        """Open a file of the directory.

        Raises:
            UserError: the name leads out of the directory, or the file cannot be opened.
        """
        inside = posixpath.normpath(name)
        if posixpath.isabs(inside) or inside.split("/")[0] == ".." or "\0" in name:
            raise UserError(
                f"{self}: the file name {shown(name)!r} leads out of the checkpoint; refused"
            )
        path = posixpath.join(self.path, inside)
        try:
            if self._is_remote:
                return _Remote(path)
            real = os.path.realpath(path)
            # The name is untrusted, and so are links in a downloaded directory.
            if not any(real.startswith(root + os.sep) for root in self._real_roots()):
                raise UserError(f"{self}: {shown(name)!r} is a link out of the checkpoint; refused")
            return _Local(path)
        except (OSError, ValueError) as error:  # ValueError: no file can have such a name
            what = getattr(error, "strerror", None) or error
            raise UserError(f"{self}: {shown(name)} cannot be read ({what})") from error

    def _real_roots(self) -> list[str]:
        """Return the targets allowed for links: the directory itself, and Hugging Face's cache."""
        root = os.path.realpath(self.path)
        # Hugging Face's cache: MODEL/snapshots/REVISION/NAME is a link to MODEL/blobs/HASH.
        snapshots = os.path.dirname(root)
        blobs = os.path.join(os.path.dirname(snapshots), "blobs")
        cached = os.path.basename(snapshots) == "snapshots" and os.path.realpath(blobs) == blobs
        return [root, blobs] if cached else [root]


class _Local:
    """Local file; each read is a separate memory map.

    A map is released with its array, so that its pages no longer count as memory of the process.
    The file is opened for each read, since a checkpoint of many ranks has more files than a process
    may have open.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        # A pipe without a writer would block the open.
        with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError("not a regular file")
        self.size = status.st_size

    def __call__(self, start: int, length: int) -> np.ndarray:
        if not length:
            return np.empty(0, np.uint8)
        # A map begins at a page.
        first = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        ahead = start - first
        try:
            with open(self._path, "rb") as file:
                size = ahead + length
                mapped = _Map(file.fileno(), size, mmap.MAP_SHARED, mmap.PROT_READ, offset=first)
        except (OSError, ValueError) as error:  # ValueError: the file has become shorter
            what = getattr(error, "strerror", None) or error
            raise _changed(self._path, what) from error
        # `_copy_in_kernel` finds the source of mapped data by these attributes.
        mapped.path, mapped.first = self._path, first
        return np.frombuffer(mapped, np.uint8)[ahead:]


class _Map(mmap.mmap):
    """Mapped range of a file.

    Attributes:
        path: path of the file.
        first: offset of the range in the file.
    """

    path: str
    first: int


def _changed(path: str, what: object) -> UserError:
    return UserError(
        f"{path} cannot be read any more ({what}): it must stay as it is until the end"
    )


class _Remote:
    def __init__(self, url: str) -> None:
        self._url, self.size = url, files.stat(url).size

    def __call__(self, start: int, length: int) -> np.ndarray:
        try:
            return np.frombuffer(files.read(self._url, start, start + length), np.uint8)
        except FileNotFoundError as error:
            raise _changed(self._url, "it does not exist any more") from error


def in_file(
    file: Bytes,
    start: int,
    shape: tuple[int, ...],
    strides: Sequence[int],
    dtype: np.dtype,
    source: str,
) -> LazyTensor:
    """Return a lazy tensor of a file; the caller has checked that it lies within the file.

    Args:
        file: the file.
        start: offset of the first element in bytes.
        shape: shape of the tensor.
        strides: strides in elements.
        dtype: dtype of the tensor.
        source: file and name for messages.
    """
    itemsize = dtype.itemsize
    in_bytes = tuple(stride * itemsize for stride in strides)

    def read(index: Index) -> np.ndarray:
        sizes = index_shape(index)
        if not math.prod(sizes):
            return np.empty(sizes, dtype)
        first = sum(s.start * stride for s, stride in zip(index, strides, strict=True))
        # In elements, from the first to the last of the index; strides may leave gaps.
        span = 1 + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))
        raw = file(start + first * itemsize, span * itemsize)
        return np.ndarray(sizes, dtype, raw.data, strides=in_bytes)

    return LazyTensor(shape, dtype, read, source)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Callable[[bytes | memoryview | np.ndarray, int], None]]:
    """Open a file that several processes write in parts; yield a function (data, offset) -> None.

    Data that are mapped from a file are copied inside the kernel. All data are durable on exit.
    """
    # No O_TRUNC: other units may have written their parts of the file already.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)

    def put(data: bytes | memoryview | np.ndarray, at: int) -> None:
        raw = np.frombuffer(data, np.uint8)
        if not _copy_in_kernel(raw, descriptor, at):
            _write(raw, descriptor, at)
        # Start the write-back of this range in the background. POSIX_FADV_DONTNEED does so, and
        # pages under write-back stay in the page cache.
        if raw.nbytes >= _LARGE and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, at, raw.nbytes, os.POSIX_FADV_DONTNEED)

    try:
        yield put
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(data: np.ndarray, descriptor: int, at: int) -> None:
    left = data.data
    while left:
        written = os.pwrite(descriptor, left, at)
        left, at = left[written:], at + written


def _copy_in_kernel(data: np.ndarray, descriptor: int, at: int) -> bool:
    """Copy mapped data from file to file (`copy_file_range`); return whether that worked.

    Args:
        data: contiguous bytes.
        descriptor: descriptor of the destination file.
        at: offset in the destination file.

    Raises:
        UserError: the source file has become shorter.
    """
    if data.nbytes < _LARGE or not hasattr(os, "copy_file_range"):
        return False
    mapped = _map_of(data)
    if mapped is None:
        return False
    # The distance of `data` from the start of the map is its distance in the file.
    begin = np.frombuffer(mapped, np.uint8).__array_interface__["data"][0]
    source = mapped.first + data.__array_interface__["data"][0] - begin
    left = data.nbytes
    with open(mapped.path, "rb") as file:
        while left:
            try:
                copied = os.copy_file_range(file.fileno(), descriptor, left, source, at)
            except OSError as error:
                # The caller then writes all of `data` again, also what was copied before the error.
                if error.errno in CANNOT_COPY:
                    return False
                raise
            if not copied:
                raise _changed(mapped.path, "it has become shorter")
            left, source, at = left - copied, source + copied, at + copied
    return True


def _map_of(data: np.ndarray) -> _Map | None:
    """Return the mapping that an array views, or None."""
    # Views of views: the chain of bases ends at the object that owns the memory.
    owner: Any = data
    while isinstance(owner, np.ndarray | memoryview):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    return owner if isinstance(owner, _Map) else None


def sync(path: Path) -> None:
    """Make the data of a file, or the names in a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network file systems cannot sync a directory
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def link(source: Path, target: Path) -> None:
    """Hard-link a file, or copy it if the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        sync(target)
