"""Files by URL: list, read, write and remove.

    gs://, s3://     obstore (Rust's object_store), whose requests leave Python's lock alone
    hf:// and others fsspec, for reading; that of `hf` comes with huggingface_hub

obstore reads blocks of 64 KiB with a quarter of the CPU time of s3fs and at twelve times its rate,
and its answers name the version of the object (docs/architecture.md has the figures).

Credentials are found in the same places as by each cloud's tools. `AWS_ENDPOINT_URL` and
`TENSORSTORE_GCS_HTTP_URL` select other endpoints; Orbax's client takes them too.
"""

import asyncio
import bisect
import concurrent.futures
import contextlib
import functools
import os
import posixpath
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import obstore
from obstore.store import GCSStore, S3Store

from jaxforge.errors import StorageError, UserError
from jaxforge.storage.requests import (
    CONNECT_SEC,
    DATA_PATIENCE_SEC,
    RefusedError,
    attempts,
    count,
    endpoint,
    submit,
    wait,
)

BUCKETS = ("gs", "s3")

_DAMAGED_ATTEMPTS = 3  # damage that a third copy still has is that of the object
_CONCURRENT = int(os.environ.get("JAXFORGE_BUCKET_REQUESTS", "64"))  # range requests at a time
_LARGE = 600_000_000  # bytes for which a file of unknown size gets time
_PAGE = 1000  # files per request of a listing, as in S3 and GCS


class Entry(NamedTuple):
    """A file of a listing.

    Attributes:
        name: path below the listed directory.
        size: bytes.
        version: text that changes with the content.
    """

    name: str
    size: int
    version: str


class Content(NamedTuple):
    """Bytes of a file.

    Attributes:
        data: the bytes.
        version: version of the file they belong to; "" if the service does not tell.
    """

    data: bytes
    version: str


def entries(url: str | os.PathLike) -> list[Entry]:
    """Return all files below a directory, sorted by name; none if it does not exist."""
    service, key = _open(url)
    listed: list[Entry] = []
    while True:  # page by page, so that a failure repeats one page and not a listing of millions
        after = f"{key}/{listed[-1].name}" if listed else None
        request = functools.partial(service.page, key, after)
        page = wait(attempts(url, request, "the listing"))
        listed += page
        if len(page) < _PAGE:
            return sorted(_without_markers(listed))


def names(url: str | os.PathLike) -> list[str]:
    """Return the sorted names of files and directories in a directory."""
    service, key = _open(url)
    return sorted(set(wait(attempts(url, lambda: service.names(key), "the listing"))) - {""})


def stat(url: str | os.PathLike) -> Entry:
    """Return name, size and version of a file.

    Raises:
        FileNotFoundError: it does not exist.
    """
    service, key = _open(url)
    return wait(attempts(url, lambda: service.stat(key), "the request of its size"))


def read(url: str | os.PathLike, start: int = 0, end: int | None = None) -> bytes:
    """Return a file, or a range of its bytes.

    Args:
        url: the file.
        start: first byte.
        end: byte after the last; None for all.

    Raises:
        FileNotFoundError: it does not exist.
        RefusedError: it may not be read, or is shorter than the range.
        StorageError: it did not arrive.
    """
    size = _LARGE if end is None else end - start
    request = _read_request(url, start, end)
    return wait(attempts(url, request, _extent(start, end), size=size)).data


def head(url: str | os.PathLike, n: int) -> bytes:
    """Return the first n bytes of a file, or all bytes if it is shorter."""
    return read(url, 0, min(n, stat(url).size))


def fetch(
    url: str | os.PathLike,
    start: int,
    end: int,
    check: Callable[[bytes], None] = lambda _: None,
) -> Future[Content]:
    """Start to read a range of a file in the background, which `traffic` counts.

    Args:
        url: the file.
        start: first byte.
        end: byte after the last.
        check: raises UserError if the bytes are damaged. Then they are fetched again, and the last
            error is raised.

    Returns:
        The future of the bytes, with the errors of `read`.
    """
    read_once, damaged, n_requests = _read_request(url, start, end), 0, 0

    async def request() -> Content:
        nonlocal damaged, n_requests
        n_requests += 1
        count(requests=int(n_requests > 1))
        content = await read_once()
        try:
            check(content.data)
        except UserError as error:
            damaged += 1
            if damaged == _DAMAGED_ATTEMPTS:
                raise
            raise OSError(str(error)) from error
        count(bytes_fetched=len(content.data))
        return content

    count(requests=1)  # the first one here, so that the caller's next look at `traffic` has it
    what = _extent(start, end)
    return submit(attempts(url, request, what, DATA_PATIENCE_SEC, _data_requests))


def _read_request(
    url: str | os.PathLike, start: int, end: int | None
) -> Callable[[], Coroutine[Any, Any, Content]]:
    service, key = _open(url)

    async def request() -> Content:
        if start == end:  # services refuse empty ranges
            return Content(b"", "")
        content = await service.read(key, start, end)
        # Some services end an answer early without an error.
        if end is not None and len(content.data) != end - start:
            raise OSError(f"{len(content.data)} bytes arrived instead of {end - start}")
        return content

    return request


def _extent(start: int, end: int | None) -> str:
    return "the read" if end is None else f"the read of bytes {start:,} to {end - 1:,}"


def write(url: str | os.PathLike, data: bytes) -> None:
    """Write a file of a bucket atomically, replacing an existing one.

    Raises:
        StorageError: the file was not written.
    """
    service, key = _open_bucket(url)
    try:
        wait(attempts(url, lambda: service.write(key, data), "the upload", size=len(data)))
    except RefusedError as error:  # permissions may change while a run goes on
        raise StorageError(str(error)) from error


def remove(url: str | os.PathLike, names: Iterable[str] = ("",)) -> None:
    """Remove files of a bucket; missing ones are ignored.

    Args:
        url: a directory or a file.
        names: names of the files below the URL.
    """
    service, key = _open_bucket(url)
    keys = [posixpath.join(key, name).rstrip("/") for name in names]
    # GCS has no request for several objects. Each request is repeated by itself: of many in one
    # attempt, a throttled bucket would always refuse some.
    n = _PAGE if os.fspath(url).startswith("s3:") else 1
    requests = [functools.partial(service.remove, keys[i : i + n]) for i in range(0, len(keys), n)]
    futures = [
        submit(attempts(url, request, "the removal", limit=_data_requests)) for request in requests
    ]
    concurrent.futures.wait(futures)  # also after a failure: nothing is removed after the error
    for future in futures:
        future.result()


class _Service(Protocol):
    """Requests to one bucket or file system. Keys have no slash at their ends."""

    async def read(self, key: str, start: int, end: int | None) -> Content: ...
    async def stat(self, key: str) -> Entry: ...
    async def names(self, key: str) -> list[str]: ...
    async def page(self, key: str, after: str | None) -> list[Entry]: ...


class _Bucket:
    """Requests to a bucket through obstore, without repetitions.

    Args:
        scheme: gs or s3.
        bucket: name of the bucket.
        address: endpoint; "" for that of the cloud.
    """

    def __init__(self, scheme: str, bucket: str, address: str) -> None:
        options: dict[str, Any] = {
            # Timeouts and repetitions are those of `attempts`.
            "client_options": {
                "allow_http": True,
                "timeout": "1 hour",
                "connect_timeout": f"{CONNECT_SEC:g} s",
                "read_timeout": "30 s",  # without progress
            },
            "retry_config": {"max_retries": 0},
            **_credentials(scheme, address),
        }
        if scheme == "s3":
            region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
            if region := region or ("" if address else _region_of(bucket)):
                options["region"] = region
            options |= {"endpoint": address} if address else {}
            self._store: Any = S3Store(bucket, **options)
        else:
            self._store = GCSStore(bucket, **options | ({"base_url": address} if address else {}))

    async def read(self, key: str, start: int, end: int | None) -> Content:
        options: Any = {} if end is None else {"range": (start, end)}
        answer = await obstore.get_async(self._store, key, options=options)
        if end is not None and end > answer.meta["size"]:
            raise RefusedError(f"it has only {answer.meta['size']:,} bytes")
        return Content(bytes(await answer.buffer_async()), _version(answer.meta))

    async def stat(self, key: str) -> Entry:
        meta = await obstore.head_async(self._store, key)
        return Entry(posixpath.basename(key), meta["size"], _version(meta))

    async def names(self, key: str) -> list[str]:
        listed = await obstore.list_with_delimiter_async(self._store, key)
        paths = [*listed["common_prefixes"], *(meta["path"] for meta in listed["objects"])]
        return [path[len(key) :].lstrip("/") for path in paths]

    async def page(self, key: str, after: str | None) -> list[Entry]:
        async for page in obstore.list(self._store, key, offset=after, chunk_size=_PAGE):
            return [
                Entry(meta["path"][len(key) :].lstrip("/"), meta["size"], _version(meta))
                for meta in page
            ]
        return []

    async def write(self, key: str, data: bytes) -> None:
        await obstore.put_async(self._store, key, data, use_multipart=False)

    async def remove(self, keys: list[str]) -> None:
        with contextlib.suppress(FileNotFoundError):  # GCS says so, S3 does not
            await obstore.delete_async(self._store, keys)


