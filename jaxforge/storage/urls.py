"""Locations of data and runs: a local directory, or a directory in a bucket (`buckets`).

Only `path` distinguishes the two. Other URLs are refused: a URL never becomes a local file name,
and neither does `gs:/bucket`, to which `pathlib` collapses a URL.
"""

import os
import re
from pathlib import Path

from jaxforge.errors import UserError

SCHEMES = ("gs", "s3")

_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+):(/+)(.*)", re.DOTALL)


def in_bucket(location: str | os.PathLike) -> bool:
    """Return whether a location is a bucket URL: `gs://…`, or `gs:/…` as collapsed by `pathlib`."""
    return _URL.match(os.fspath(location)) is not None


def path(text: str | os.PathLike, key: str = "") -> Path:
    """Return a local path, or a path in a bucket.

    Args:
        text: a path or URL, or a result of this function.
        key: key or option of the value, for messages.

    Raises:
        UserError: the URL is malformed or not supported.
    """
    if problem := fault(text):
        raise UserError(f"{key} = {problem}" if key else problem)
    if not in_bucket(text):
        return Path(text)
    from jaxforge.storage.buckets import BucketPath  # the clients take a second to import

    return BucketPath(text)


def local(text: str | os.PathLike, key: str, remedy: str) -> Path:
    """Return a local path.

    Raises:
        UserError: the text is a URL; the message ends with the remedy.
    """
    if in_bucket(text):
        raise UserError(f"{key} = {os.fspath(text)}: only local paths are supported here; {remedy}")
    return Path(text)


def fault(text: str | os.PathLike) -> str | None:
    """Return a message about a malformed path or URL, or None."""
    match = _URL.match(os.fspath(text))
    if match is None:
        return None
    scheme, slashes, tail = match.groups()
    url = os.fspath(text)
    if scheme not in SCHEMES:
        return (
            f"{url}: {scheme}:// is not supported; use a gs:// or s3:// URL, or mount it and "
            "use a local directory"
        )
    if slashes != "//":
        return f"{url}: a URL has two slashes; write {scheme}://{tail}"
    if not all(tail.partition("/")[::2]):
        return f"{url} has no directory in the bucket; write {scheme}://bucket/directory"
    return None
