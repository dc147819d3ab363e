"""`gs://bucket/key` and `s3://bucket/key` as paths, through tensorstore's clients.

Such a path is an `epath.Path`, which Orbax accepts; the same clients transfer the arrays. Buckets
have no directories: a directory exists if an object exists below it, and is never renamed.
Throttled and failed requests are retried with exponential backoff for about 90 seconds. Before the
first request of a process, a service that cannot be reached at all is an error within seconds.

Credentials are found in the same locations as by each cloud's tools. `AWS_ENDPOINT_URL` and
`TENSORSTORE_GCS_HTTP_URL` select other endpoints.
"""

import fnmatch
import functools
import io
import json
import os
import re
from collections.abc import Callable, Iterator
from typing import IO, Any

import tensorstore as ts
from etils import epath
from etils.epath import backend as epath_backend
from etils.epath import gpath

from jaxforge.cli import streams
from jaxforge.errors import StorageError, UserError
from jaxforge.storage import COMMITTED

_DRIVERS = {"gs": "gcs", "s3": "s3"}
ACCESS_ERRORS = ("NOT_FOUND", "PERMISSION_DENIED", "UNAUTHENTICATED")  # retries do not help
_RETRIES = {"max_retries": 12, "initial_delay": "100ms", "max_delay": "16s"}
_FIRST_RETRIES = {"max_retries": 3, "initial_delay": "100ms", "max_delay": "1s"}
_FIRST_SEC = 20.0


def spec(url: str | os.PathLike) -> dict[str, Any]:
    """Return the tensorstore kvstore spec of the keys with the prefix of a URL."""
    scheme, _, path = os.fspath(url).partition("://")
    bucket, _, key = path.partition("/")
    driver = _DRIVERS[scheme]
    spec_: dict[str, Any] = {"driver": driver, "bucket": bucket, "path": key}
    spec_[f"{driver}_request_retries"] = _RETRIES
    if driver == "s3":
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        spec_ |= {"aws_region": region} if region else {}
        if "AWS_ACCESS_KEY_ID" in os.environ:
            spec_["aws_credentials"] = {"type": "environment"}
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        spec_ |= {"endpoint": endpoint.rstrip("/")} if endpoint else {}
    return spec_


def open_store(url: str | os.PathLike, requests: int | None = None) -> ts.KvStore:
    """Return the store of the objects with the key prefix of a URL.

    Args:
        url: the URL.
        requests: maximum number of concurrent requests. By default, and if the environment variable
            `TENSORSTORE_S3_REQUEST_CONCURRENCY` (or `_GCS_`) is set, tensorstore's.
    """
    parts = spec(url)
    key, driver = parts.pop("path"), parts["driver"]
    if requests and f"TENSORSTORE_{driver.upper()}_REQUEST_CONCURRENCY" not in os.environ:
        parts[f"{driver}_request_concurrency"] = {"limit": requests}
    return _open_bucket(json.dumps(parts)) + key


@functools.cache  # opening a bucket searches for credentials
def _open_bucket(bucket: str) -> ts.KvStore:
    parts = json.loads(bucket)
    # The client of AWS logs an error for each place without credentials, also before it finds some.
    with streams.without_native_logs():
        _check_reachable(parts)
    return ts.KvStore.open(parts).result()


def _check_reachable(parts: dict[str, Any]) -> None:
    """Check that the service of a bucket answers at all; any answer will do.

    Raises:
        StorageError: the host does not exist or does not answer.
    """
    retries = {f"{parts['driver']}_request_retries": _FIRST_RETRIES}
    try:
        ts.KvStore.open(parts | retries).result().read("-").result(timeout=_FIRST_SEC)
    except TimeoutError:
        reason = f"no answer within {_FIRST_SEC:g} s"
    except ValueError as error:
        reason = gist(error).rpartition("CURL error ")[2]
        if reason == gist(error):
            return  # a refusal is an answer
    else:
        return
    where = parts.get("endpoint") or f"bucket {parts['bucket']}"
    raise StorageError(
        f"{where} cannot be reached: {reason}. Correct the URL of the bucket or the endpoint "
        "(AWS_ENDPOINT_URL, TENSORSTORE_GCS_HTTP_URL), or check the network"
    )


