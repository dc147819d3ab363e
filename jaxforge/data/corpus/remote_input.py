"""Input files by URL: `gs://`, `s3://` and `hf://datasets/…`, read in ranges.

    list_files(url)      names and sizes     pyarrow (buckets), huggingface_hub
    open_input(file)     blocks in order, the next one requested ahead
                                             tensorstore (buckets), huggingface_hub

A block that does not arrive whole is requested again, with exponential backoff, until a deadline.
Credentials are found as by each cloud's tools; `buckets` has the variables for other endpoints.
"""

import contextlib
import functools
import io
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast

from jaxforge.data.corpus.optional import library
from jaxforge.errors import InputChangedError, StorageError, UserError
from jaxforge.storage import urls

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer
    from huggingface_hub import HfFileSystem

SCHEMES = ("gs", "s3", "hf")

DEADLINE_SECONDS = 300.0
"""Time after which a block that does not arrive is an error."""

LARGE = 1 << 20
"""Bytes of a file by URL from which on a request for its version costs little in comparison."""

_REQUEST_SECONDS = 60.0  # after which a request without an answer is repeated
_FIRST_DELAY, _LARGEST_DELAY = 0.1, 10.0  # seconds between requests
_FIRST_BLOCK, _BLOCK = 256 << 10, 8 << 20  # blocks double from the first to the largest
_THREADS = 16  # which request blocks ahead
_Result = TypeVar("_Result")
_HUB = "hf://datasets/"
_PERMANENT = ("NOT_FOUND", "PERMISSION_DENIED", "UNAUTHENTICATED", "OUT_OF_RANGE")


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
        version: number that changes with the content.
    """

    path: RemotePath
    name: str
    version: int


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
    files = list(_list_hub(url) if url.startswith("hf://") else _list_bucket(url))
    if not files:
        raise UserError(f"INPUT {url} does not exist, or is empty")
    return sorted(files, key=lambda file: file.name)


def current_version(path: RemotePath) -> tuple[int, int]:
    """Return the present size and version of a file by URL.

    Raises:
        InputChangedError: the file does not exist any more.
        StorageError, UserError: its version cannot be read.
    """
    if path.url.startswith("hf://"):
        return _repeated(path, functools.partial(_hub_version, path.url), "its version")
    for file in _list_bucket(path.url):
        if file.path.url == path.url:
            return file.path.size, file.version
    raise changed(path, "it does not exist any more")


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
        OSError: a local file cannot be opened. Reads of a file by URL may raise UserError, or
            StorageError after `DEADLINE_SECONDS`.
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
        self._read = _reader(path.url)
        self._block, self._start, self._size = memoryview(b""), 0, _FIRST_BLOCK
        self._next: tuple[int, Future[bytes]] | None = None

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
        is_sequential = self._position == self._start + len(self._block)
        self._size = min(2 * self._size, _BLOCK) if is_sequential else _FIRST_BLOCK
        self._start = self._position
        if self._next and self._next[0] == self._position:
            data = self._next[1].result()
        else:
            data = self._fetch(self._position, self._size)
        self._block, self._next = memoryview(data), None
        end = self._start + len(data)
        if is_sequential and end < self._path.size:
            self._next = end, _threads().submit(self._fetch, end, self._size)

    def _fetch(self, start: int, size: int) -> bytes:
        return read_whole(self._path, start, min(start + size, self._path.size), self._read)


Read = Callable[[int, int], bytes]
"""One request of a range of bytes, which may fail or return too few."""


def read_whole(path: RemotePath, start: int, end: int, read: Read) -> bytes:
    """Return a range of bytes of a file, requested until it arrives whole.

    Raises:
        InputChangedError: the file does not exist any more.
        UserError: it cannot be read at all.
        StorageError: it did not arrive within `DEADLINE_SECONDS`.
    """

    def request() -> bytes:
        data = read(start, end)
        if len(data) < end - start:
            raise OSError(f"{len(data)} of {end - start} bytes arrived")
        return data

    return _repeated(path, request, f"bytes {start} to {end}")


def _repeated(path: RemotePath, request: Callable[[], _Result], what: str) -> _Result:
    """Return the result of a request, which is repeated until it succeeds; raise as `read_whole`.

    Args:
        path: the file.
        request: the request.
        what: the result, for messages.
    """
    deadline, delay = time.monotonic() + DEADLINE_SECONDS, _FIRST_DELAY
    while True:
        try:
            return request()
        except FileNotFoundError as error:
            raise changed(path, "it does not exist any more") from error
        except UserError:
            raise
        except (OSError, TimeoutError, ValueError) as error:  # ValueError: from tensorstore
            reason = str(error).partition("\n")[0].partition(" [")[0] or type(error).__name__
            if reason.startswith(_PERMANENT) or _is_denied(error):
                raise UserError(f"{path}: {reason}") from error
        if time.monotonic() + delay > deadline:
            raise StorageError(
                f"{path}: {what} did not arrive in {DEADLINE_SECONDS:.0f} seconds ({reason})"
            )
        time.sleep(delay * random.uniform(0.5, 1.0))
        delay = min(2 * delay, _LARGEST_DELAY)


def _is_denied(error: Exception) -> bool:
    """Return whether an answer of the Hub says that repeating the request is useless."""
    response = getattr(error, "response", None)
    return getattr(response, "status_code", None) in (401, 403, 404)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, "remote_input")


def _reader(url: str) -> Read:
    if url.startswith("hf://"):
        path = url.removeprefix("hf://")
        return lambda start, end: _hub().cat_file(path, start=start, end=end)
    from jaxforge.storage import buckets

    store, generations = buckets.open_store(url), set[bytes]()

    def read(start: int, end: int) -> bytes:
        future = store.read("", byte_range=slice(start, end))
        answer = future.result(timeout=_REQUEST_SECONDS)
        if answer.state != "value":
            raise FileNotFoundError(url)
        generations.add(answer.stamp.generation)
        if len(generations) > 1:
            raise changed(url, "another object has its name")
        return answer.value

    return read


def _list_hub(url: str) -> Iterator[Listed]:
    root = url.removeprefix("hf://")
    try:
        files = _hub().find(root, detail=True)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"INPUT {url}: {str(error).partition(chr(10))[0]}") from error
    assert isinstance(files, dict)
    for path, info in files.items():
        file = RemotePath(f"hf://{path}", info["size"])
        blob = info.get("blob_id")  # missing if the URL names a file
        version = int(blob, 16) if blob else current_version(file)[1]
        # Not by the prefix: the Hub may spell the revision in another form than the URL.
        below = path.split("/")[root.count("/") + 1 :] or path.split("/")[-1:]
        yield Listed(file, "/".join(below), version)


def _hub_version(url: str) -> tuple[int, int]:
    """Return the size and the hash of a file of the Hub, without the cache of `_hub`."""
    from huggingface_hub import HfApi, RepoFile

    system = _hub()
    file: Any = system.resolve_path(url.removeprefix("hf://"))
    api = HfApi(endpoint=system.endpoint, token=system.token)
    infos = api.get_paths_info(
        file.repo_id, file.path_in_repo, revision=file.revision, repo_type="dataset"
    )
    for info in infos:
        if isinstance(info, RepoFile):
            return info.size, int(info.blob_id, 16)
    raise FileNotFoundError(url)


@functools.cache
def _hub() -> "HfFileSystem":
    from huggingface_hub import HfFileSystem

    return HfFileSystem()


def _list_bucket(url: str) -> Iterator[Listed]:
    scheme, _, root = url.partition("://")
    fs = library("pyarrow.fs", f"listing {scheme}:// inputs")
    arrow = library("pyarrow", f"listing {scheme}:// inputs")
    with _named(url, arrow.ArrowException):  # for wrong names; the others are OSErrors
        system = _s3(fs, root) if scheme == "s3" else _gcs(fs)
        info = system.get_file_info(root)
        if info.type == fs.FileType.File:
            infos = [info]
        else:
            selector = fs.FileSelector(root, recursive=True, allow_not_found=True)
            infos = system.get_file_info(selector)
    for info in infos:
        if info.type == fs.FileType.File:
            name = info.path.removeprefix(root).lstrip("/") or info.base_name
            path = RemotePath(f"{scheme}://{info.path}", info.size)
            # S3 answers with milliseconds for a listing, and with seconds for an object.
            unit = 10**9 if scheme == "s3" else 1
            yield Listed(path, name, (info.mtime_ns or 0) // unit)


def _s3(fs: Any, root: str) -> Any:  # noqa: ANN401
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if not region and not endpoint:
        region = fs.resolve_s3_region(root.partition("/")[0])
    return fs.S3FileSystem(
        region=region,
        endpoint_override=endpoint and endpoint.rstrip("/"),
        request_timeout=_REQUEST_SECONDS,
        connect_timeout=_REQUEST_SECONDS,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=10),
    )


def _gcs(fs: Any) -> Any:  # noqa: ANN401
    limit = timedelta(seconds=DEADLINE_SECONDS)
    endpoint = os.environ.get("TENSORSTORE_GCS_HTTP_URL")
    if not endpoint:
        return fs.GcsFileSystem(retry_time_limit=limit)
    scheme, _, host = endpoint.rstrip("/").partition("://")
    return fs.GcsFileSystem(
        anonymous=True, scheme=scheme, endpoint_override=host, retry_time_limit=limit
    )


@contextlib.contextmanager
def _named(url: str, other: type[Exception]) -> Iterator[None]:
    try:
        yield
    except (OSError, other) as error:
        raise UserError(f"INPUT {url}: {str(error).partition(chr(10))[0]}") from error
