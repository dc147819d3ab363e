"""One job at a time in a run directory: `<run>/run.lock`, held by process 0 for all of its job.

The file names its holder. Whether that still lives is asked of the kernel where the holder's
processes are ours to see: the number is taken, by a process that began when the holder did. From
other hosts and containers its heartbeat is watched, the file's time of change, which the holder
renews every `BEAT_SEC`; a lock that does not change for `PATIENCE_SEC` was left behind. No clocks
are compared, and no lock of the file system is asked for, which network disks do without or keep
for hosts that are gone. Should two ever take one lock over at the same moment, the last to write
has it: a holder looks at each beat whether it is still named, and ends where it is not. In a bucket
a beat writes the object again, with or without a space at its end.

`filelock` replaces none of this. Its `FileLock` asks the file system, and `SoftFileLease` knows no
buckets, ages a torn lock out after two seconds and does not notice that the directory was moved.

Who only reads a run does not ask.
"""

import contextlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np

from jaxforge.errors import StorageError, UserError
from jaxforge.storage import safe_files, urls

log = logging.getLogger(__name__)

NAME = "run.lock"
BEAT_SEC = 5.0
PATIENCE_SEC = 20.0
_POLL_SEC = 0.5
_SETTLE_SEC = 0.2  # for another that found the same lock left behind, and wrote just after us
_MESSAGE_BYTES = 2048


class RunLock:
    """The right to write into a run directory; as a context it gives back what was acquired.

    Args:
        run: the run directory.
    """

    def __init__(self, run: Path) -> None:
        self._path = run.absolute() / NAME
        self._mine = json.dumps(_this_process())
        self._is_held = self._is_lost = False
        self._directory: tuple[int, int] | None = None
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="run.lock", daemon=True)

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_held:
            return
        self._ended.set()
        self._heart.join(timeout=BEAT_SEC)  # unless the disk does not answer
        with contextlib.suppress(OSError):  # then it is a lock left behind, which others recognise
            if _read(self._path) == self._mine:
                self._path.unlink()

    def acquire(self) -> None:
        """Makes the directory ours; every process of the job calls this, and hears the same.

        Raises:
            UserError: another job has it, or it cannot be written.
        """
        import jax  # here, as conversions do without it

        problem = ""
        if jax.process_index() == 0:
            try:
                self.take()
            except UserError as error:
                problem = str(error)
        if problem := _of_process_0(problem):
            raise UserError(problem)

    def check(self) -> None:
        """Check that the directory is still there, and still ours.

        Raises:
            StorageError: the directory was removed, moved or replaced.
            UserError: another job has taken the directory.
        """
        directory = _identity(self._path.parent) if self._is_held else self._directory
        # Some network disks number a directory anew: one that holds our lock is ours.
        if directory != self._directory and _read(self._path) is None:
            raise StorageError(
                f"{self._path.parent} was removed, moved or replaced while this run was using it: "
                "what was saved there is not where it was. Put the directory back and start again"
            )
        if self._is_lost:
            raise UserError(
                f"{self._path.parent} was taken over by {_whose(_read(self._path) or '')}, which "
                "held this process for gone: nothing was saved here since"
            )

    def take(self) -> None:
        """Makes the directory ours, whatever other processes there are: only one of them does.

        Raises:
            UserError: as of `acquire`.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            while not self._take_once():
                pass
        except OSError as error:
            is_file = self._path.parent.is_file()
            why = "it is a file, not a directory" if is_file else error.strerror
            raise UserError(f"checkpoint.dir = {self._path.parent}: {why}") from error
        self._is_held, self._directory = True, _identity(self._path.parent)
        self._heart.start()

    def _take_once(self) -> bool:
        """Try once to take the lock; return False if the file changed meanwhile."""
        if not urls.in_bucket(self._path) and self._path.is_symlink():
            raise UserError(f"{self._path} is a link, and no lock is taken through one: remove it")
        if _make(self._path, self._mine):
            return True
        content = _read(self._path)
        if content is None:
            return False  # its holder has just ended
        if _lives(self._path, content):
            raise UserError(
                f"{self._path.parent} is in use by {_whose(_read(self._path) or '')}: two jobs "
                "would overwrite each other's metrics and checkpoints. Wait for its end, end it, "
                f"or give another checkpoint.dir; if it is certainly gone, remove {self._path}"
            )
        log.warning("%s was left behind by %s: taken over", self._path, _whose(content))
        _replace(self._path, self._mine)
        time.sleep(_SETTLE_SEC)
        return _read(self._path) == self._mine

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SEC):
            # What a disk or bucket does not take now, the next beat tries; saves tell of it.
            with contextlib.suppress(OSError):
                content = _read(self._path)
                self._is_lost = content is not None and content != self._mine
                if self._is_lost:
                    return
                _renew(self._path, self._mine)


def holder(run: Path) -> str | None:
    """Who trains in a run directory now, in words; None where nobody does."""
    path = run.absolute() / NAME
    content = _read(path)
    return _whose(content) if content is not None and _lives(path, content) else None


def _this_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "machine": _machine(),
        "began": _began(os.getpid()),
        "id": uuid.uuid4().hex,  # one process may hold a lock twice, one after the other
    }


def _make(path: Path, text: str) -> bool:
    """Create a file exclusively; return whether it is new."""
    if urls.in_bucket(path):
        if path.exists():
            return False
        path.write_text(text)
        time.sleep(_SETTLE_SEC)
        return _read(path) == text
    try:
        with path.open("x") as file:  # which follows no link: `x` is O_EXCL
            file.write(text)
    except FileExistsError:
        return False
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return True


def _replace(path: Path, text: str) -> None:
    """Writes the file, at once."""
    if urls.in_bucket(path):
        path.write_text(text)
        return
    safe_files.replace_text(path, text)


def _renew(path: Path, text: str) -> None:
    """A beat: changes the file's version, and not what it says."""
    if not urls.in_bucket(path):
        os.utime(path, follow_symlinks=False)
        return
    version = _version(path)
    path.write_text(text if version and version[1] != text else f"{text} ")


def _machine() -> str:
    """Return an id shared by processes that see each other's pids; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _began(process: int) -> str | None:
    """When a process began, in the kernel's words; None if it is gone, or waits to be buried."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    state, *fields = status.rpartition(")")[2].split()  # the name before it may hold anything
    return None if state in "ZX" else fields[18]


def _is_hidden(process: int) -> bool:
    """Return whether a process exists but belongs to another user whom /proc hides."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return False


def _lives(path: Path, text: str) -> bool:
    """Return whether the holder that `text` names is still there.

    Of a lock that names no process, as a torn one, the heartbeat is watched.
    """
    holder = _parsed(text)
    machine, process = holder.get("machine"), holder.get("process")
    is_here = machine and machine == _machine() and "began" in holder
    if is_here and isinstance(process, int) and 0 < process < 2**31:
        began = _began(process)
        if began or not _is_hidden(process):
            return began == holder["began"]
    log.info("%s is of %s: watching for up to %g s whether that still runs",
             path, _whose(text), PATIENCE_SEC)  # fmt: skip
    return _changes(path)


def _changes(path: Path) -> bool:
    """Return whether the file is renewed during the watch; False if it disappears."""
    first, deadline = _version(path), time.monotonic() + PATIENCE_SEC
    while time.monotonic() < deadline:
        time.sleep(_POLL_SEC)
        if (now := _version(path)) != first:
            return now is not None
    return False


def _version(path: Path) -> tuple[int, str] | None:
    try:
        if urls.in_bucket(path):
            return 0, path.read_bytes().decode(errors="replace")
        with path.open(errors="replace") as file:  # opening is what makes a network disk look again
            return os.fstat(file.fileno()).st_mtime_ns, file.read()
    except FileNotFoundError:
        return None


def _read(path: Path) -> str | None:
    version = _version(path)
    return version and version[1].rstrip()


def _identity(directory: Path) -> tuple[int, int] | None:
    """Return what tells a directory from others of its name; None if there is none, or no disk."""
    if urls.in_bucket(directory):
        return None
    try:
        status = directory.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino


def _parsed(text: str) -> dict[str, Any]:
    try:
        holder = json.loads(text)
    except (ValueError, RecursionError):
        return {}  # its process died while it wrote
    return holder if isinstance(holder, dict) else {}


def _whose(text: str) -> str:
    holder = _parsed(text)
    if not {"process", "host", "since"} <= holder.keys():
        return "an unknown process (the file names none)"
    return f"process {holder['process']} on {holder['host']}, since {holder['since']}"


def _of_process_0(text: str) -> str:
    """Return the text of process 0 on every process."""
    import jax
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return text
    page = np.zeros(_MESSAGE_BYTES, np.uint8)
    said = np.frombuffer(text.encode()[:_MESSAGE_BYTES], np.uint8)
    page[: len(said)] = said
    heard = np.asarray(multihost_utils.broadcast_one_to_all(page))
    return heard.tobytes().rstrip(b"\0").decode(errors="ignore")
