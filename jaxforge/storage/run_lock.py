"""Lock of a run directory for one job: `<run>/run.lock`, held by process 0 for the whole job.

    holder   create run.lock ─► touch it every BEAT_SEC ─────────────────────► unlink
    other    run.lock exists ─► is its holder alive?
                                same machine:  a process with its pid and start time exists
                                other machine: run.lock changes within PATIENCE_SEC
                                alive ─► UserError      dead ─► take over
                                earlier roster of the same elastic job: dead
    take over                   replace run.lock ─► wait SETTLE_SEC ─► is it still ours?

Invariants, also after kill -9 and between hosts:

- The file names its holder. The content decides who holds the lock, and the last writer wins.
- A holder checks at each beat that it is still named. If not, it has lost the lock, and `check`
  raises.
- A lock without beats is stale after `PATIENCE_SEC`. Versions of the file are compared with each
  other, never with a clock, so clocks of hosts need not agree.
- The hosts of an elastic job agree on numbered rosters (`supervision.rosters`). A process of a
  later roster takes the lock at once: processes of earlier rosters may be stopped, but never
  continue the run.
- File-system locks are not used: some network disks lack them, or keep them for lost hosts.

In a bucket, a beat rewrites the object with or without a trailing space.

`filelock` is not a replacement: its `FileLock` uses file-system locks. Its `SoftFileLease` does not
support buckets, expires an incomplete lock after two seconds and does not detect a moved directory.

Readers of a run need no lock.
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

from jaxforge.cli.process import ROSTER_VARIABLE
from jaxforge.errors import StorageError, UserError, file_error
from jaxforge.storage import safe_files, urls

log = logging.getLogger(__name__)

NAME = "run.lock"
BEAT_SEC = 5.0
PATIENCE_SEC = 20.0  # four beats
POLL_SEC = 0.5
# A process that found the same stale lock may write just after us. Wait for it before reading back.
SETTLE_SEC = 0.2


class RunLock:
    """Exclusive right to write into a run directory; the context manager releases it.

    Args:
        run: the run directory.
    """

    def __init__(self, run: Path) -> None:
        self._parent = run.absolute()  # `check` needs it after each step
        self._path = self._parent / NAME
        self._text = json.dumps(this_process())
        self._is_held = self._is_lost = False
        self._directory: tuple[int, int] | None = None
        self._ended = threading.Event()
        self._heartbeat = threading.Thread(target=self._run_heartbeat, name="run.lock", daemon=True)

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_held:
            return
        self._ended.set()
        # Join first: a late beat must not recreate the object. Bounded, as the disk may hang.
        self._heartbeat.join(timeout=BEAT_SEC)
        # On failure the lock becomes stale, which others detect. Never remove another job's lock.
        with contextlib.suppress(OSError):
            if _read(self._path) == self._text:
                self._path.unlink()

    def check(self) -> None:
        """Check that the directory still exists and that this job still holds its lock.

        Raises:
            StorageError: the directory was removed, moved or replaced.
            UserError: another job has taken the directory.
        """
        directory = _identity(self._parent) if self._is_held else self._directory
        # Some network disks change inode numbers: a directory with our lock file is the same.
        if directory != self._directory and _read(self._path) is None:
            raise StorageError(
                f"{self._path.parent} was removed, moved or replaced while this run was using it: "
                "saved files have moved with it. Restore the directory and start again"
            )
        if self._is_lost:
            raise UserError(
                f"{self._path.parent} was taken over by "
                f"{_describe_holder(_read(self._path) or '')}, which "
                "considered this process dead: nothing has been saved here since"
            )

    def take(self) -> None:
        """Acquire the lock.

        Raises:
            UserError: another job holds the lock, or the directory cannot be written.
            StorageError: the disk is full or fails.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            while not self._take_once():
                pass
        except OSError as error:
            is_file = self._path.parent.is_file()
            setting = f"checkpoint.dir = {self._path.parent}"
            if is_file:
                raise UserError(f"{setting}: it is a file, not a directory") from error
            raise file_error(setting, error) from error
        self._is_held, self._directory = True, _identity(self._parent)
        self._heartbeat.start()

    def _take_once(self) -> bool:
        """Try once to take the lock; return False if the file changed meanwhile."""
        if not urls.in_bucket(self._path) and self._path.is_symlink():
            raise UserError(f"{self._path} is a link, which cannot be locked: remove it")
        if _create(self._path, self._text):
            return True
        content = _read(self._path)
        if content is None:
            return False  # the holder has just released it: try to create it again
        if not _is_superseded(content, self._text) and _is_alive(self._path, content):
            raise UserError(
                f"{self._path.parent} is in use by {_describe_holder(_read(self._path) or '')}: "
                "two jobs would overwrite each other's metrics and checkpoints. Wait until it "
                "ends, stop it, or set another checkpoint.dir. If it no longer runs, remove "
                f"{self._path}"
            )
        log.warning("%s is stale (%s): taking it over", self._path, _describe_holder(content))
        # Several processes may get here at once. Each replaces the file atomically, so it always
        # names exactly one of them; after the pause, only the last writer finds its own text.
        if urls.in_bucket(self._path):
            self._path.write_text(self._text)
        else:
            safe_files.replace_text(self._path, self._text)
        time.sleep(SETTLE_SEC)
        return _read(self._path) == self._text

    def _run_heartbeat(self) -> None:
        while not self._ended.wait(BEAT_SEC):
            # The next beat retries after an error. Saves report persistent errors.
            with contextlib.suppress(OSError):
                content = _read(self._path)
                # A missing file is not another owner: `check` reports a removed directory.
                self._is_lost = content is not None and content != self._text
                if self._is_lost:
                    return
                _renew(self._path, self._text)


