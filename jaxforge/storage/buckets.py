"""`gs://bucket/key` and `s3://bucket/key` as paths, which Orbax accepts (`epath.Path`).

Buckets have no directories: a directory exists if an object exists below it, and is never renamed.
`files` makes the requests.
"""

import fnmatch
import io
import os
import re
from collections.abc import Iterator
from typing import IO, Any

from etils import epath
from etils.epath import backend as epath_backend
from etils.epath import gpath

from jaxforge.storage import COMMITTED, files


class _Objects(epath_backend.Backend):
    """File-system interface that `epath` expects, over object keys."""

    def open(self, url: str, mode: str) -> IO:
        if "a" in mode:
            raise OSError(f"{url}: an object cannot be appended to")
        if "w" in mode:
            upload = _Upload(url)
            return upload if "b" in mode else _TextUpload(upload)
        raw = io.BytesIO(files.read(url))
        return raw if "b" in mode else io.TextIOWrapper(raw, encoding="utf-8")

    def exists(self, url: str) -> bool:
        return self._is_object(url) or self.isdir(url)

    def isdir(self, url: str) -> bool:
        return bool(files.names(url))

    def listdir(self, url: str) -> list[str]:
        names = files.names(url)
        if not names:
            raise FileNotFoundError(f"nothing at {url}")
        return names

    def glob(self, url: str) -> list[str]:
        # The directory in front of the first pattern: only its objects are listed.
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

    def rmtree(self, url: str) -> None:
        names = keys(url)
        if not names:
            raise FileNotFoundError(f"nothing at {url}")
        # First, so that a partially removed checkpoint never looks committed.
        files.remove(url, [COMMITTED])
        files.remove(url, names)

    def remove(self, url: str) -> None:
        if not self._is_object(url):
            raise FileNotFoundError(f"no object {url}")
        files.remove(url)

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

    def stat(self, url: str) -> epath.stat_utils.StatResult:
        if self.isdir(url):
            return epath.stat_utils.StatResult(is_directory=True, length=0, mtime=0)
        length = files.stat(url).size
        return epath.stat_utils.StatResult(is_directory=False, length=length, mtime=0)

    def _is_object(self, url: str) -> bool:
        try:
            files.stat(url)
        except FileNotFoundError:
            return False
        return True


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
            files.write(self._url, data)

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


def keys(url: str | os.PathLike) -> list[str]:
    """Return the keys below a directory, relative to it."""
    return [entry.name for entry in files.entries(url)]


@epath.register_path_cls(tuple(f"{scheme}://" for scheme in files.BUCKETS))
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
