"""State of an input file when `prepare` lists it, and its comparison with a later state.

    plan: state of each file ─► unit opens a file: same state? ─► records ─► end: same state?

The plan, the slices and the numbers of records follow from the listed file. Content of another
file must therefore not enter the shards.
"""

import socket
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from jaxforge.data.corpus.remote_input import (
    LARGE,
    Location,
    RemotePath,
    changed,
    current_version,
)


class FileState(NamedTuple):
    """State of a file.

    Attributes:
        size: bytes.
        modified: time of modification, nanoseconds since 1970, or another number that changes with
            the content.
        host: machine that read the state; "" for a file by URL.
        inode: device and inode.
        status_changed: time of the last change of content or metadata, nanoseconds since 1970.
    """

    size: int
    modified: int
    host: str = ""
    inode: tuple[int, int] = (0, 0)
    status_changed: int = 0

    @classmethod
    def of(cls, path: Path) -> "FileState":
        """Return the state of a file of this machine; raise OSError if there is none."""
        status = path.stat()
        inode = status.st_dev, status.st_ino
        return cls(status.st_size, status.st_mtime_ns, _host(), inode, status.st_ctime_ns)

    def is_replaced_by(self, other: "FileState") -> bool:
        """Return whether another file has taken the place of this one.

        Network file systems may number devices and inodes anew, and `chmod` changes the time in
        `status_changed`, so a single difference says nothing. Copies on several machines differ in
        both.
        """
        both = self.inode != other.inode and self.status_changed != other.status_changed
        return both and self.host == other.host


def check_unchanged(path: Location, before: FileState, *, opening: bool = False) -> FileState:
    """Check that a file has the state that was read before.

    Args:
        path: the file.
        before: its earlier state.
        opening: the file is about to be read. A small file by URL is not checked then, because a
            request takes as long as its content.

    Returns:
        The present state.

    Raises:
        InputChangedError: it has another state, or does not exist any more.
        OSError: the state of a local file cannot be read.
        UserError: that of a file by URL cannot be read.
    """
    if opening and isinstance(path, RemotePath) and path.size < LARGE:
        return before
    try:
        if isinstance(path, RemotePath):
            now, number = FileState(*current_version(path)), "version"
        else:
            now, number = FileState.of(path), "time of modification"
    except FileNotFoundError as error:
        raise changed(path, "it does not exist any more") from error
    if now.size != before.size:
        raise changed(path, f"it had {before.size:,} bytes, and has {now.size:,}")
    if now.modified != before.modified:
        raise changed(path, f"its {number} is another")
    if before.is_replaced_by(now):
        raise changed(path, "another file has its name")
    return now


@lru_cache(1)
def _host() -> str:
    return socket.gethostname()