def _with_url_in_errors(function: Callable) -> Callable:
    """Convert errors of the client to messages with the URL."""

    @functools.wraps(function)
    def wrapped(self: "_Objects", url: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        try:
            return function(self, url, *args, **kwargs)
        except ValueError as error:  # from tensorstore
            if gist(error).startswith(ACCESS_ERRORS):
                raise UserError(f"{os.fspath(url)}: {gist(error)}") from error
            raise StorageError(f"{os.fspath(url)}: {gist(error)}") from error

    return wrapped


class _Objects(epath_backend.Backend):
    """File-system interface that `epath` expects, over object keys."""

    @_with_url_in_errors
    def open(self, url: str, mode: str) -> IO:
        if "a" in mode:
            raise OSError(f"{url}: an object cannot be appended to")
        if "w" in mode:
            upload = _Upload(url)
            return upload if "b" in mode else _TextUpload(upload)
        raw = io.BytesIO(self._read(url))
        return raw if "b" in mode else io.TextIOWrapper(raw, encoding="utf-8")

    @_with_url_in_errors
    def exists(self, url: str) -> bool:
        return self._is_object(url) or self.isdir(url)

    @_with_url_in_errors
    def isdir(self, url: str) -> bool:
        return bool(keys(url))

    @_with_url_in_errors
    def listdir(self, url: str) -> list[str]:
        names = sorted({key.split("/", 1)[0] for key in keys(url)} - {""})
        if not names:
            raise FileNotFoundError(f"nothing at {url}")
        return names

    @_with_url_in_errors
    def glob(self, url: str) -> list[str]:
        root = url[: re.search(r"[*?[]|$", url).start()].rpartition("/")[0]  # type: ignore[union-attr]
        pattern, depth = url.split("/"), url.count("/") + 1
        paths = {"/".join(f"{root}/{key}".split("/")[:depth]) for key in keys(root)}
        return sorted(
            path for path in paths
            if len(parts := path.split("/")) == len(pattern)
            and all(map(fnmatch.fnmatchcase, parts, pattern))
        )  # fmt: skip

    def walk(self, top: str, **_: Any) -> Iterator[tuple[str, list[str], list[str]]]:  # noqa: ANN401
        raise NotImplementedError("a bucket has keys, which `iterdir` and `glob` find")

    def makedirs(self, url: str, *, exist_ok: bool = False, mode: int | None = None) -> None:
        self.mkdir(url, exist_ok=exist_ok)

    def mkdir(self, url: str, *, exist_ok: bool = False, mode: int | None = None) -> None:
        """Do nothing: a directory in a bucket exists with its first object."""
        if not exist_ok and self.exists(url):
            raise FileExistsError(f"{url} exists")

    @_with_url_in_errors
    def rmtree(self, url: str) -> None:
        if not self.isdir(url):
            raise FileNotFoundError(f"nothing at {url}")
        store = open_store(url.rstrip("/") + "/")
        # First, so that a partially removed checkpoint never looks committed.
        store.write(COMMITTED, None).result()
        store.delete_range(ts.KvStore.KeyRange()).result()

    @_with_url_in_errors
    def remove(self, url: str) -> None:
        if not self._is_object(url):
            raise FileNotFoundError(f"no object {url}")
        open_store(url).write("", None).result()

    def rename(self, url: str, dst: str) -> None:
        self.replace(url, dst)

    def replace(self, url: str, dst: str) -> None:
        """Replace one object; directories are never renamed, because that is not atomic."""
        self.copy(url, dst, overwrite=True)
        self.remove(url)

    def copy(self, url: str, dst: str, overwrite: bool) -> None:
        if not overwrite and self.exists(dst):
            raise FileExistsError(f"{dst} exists")
        with epath.Path(dst).open("wb") as file:
            file.write(epath.Path(url).read_bytes())

    @_with_url_in_errors
    def stat(self, url: str) -> epath.stat_utils.StatResult:
        if self.isdir(url):
            return epath.stat_utils.StatResult(is_directory=True, length=0, mtime=0)
        length = len(self._read(url))
        return epath.stat_utils.StatResult(is_directory=False, length=length, mtime=0)

    def _is_object(self, url: str) -> bool:
        answer = open_store(url).read("", byte_range=slice(0, 0)).result()
        return answer.state == "value"

    def _read(self, url: str) -> bytes:
        answer = open_store(url).read("").result()
        if answer.state != "value":
            raise FileNotFoundError(2, "no such object", url)
        return answer.value


class _Upload(io.BytesIO):
    """Object that is written completely by `close`, or not at all.

    It is not written by garbage collection, which could run at any time and in any thread. A late
    write could then replace newer content.
    """

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url

    def close(self) -> None:
        if not self.closed:
            data = self.getvalue()
            super().close()
            write(self._url, data)

    def abandon(self) -> None:
        """Close without writing the object."""
        super().close()

    __del__ = abandon

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is not None:
            self.abandon()  # do not write incomplete content
        self.close()


class _TextUpload(io.TextIOWrapper):
    """Text interface of an upload."""

    def __init__(self, upload: _Upload) -> None:
        super().__init__(upload, encoding="utf-8")
        self._upload = upload

    def __del__(self) -> None:
        self._upload.abandon()

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is not None:
            self._upload.abandon()
        self.close()


def write(url: str | os.PathLike, data: bytes) -> None:
    """Write an object atomically, replacing an existing one.

    Raises:
        StorageError: the object could not be written.
    """
    try:
        open_store(url).write("", data).result()
    except ValueError as error:
        raise StorageError(f"{os.fspath(url)}: {gist(error)}") from error


def head(url: str | os.PathLike, n: int) -> bytes:
    """Return the first n bytes of an object, or all bytes if it is shorter."""
    store = open_store(url)
    try:
        return store.read("", byte_range=slice(0, n)).result().value
    except ValueError as error:
        if "OUT_OF_RANGE" not in str(error):
            raise StorageError(f"{os.fspath(url)}: {gist(error)}") from error
        return store.read("").result().value


def other_length(url: str | os.PathLike, size: int) -> str | None:
    """Describe how the length of an object differs from `size` bytes, without reading it."""
    store = open_store(url)
    for first, wrong in ((size - 1, "is shorter"), (size, "is longer")):
        try:
            store.read("", byte_range=slice(first, first + 1)).result()
            has_byte = True
        except ValueError:
            has_byte = False
        if has_byte != (first < size):
            return wrong
    return None


def length(url: str | os.PathLike) -> int:
    """Return the size of an object without reading it: about ten rounds of requests of one byte.

    Raises:
        StorageError: the object cannot be read.
    """
    low, high = 0, _LARGEST  # the object has `low` bytes at least, and fewer than `high`
    probes = [1 << n for n in range(_LARGEST.bit_length() - 1)]
    store = open_store(url)
    while probes:
        answers = [store.read("", byte_range=slice(size - 1, size)) for size in probes]
        fits = [_has_bytes(url, answer) for answer in answers]
        low = max([low, *(size for size, fit in zip(probes, fits, strict=True) if fit)])
        high = min([high, *(size for size, fit in zip(probes, fits, strict=True) if not fit)])
        probes = sorted({low + (high - low) * n // 17 for n in range(1, 17)} - {low})
    return low


_LARGEST = 1 << 44  # S3 and GCS have no object as large


def _has_bytes(url: str | os.PathLike, answer: ts.Future) -> bool:
    try:
        return answer.result().state == "value"
    except ValueError as error:
        if "OUT_OF_RANGE" in str(error):
            return False
        raise StorageError(f"{os.fspath(url)}: {gist(error)}") from error


def gist(error: ValueError) -> str:
    """Return tensorstore's message without its context."""
    return str(error).split(" [")[0].partition("\n")[0]


def keys(url: str) -> list[str]:
    """Return the keys below a directory, relative to it."""
    return [key.decode() for key in open_store(url.rstrip("/") + "/").list().result()]


def stamps(url: str) -> dict[str, str]:
    """Return the generation of each object below a directory, which changes with each write."""
    store = open_store(url.rstrip("/") + "/")
    answers = {key: store.read(key, byte_range=slice(0, 0)) for key in keys(url)}
    return {key: read.result().stamp.generation.hex() for key, read in answers.items()}


@epath.register_path_cls(tuple(f"{scheme}://" for scheme in _DRIVERS))
class BucketPath(gpath.PosixGPath):
    """A path in a bucket."""

    def absolute(self) -> "BucketPath":
        """Return the path itself, because buckets have no working directory."""
        return self

    resolve = absolute

    @property
    def _backend(self) -> epath_backend.Backend:
        return _OBJECTS if self._uri_scheme else epath_backend.os_backend


_OBJECTS = _Objects()
