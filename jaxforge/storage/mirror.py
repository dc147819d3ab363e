"""The files of a run whose directory is in a bucket, all but its checkpoints.

Objects cannot be appended to. So these files are written to a directory of this machine, and those
that have changed are copied to the bucket, whole: every half minute, before each checkpoint, and at
the end. A checkpoint in the bucket thus never has a history with holes: what a killed process had
written since is of steps that the next one runs, and logs, again.
"""

import contextlib
import hashlib
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path

import jax

from jaxforge.errors import StorageError, UserError
from jaxforge.storage import safe_files, urls

log = logging.getLogger(__name__)

INTERVAL = 30.0
"""Seconds between looks at the files."""

_UNFINISHED = ".partial"
_BLOCK = 1 << 24  # bytes in memory of a file that is copied


def files(run: str) -> Path:
    """Return the directory to which this process writes files of the run, except checkpoints.

    Args:
        run: `checkpoint.dir`; what is on this machine already is the place itself.
    """
    location = urls.path(run, "checkpoint.dir")
    return directory(location, jax.process_index()) if urls.in_bucket(location) else location


def directory(run: Path, process: int | str) -> Path:
    """Return the local directory of a process for files of a run in a bucket.

    Always the same, so that what kills leave behind does not pile up. Others can compute the name:
    a directory that is not this user's alone is refused.
    """
    name = f"{run}\n{os.getuid()}\n{process}"
    tag = hashlib.sha256(name.encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"jaxforge-{run.name}-{tag}"


def claim(here: Path) -> None:
    """Make a directory of this machine that `directory` has named, unless this user has it already.

    Raises:
        UserError: it is a link, or another user has made it or can write there.
    """
    try:
        safe_files.private_directory(here)
    except OSError as error:
        raise UserError(
            f"{here}: {error.strerror}, or set another TMPDIR. Files are gathered there before "
            "they are copied to the bucket"
        ) from error


def clear(here: Path) -> None:
    """Remove what an earlier process has left in such a directory."""
    for path in here.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


class Mirror:
    """Brings the files of a run here, and what becomes of them back to the bucket.

    Args:
        run: the run directory, in a bucket.
        process: of the job.
        names: files, or directories of files, to go on with.

    Raises:
        StorageError: the bucket does not answer.
        UserError: the directory of this machine belongs to somebody else.
    """

    def __init__(self, run: Path, process: int, names: Iterable[str]) -> None:
        self._run, self._here = run, directory(run, process)
        self._copied: dict[Path, tuple[int, int]] = {}
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._failing = False
        claim(self._here)
        clear(self._here)
        for name in names:
            self._fetch(name)
        self._thread = threading.Thread(target=self._watch, name="mirror", daemon=True)
        self._thread.start()

    def publish(self) -> bool:
        """Copies what has changed; whether all of it is in the bucket now."""
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
        """Publishes for the last time; what is in the bucket then is not kept here.

        Raises:
            StorageError: the bucket did not take all of it.
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
                if below.name in ("", ".", ".."):  # which a bucket may have, and a directory not
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
        if state == self._copied.get(path) or not state[0]:
            return
        url = self._run / path.relative_to(self._here).as_posix()
        with path.open("rb") as source, url.open("wb") as file:
            shutil.copyfileobj(source, file, _BLOCK)
        self._copied[path] = state

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL):
            self.publish()


def _state(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns
