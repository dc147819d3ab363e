"""Bytes of files that may lie on this machine or behind a URL (fsspec: s3://, gs://, memory://)."""

import math
import mmap
import os
import posixpath
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxforge.errors import UserError
from torch_compat.lazy import Index, Lazy, extent


class Bytes(Protocol):
    """A file open for reading."""

    size: int

    def __call__(self, start: int, length: int) -> np.ndarray:
        """Bytes as a uint8 array; the caller has checked that they are there."""
        ...


class Directory:
    """A directory: local, or anything that fsspec knows.

    Args:
        path: a path, or a URL with `://`.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = os.fspath(path)
        self._fs: Any = None
        if self.path.startswith("file://"):
            self.path = self.path.removeprefix("file://")
        if "://" in self.path:
            self._fs, self._root = _filesystem(self.path)
        else:
            self.path = self._root = os.path.abspath(self.path)

    def __str__(self) -> str:
        return self.path

    def __truediv__(self, name: str) -> "Directory":
        return Directory(posixpath.join(self.path, name))

    @property
    def name(self) -> str:
        """The last component."""
        return posixpath.basename(self.path.rstrip("/"))

    def names(self) -> list[str]:
        """What it contains, sorted; nothing if it is no directory."""
        if self._fs is None:
            return sorted(os.listdir(self._root)) if os.path.isdir(self._root) else []
        if not self._fs.isdir(self._root):
            return []
        return sorted(posixpath.basename(p.rstrip("/")) for p in self._fs.ls(self._root, False))

    def has(self, name: str) -> bool:
        """Whether it has an entry of this name."""
        path = posixpath.join(self._root, name)
        return os.path.exists(path) if self._fs is None else self._fs.exists(path)

    def read(self, name: str) -> bytes:
        """A whole small file.

        Raises:
            UserError: it cannot be read.
        """
        file = self.open(name)
        return file(0, file.size).tobytes()

    def open(self, name: str) -> Bytes:
        """A file in it.

        Raises:
            UserError: the name leads out of the directory, or the file cannot be opened.
        """
        inside = posixpath.normpath(name)
        if posixpath.isabs(inside) or inside.split("/")[0] == ".." or "\0" in name:
            raise UserError(f"{self}: the file name {name!r} leads out of the checkpoint; refused")
        path = posixpath.join(self._root, inside)
        try:
            if self._fs is not None:
                return _Remote(self._fs, path)
            real = os.path.realpath(path)
            if not any(real.startswith(root + os.sep) for root in self._real_roots()):
                raise UserError(f"{self}: {name!r} is a link out of the checkpoint; refused")
            return _Local(path)
        except OSError as error:
            raise UserError(f"{self}: {name} cannot be read ({error.strerror or error})") from error

    def _real_roots(self) -> list[str]:
        """What links may lead into: itself, and in Hugging Face's cache the files it links to."""
        root = os.path.realpath(self._root)
        blobs = os.path.join(root, "../../blobs")
        cached = os.path.basename(os.path.dirname(root)) == "snapshots" and os.path.isdir(blobs)
        return [root, os.path.realpath(blobs)] if cached else [root]


class _Local:
    """Each read is a memory map of its own: when its array is gone, its pages no longer count.

    The file is opened for each, since a checkpoint of many ranks has more files than may be open.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        with open(path, "rb") as file:
            self.size = os.fstat(file.fileno()).st_size

    def __call__(self, start: int, length: int) -> np.ndarray:
        if not length:
            return np.empty(0, np.uint8)
        first = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        ahead = start - first
        with open(self._path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), ahead + length, access=mmap.ACCESS_READ, offset=first)
        return np.frombuffer(mapped, np.uint8)[ahead:]


class _Remote:
    def __init__(self, fs: Any, path: str) -> None:  # noqa: ANN401 (fsspec has no types)
        self._fs, self._path, self.size = fs, path, fs.size(path)

    def __call__(self, start: int, length: int) -> np.ndarray:
        try:
            read = self._fs.cat_file(self._path, start=start, end=start + length)
        except OSError as error:
            raise UserError(f"{self._path} cannot be read ({error})") from error
        if len(read) != length:
            raise UserError(f"{self._path}: {len(read)} bytes came where {length} were asked for")
        return np.frombuffer(read, np.uint8)


def _filesystem(url: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError:
        raise UserError(
            f'{url}: reading URLs needs fsspec: pip install "jaxforge[torch]"'
        ) from None
    try:
        return fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:  # no such protocol, or its package is missing
        raise UserError(f"{url}: {error}") from None


def in_file(
    file: Bytes,
    start: int,
    shape: tuple[int, ...],
    strides: Sequence[int],
    dtype: np.dtype,
    source: str,
) -> Lazy:
    """A tensor in a file; the caller has checked that it lies within.

    Args:
        file: the file.
        start: byte of its first element.
        shape: its shape.
        strides: elements from one entry of each dimension to the next.
        dtype: its dtype.
        source: file and name, for messages.
    """
    itemsize = dtype.itemsize
    in_bytes = tuple(stride * itemsize for stride in strides)

    def read(index: Index) -> np.ndarray:
        sizes = extent(index)
        if not math.prod(sizes):
            return np.empty(sizes, dtype)
        first = sum(s.start * stride for s, stride in zip(index, strides, strict=True))
        span = 1 + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))
        raw = file(start + first * itemsize, span * itemsize)
        return np.ndarray(sizes, dtype, raw.data, strides=in_bytes)

    return Lazy(shape, dtype, read, source)


def sync(path: Path) -> None:
    """Makes the data of a file, or the names in a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