class _Fsspec:
    """Requests through a file system of fsspec.

    Args:
        system: the file system.
    """

    def __init__(self, system: Any) -> None:  # noqa: ANN401 (fsspec has no types)
        self._system = system

    async def read(self, key: str, start: int, end: int | None) -> Content:
        data = await asyncio.to_thread(self._system.cat_file, key, start=start, end=end)
        return Content(data, "")

    async def stat(self, key: str) -> Entry:
        def info() -> dict[str, Any]:
            if "hf" in self._system.protocol:
                return _hub_info(self._system, key)
            self._system.invalidate_cache()  # the file may have changed since it was listed
            return self._system.info(key)

        return _entry(posixpath.basename(key), await asyncio.to_thread(info))

    async def names(self, key: str) -> list[str]:
        def listed() -> list[str]:
            self._system.invalidate_cache()
            return self._system.ls(key, detail=False) if self._system.isdir(key) else []

        return [posixpath.basename(path.rstrip("/")) for path in await asyncio.to_thread(listed)]

    async def page(self, key: str, after: str | None) -> list[Entry]:
        if after:
            return []  # fsspec has no pages
        try:
            listed = await asyncio.to_thread(self._system.find, key, detail=True)
        except FileNotFoundError:
            return []
        # Not by the prefix: the Hub may spell the revision in another form than the URL.
        depth = key.strip("/").count("/") + 1
        names = ["/".join(path.strip("/").split("/")[depth:]) for path in listed]
        pairs = zip(names, listed.values(), strict=True)
        return [_entry(name, info) for name, info in pairs if name]  # "": the URL is a file


def _hub_info(system: Any, key: str) -> dict[str, Any]:  # noqa: ANN401
    """Return the present size and hash of a file of the Hub; `system.info` leaves out the hash."""
    from huggingface_hub import HfApi, RepoFile

    file = system.resolve_path(key)
    infos = HfApi(endpoint=system.endpoint, token=system.token).get_paths_info(
        file.repo_id, file.path_in_repo, revision=file.revision, repo_type=file.repo_type
    )
    for info in infos:
        if isinstance(info, RepoFile):
            return {"size": info.size, "blob_id": info.blob_id}
    raise FileNotFoundError(key)


def _entry(name: str, info: dict[str, Any]) -> Entry:
    version = info.get("blob_id") or str(sorted((k, str(v)) for k, v in info.items()))
    return Entry(name, info["size"], version)


def _version(meta: Any) -> str:  # noqa: ANN401 (obstore's ObjectMeta exists only for type checkers)
    # The ETag, because S3 rounds times of modification, and GCS lists no generations.
    return (meta["e_tag"] or str(meta["last_modified"])).removeprefix("W/").strip('"')


def _without_markers(listed: list[Entry]) -> list[Entry]:
    """Drop the empty objects by which some tools mark a directory."""
    names = sorted(entry.name for entry in listed)

    def is_directory(name: str) -> bool:
        after = bisect.bisect_left(names, f"{name}/")
        return not name or (after < len(names) and names[after].startswith(f"{name}/"))

    return [entry for entry in listed if entry.size or not is_directory(entry.name)]


def _region_of(bucket: str) -> str:
    """Return the region of a bucket of AWS, which obstore does not look up; "" if unknown."""
    request = urllib.request.Request(f"https://s3.amazonaws.com/{bucket}", method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.headers.get("x-amz-bucket-region", "")
    except urllib.error.HTTPError as error:  # also a refusal or redirection names the region
        return error.headers.get("x-amz-bucket-region", "")
    except OSError:
        return ""


def _credentials(scheme: str, address: str) -> dict[str, Any]:
    """Return options for credentials, with the cloud's own library if it is installed.

    obstore finds those of the environment and of the machine. The libraries also know profiles,
    single sign-on and federation.
    """
    if scheme == "s3" and "AWS_ACCESS_KEY_ID" in os.environ:
        return {}
    if scheme == "gs" and address:  # an emulator: obstore signs writes even with `skip_signature`
        return {"credential_provider": lambda: {"token": "none", "expires_at": None}}
    try:
        if scheme == "s3":
            from obstore.auth.boto3 import Boto3CredentialProvider

            return {"credential_provider": Boto3CredentialProvider()}
        from obstore.auth.google import GoogleCredentialProvider

        return {"credential_provider": GoogleCredentialProvider()}
    except ImportError:
        return {}
    except Exception:  # of several libraries: there are none, which suffices for public buckets
        return {"skip_signature": True}


def _open(url: str | os.PathLike) -> tuple[_Service, str]:
    """Return the service of a URL, and the key within.

    Raises:
        UserError: the URL's scheme is unknown, or needs a package that is not installed.
    """
    text = os.fspath(url).rstrip("/")
    scheme, _, path = text.partition("://")
    if scheme in BUCKETS:
        bucket, _, key = path.partition("/")
        return _bucket(scheme, bucket, endpoint(scheme)), key
    import fsspec

    try:
        system, key = fsspec.core.url_to_fs(text)
    except (ImportError, ValueError) as error:
        raise UserError(f"{text}: {error}") from None
    return _Fsspec(system), key


@functools.cache
def _data_requests() -> asyncio.Semaphore:
    return asyncio.Semaphore(_CONCURRENT)


def _open_bucket(url: str | os.PathLike) -> tuple[_Bucket, str]:
    service, key = _open(url)
    assert isinstance(service, _Bucket)
    return service, key


@functools.cache
def _bucket(scheme: str, bucket: str, address: str) -> _Bucket:
    return _Bucket(scheme, bucket, address)