def holder(run: Path) -> str | None:
    """Return a description of the job that trains in a run directory, or None."""
    path = run.absolute() / NAME
    content = _read(path)
    return _describe_holder(content) if content is not None and _is_alive(path, content) else None


def this_process() -> dict[str, Any]:
    """Describe this process as its lock file does."""
    job, _, roster = os.environ.get(ROSTER_VARIABLE, "").partition(" ")
    return {
        **({"job": job, "roster": int(roster)} if job else {}),
        "host": socket.gethostname(),
        "process": os.getpid(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "machine": pid_namespace(),
        "began": process_start_time(os.getpid()),
        "id": uuid.uuid4().hex,  # distinguishes two locks of one process
    }


def _create(path: Path, text: str) -> bool:
    """Create a file exclusively; return whether it is new."""
    if urls.in_bucket(path):
        # Buckets have no exclusive creation here: write, wait for concurrent writers, read back.
        if path.exists():
            return False
        path.write_text(text)
        time.sleep(SETTLE_SEC)
        return _read(path) == text
    try:
        with path.open("x") as file:  # O_EXCL, which follows no links
            file.write(text)
    except FileExistsError:
        return False
    except OSError:
        path.unlink(missing_ok=True)  # a full disk must not leave an incomplete lock
        raise
    return True


def _renew(path: Path, text: str) -> None:
    """Change the version of the lock file, but not its content."""
    if not urls.in_bucket(path):
        os.utime(path, follow_symlinks=False)
        return
    version = _version(path)
    path.write_text(text if version and version[1] != text else f"{text} ")


def pid_namespace() -> str:
    """Return an id of boot and pid namespace, common to processes that see each other; or ""."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def process_start_time(process: int) -> str | None:
    """Return the start time of a process in clock ticks since boot; None if it has ended.

    Pid and start time together identify a process, because pids are reused.
    """
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    state, *fields = status.rpartition(")")[2].split()  # the command may contain ")"
    return None if state in "ZX" else fields[18]  # zombie or dead; field 22 of proc(5) is starttime


def is_hidden(process: int) -> bool:
    """Return whether a process exists but belongs to another user whom /proc hides."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return False


def _is_alive(path: Path, text: str) -> bool:
    """Return whether the holder named by `text` still runs.

    If the text names no process of this machine, for example because it is incomplete, the
    heartbeat decides.
    """
    holder = _parse_holder(text)
    machine, process = holder.get("machine"), holder.get("process")
    is_here = machine and machine == pid_namespace() and "began" in holder
    if is_here and isinstance(process, int) and 0 < process < 2**31:
        began = process_start_time(process)
        if began or not is_hidden(process):
            return began == holder["began"]
    log.info("%s belongs to %s: waiting up to %g s for a heartbeat",
             path, _describe_holder(text), PATIENCE_SEC)  # fmt: skip
    return is_renewed(path)


def _is_superseded(text: str, text_of_job: str) -> bool:
    """Return whether the lock belongs to an earlier roster of the elastic job that `own` names."""
    holder, job = _parse_holder(text), _parse_holder(text_of_job)
    roster = holder.get("roster")
    is_same_job = "job" in job and holder.get("job") == job["job"]
    return is_same_job and isinstance(roster, int) and roster < job["roster"]


def is_renewed(path: Path) -> bool:
    """Return whether the file changes within `PATIENCE_SEC`; False if it is removed."""
    first, deadline = _version(path), time.monotonic() + PATIENCE_SEC
    while time.monotonic() < deadline:
        time.sleep(POLL_SEC)
        if (now := _version(path)) != first:
            return now is not None
    return False


def _version(path: Path) -> tuple[int, str] | None:
    try:
        if urls.in_bucket(path):
            return 0, path.read_bytes().decode(errors="replace")
        # Opening the file makes network disks refresh its attributes (close-to-open consistency).
        with path.open(errors="replace") as file:
            return os.fstat(file.fileno()).st_mtime_ns, file.read()
    except FileNotFoundError:
        return None


def _read(path: Path) -> str | None:
    version = _version(path)
    return version and version[1].rstrip()


def _identity(directory: Path) -> tuple[int, int] | None:
    """Return device and inode of a directory; None if it does not exist, or is in a bucket."""
    if urls.in_bucket(directory):
        return None
    try:
        status = directory.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino


def _parse_holder(text: str) -> dict[str, Any]:
    try:
        holder = json.loads(text)
    except (ValueError, RecursionError):
        return {}  # incomplete: the process died while writing
    return holder if isinstance(holder, dict) else {}


def _describe_holder(text: str) -> str:
    holder = _parse_holder(text)
    if not {"process", "host", "since"} <= holder.keys():
        return "an unknown process (not named in the file)"
    return f"process {holder['process']} on {holder['host']}, since {holder['since']}"
