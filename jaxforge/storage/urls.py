"""Locations of data and runs: a local directory, or a directory in a bucket (`buckets`).

`path` is the one place that tells the two apart. What is neither is refused: a URL never becomes
the name of a local file, nor does `gs:/bucket`, which is what `pathlib` makes of one.
"""

import os
import re
from pathlib import Path

from jaxforge.errors import UserError

SCHEMES = ("gs", "s3")

_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+):(/+)(.*)", re.DOTALL)


def in_bucket(location: str | os.PathLike) -> bool:
    """Return whether a location is a bucket URL: `gs://…`, and also `gs:/…`, which is cut short."""
    return _URL.match(os.fspath(location)) is not None


def path(text: str | os.PathLike, key: str = "") -> Path:
    """A path of this machine, or one in a bucket.

    Args:
        text: either, or one that this function gave.
        key: what it is the value of, for messages.

    Raises:
        UserError: it is neither.
    """
    if problem := fault(text):
        raise UserError(f"{key} = {problem}" if key else problem)
    if not in_bucket(text):
        return Path(text)
    from jaxforge.storage.buckets import BucketPath  # its clients take a second to import

    return BucketPath(text)


def local(text: str | os.PathLike, key: str, remedy: str) -> Path:
    """A path of this machine.

    Raises:
        UserError: it is a URL; the message ends with the remedy.
    """
    if in_bucket(text):
        raise UserError(f"{key} = {os.fspath(text)}: only local paths are supported here; {remedy}")
    return Path(text)


def fault(text: str | os.PathLike) -> str | None:
    """Return the fault of a path or URL as a message that begins with it, or None."""
    match = _URL.match(os.fspath(text))
    if match is None:
        return None
    scheme, slashes, tail = match.groups()
    given = os.fspath(text)
    if scheme not in SCHEMES:
        return (
            f"{given}: {scheme}:// is not supported; name a bucket as gs:// or s3://, or mount it "
            "and name a directory in it"
        )
    if slashes != "//":
        return f"{given}: a URL has two slashes; write {scheme}://{tail}"
    if not all(tail.partition("/")[::2]):
        return f"{given} names no directory of a bucket; write {scheme}://bucket/directory"
    return None
