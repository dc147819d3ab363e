"""Local copies of the files of a run in a bucket, except checkpoints.

Objects cannot be appended to. The files are therefore written to a local directory, and changed
files are copied to the bucket as a whole: every 30 seconds (less often if a copy takes seconds),
before each checkpoint, and at the end.
So the history up to a checkpoint in the bucket is complete. Lines that a killed process wrote later
belong to steps that the next process repeats and logs again.
"""

import contextlib
import hashlib
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import jax

from jaxforge.errors import StorageError, UserError
from jaxforge.storage import safe_files, urls

log = logging.getLogger(__name__)

INTERVAL = 30.0
"""Least seconds between copies of changed files."""
_PAUSE_PER_COPY = 20.0  # pause after a copy / time of the copy: files grow, and are copied whole

_UNFINISHED = ".partial"
_BLOCK = 1 << 24  # bytes per read while copying


def files(run: str) -> Path:
    """Return the directory to which this process writes files of the run, except checkpoints.

    Args:
        run: `checkpoint.dir`; a local directory is returned unchanged.
    """
    location = urls.path(run, "checkpoint.dir")
    return directory(location, jax.process_index()) if urls.in_bucket(location) else location


def directory(run: Path, process: int | str) -> Path:
    """Return the local directory of a process for files of a run in a bucket.

    The name is deterministic, so that killed processes do not leave several directories. Because
    others can compute it, `claim` refuses a directory that is not private to this user.
    """
    name = f"{run}\n{os.getuid()}\n{process}"
    tag = hashlib.sha256(name.encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"jaxforge-{run.name}-{tag}"


def claim(here: Path) -> None:
    """Create the private local directory of `directory`, unless this user already has it.

    Raises:
        UserError: the path is a link, or belongs to or is writable by another user.
    """
    try:
        safe_files.private_directory(here)
    except OSError as error:
        raise UserError(
            f"{here}: {error.strerror}, or set another TMPDIR. Files are written there before "
            "they are copied to the bucket"
        ) from error


def clear(here: Path) -> None:
    """Remove files of an earlier process from a local directory."""
    for path in here.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


class Mirror:
    """Local copies of files of a run, which are published to its bucket.

    Args:
        run: the run directory, in a bucket.
        process: index of the process in the job.
        names: existing files, or directories of files, to fetch from the bucket.

    Raises:
        StorageError: the bucket does not respond.
        UserError: the local directory belongs to another user.
    """

    def __init__(self, run: Path, process: int, names: Iterable[str]) -> None:
        self._run, self._here = run, directory(run, process)
        self._copied: dict[Path, tuple[int, int]] = {}
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._failing = False
        claim(self._here)
        clear(self._here)
        # After `clear`: files of a killed process may be newer than those of the bucket.
        for name in names:
            self._fetch(name)
        self._thread = threading.Thread(target=self._watch, name="mirror", daemon=True)
        self._thread.start()

    def publish(self) -> bool:
        """Copy changed files to the bucket; return whether all files are there."""
        with self._lock:
            try:
                for path in sorted(self._here.rglob("*")):
                    self._copy(path)
            except OSError as error:
                if not self._failing:
                    log.warning("cannot copy files of the run to the bucket: %s", error)
                self._failing = True
                return False
            self._failing = False
            return True

    def close(self) -> None:
        """Publish a last time, and remove the local copies.

        Raises:
            StorageError: a file could not be copied; the local copies remain.
        """
        self._ended.set()
        self._thread.join()
        if not self.publish():
            raise StorageError(f"the newest files of the run are in {self._here}, not in "
                               f"{self._run}: copy them there before the next start")  # fmt: skip
        shutil.rmtree(self._here, ignore_errors=True)

    def _fetch(self, name: str) -> None:
        url = self._run / name
        if url.is_dir():
            for below in url.iterdir():
                if below.name in ("", ".", ".."):  # valid in buckets, but not on disk
                    continue
                self._fetch(f"{name}/{below.name}")
            return
        with contextlib.suppress(FileNotFoundError):
            data = url.read_bytes()
            path = self._here / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            self._copied[path] = _state(path)

    def _copy(self, path: Path) -> None:
        parts = path.relative_to(self._here).parts
        if (
            any(part.endswith(_UNFINISHED) for part in parts)
            or path.is_symlink()
            or not path.is_file()
        ):
            return
        state = _state(path)
        # Size and time suffice, because one process writes. An empty file has nothing to publish.
        if state == self._copied.get(path) or not state[0]:
            return
        url = self._run / path.relative_to(self._here).as_posix()
        with path.open("rb") as source, url.open("wb") as file:
            shutil.copyfileobj(source, file, _BLOCK)
        # The state from before the copy: what is written meanwhile is copied the next time.
        self._copied[path] = state

    def _watch(self) -> None:
        pause = INTERVAL
        while not self._ended.wait(pause):
            began = time.monotonic()
            self.publish()
            pause = max(INTERVAL, _PAUSE_PER_COPY * (time.monotonic() - began))


def _state(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns
