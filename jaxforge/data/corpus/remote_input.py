"""Input files by URL: `gs://`, `s3://` and `hf://datasets/…`, read in ranges.

    list_files(url)      names, sizes and versions
    open_input(file)     blocks in order, the next one requested ahead

`storage.files` makes the requests and repeats failed ones.
"""

import io
import os
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO, cast

from jaxforge.errors import InputChangedError, UserError
from jaxforge.storage import files, urls

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

LARGE = 1 << 20
"""Bytes of a file by URL from which on a request for its version costs little in comparison."""

_FIRST_BLOCK, _BLOCK = 256 << 10, 8 << 20  # blocks double from the first to the largest
_HUB = "hf://datasets/"


@dataclass(frozen=True)
class RemotePath:
    """A file by its URL, with the methods of a path that inputs need.

    Attributes:
        url: URL of the file.
        size: bytes of the file.
    """

    url: str
    size: int

    @property
    def name(self) -> str:
        """The part after the last slash."""
        return self.url.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The end of the name, from its last dot on."""
        return PurePosixPath(self.name).suffix

    def absolute(self) -> "RemotePath":
        """Return the path itself, as a URL is absolute."""
        return self

    resolve = absolute

    def __str__(self) -> str:
        return self.url


Location = Path | RemotePath
"""A file of this machine, or one by its URL."""


@dataclass(frozen=True)
class Listed:
    """A file of a listing.

    Attributes:
        path: the file.
        name: its path below the listed directory, or its name.
        version: text that changes with the content.
    """

    path: RemotePath
    name: str
    version: str


def is_url(text: str | os.PathLike) -> bool:
    """Return whether a location is a URL."""
    return urls.in_bucket(text)


def fault(text: str) -> str | None:
    """Return a message about an invalid URL of an input, or None."""
    if not text.startswith("hf://"):
        return urls.fault(text)
    parts = text.removeprefix(_HUB).split("/")
    if not text.startswith(_HUB) or len(parts) < 2 or not all(parts[:2]):
        return f"{text}: write {_HUB}OWNER/NAME, and perhaps a path below it"
    return None


def list_files(url: str) -> list[Listed]:
    """Return the file at a URL, or the files below it, sorted by name.

    Raises:
        UserError: nothing exists there, it cannot be read, or a package is not installed.
    """
    url = url.rstrip("/")
    try:
        # Buckets have no directories: only a listing shows whether the URL is a prefix.
        entries = files.entries(url)
        if entries:
            return [
                Listed(RemotePath(f"{url}/{name}", size), name, version)
                for name, size, version in entries
            ]
        name, size, version = files.stat(url)
    except FileNotFoundError:
        raise UserError(f"INPUT {url} does not exist, or is empty") from None
    except UserError as error:
        raise UserError(f"INPUT {error}") from error
    return [Listed(RemotePath(url, size), name, version)]


def current_version(path: RemotePath) -> tuple[int, str]:
    """Return the present size and version of a file by URL.

    Raises:
        InputChangedError: the file does not exist any more.
        StorageError, UserError: its version cannot be read.
    """
    try:
        _, size, version = files.stat(path.url)
    except FileNotFoundError as error:
        raise changed(path, "it does not exist any more") from error
    return size, version


def changed(path: Location | str, detail: str) -> InputChangedError:
    """Return the error for a file that is not in the state of the plan any more."""
    return InputChangedError(
        f"{path} changed since it was planned: {detail}. Repeat the command when nothing writes to "
        "it; it starts over",
        str(path),
    )


def open_input(location: Location) -> BinaryIO:
    """Open a file for reading; seekable, also by URL.

    Raises:
        OSError: a local file cannot be opened. Reads of a file by URL may raise UserError or
            StorageError.
    """
    if isinstance(location, RemotePath):
        return cast(BinaryIO, io.BufferedReader(_RangedFile(location), 1 << 16))
    return location.open("rb")


class _RangedFile(io.RawIOBase):
    """File by URL, read in blocks. While a block is used, the next one is requested.

    Args:
        path: the file.
    """

    def __init__(self, path: RemotePath) -> None:
        self._path, self._position = path, 0
        self._version = ""
        self._block, self._start, self._size = memoryview(b""), 0, _FIRST_BLOCK
        self._next: tuple[int, Future[files.Content]] | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._path.size}
        self._position = max(0, start[whence] + offset)
        return self._position

    def readinto(self, buffer: "WriteableBuffer") -> int:
        if self._position >= self._path.size:
            return 0
        if not self._start <= self._position < self._start + len(self._block):
            self._load()
        target = memoryview(buffer).cast("B")
        first = self._position - self._start
        data = self._block[first : first + len(target)]
        target[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        if self._next:
            self._next[1].cancel()
        super().close()

    def _load(self) -> None:
        """Get the block at the position, and request the next if reading is sequential."""
        # Jumps, as to the footer of a Parquet file, get small blocks; reading on doubles them.
        is_sequential = self._position == self._start + len(self._block)
        self._size = min(2 * self._size, _BLOCK) if is_sequential else _FIRST_BLOCK
        self._start = self._position
        # After a jump, the block that was requested ahead is another one.
        if not self._next or self._next[0] != self._position:
            self._next = self._position, self._fetch(self._position)
        try:
            data, version = self._next[1].result()
        except FileNotFoundError as error:
            raise changed(self._path, "it does not exist any more") from error
        # Blocks of an object and of its replacement must not make one file.
        if self._version not in ("", version):
            raise changed(self._path, "another object has its name")
        self._block, self._next, self._version = memoryview(data), None, version
        end = self._start + len(data)
        if is_sequential and end < self._path.size:
            self._next = end, self._fetch(end)

    def _fetch(self, start: int) -> Future[files.Content]:
        return files.fetch(self._path.url, start, min(start + self._size, self._path.size))
