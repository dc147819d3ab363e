"""Files that gather beside their destination and appear there all at once.

    DST/.<name>.partial/         what is written so far
    DST/.<name>.partial/marks/   plan.json, and one small file for each finished unit of work
    DST/<name>/                  by one rename, when every unit is there

A conversion that was stopped goes on with the units that have no mark. Several processes share a
destination by taking turns through the units; the first one waits for the marks and commits.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from jaxforge.errors import StorageError, UserError
from torch_compat.files import sync

_MARKS = "marks"
_PLAN = "plan.json"
_POLL = 0.05  # seconds

AT_ONCE = 3
"""Units that are written at a time: while one is synced to disk, others are read."""


class Share(NamedTuple):
    """Which of several processes this one is."""

    process: int = 0
    processes: int = 1


class Unit(NamedTuple):
    """Work that is done or not done.

    Attributes:
        name: names its mark.
        nbytes: bytes that it writes.
        write: does it; what it returns is kept in the mark. Doing it twice does no harm.
    """

    name: str
    nbytes: int
    write: Callable[[], Any]


class Staging:
    """The partial form of a directory.

    Args:
        destination: the directory that there will be.
        plan: JSON that says what is converted into what; another plan starts anew.
        share: which of several processes this one is.

    Raises:
        UserError: the destination is there already.
        StorageError: it cannot be written to.
    """

    def __init__(self, destination: Path, plan: dict[str, Any], share: Share) -> None:
        self.destination, self.share = destination, share
        self.path = destination.with_name(f".{destination.name}.partial")
        if destination.exists():
            raise UserError(f"{destination} is there already; remove it or name another place")
        self._fingerprint = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()
        with naming_failure(destination):
            if share.process == 0:
                self._prepare()
            else:
                _wait_until(self._is_ours, 600, f"for process 0 to prepare {self.path} for this")

    def write(self, units: Sequence[Unit], advance: Callable[[int], None]) -> None:
        """Does this process's share of the units that are not done.

        Args:
            units: all of them, the same in every process.
            advance: called with the bytes of each unit that is done, before or now.
        """
        ours = units[self.share.process :: self.share.processes]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            under_way = [pool.submit(self._write_one, unit, advance) for unit in ours]
            try:
                for written in under_way:
                    written.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _write_one(self, unit: Unit, advance: Callable[[int], None]) -> None:
        if not self._mark(unit.name).exists():
            with naming_failure(self.destination):
                self._set_mark(unit.name, unit.write())
        advance(unit.nbytes)

    def results(
        self, units: Sequence[Unit], check: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """What all units returned; waits for those of other processes, calling `check`."""
        names = [unit.name for unit in units]

        def complete() -> bool:
            check()
            return all(self._mark(name).exists() for name in names)

        _wait_until(complete, 24 * 3600, "for the other processes to do their share")
        return {name: json.loads(self._mark(name).read_text()) for name in names}

    def commit(self) -> None:
        """Gives the directory its name. Only process 0 does; nothing may change afterwards."""
        with naming_failure(self.destination):
            shutil.rmtree(self.path / _MARKS)
            for directory, _, files in os.walk(self.path):
                for name in files:
                    sync(Path(directory, name))
                sync(Path(directory))
            self.path.rename(self.destination)
            sync(self.destination.parent)

    def discard(self) -> None:
        """Removes what is left of it."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _prepare(self) -> None:
        if self.path.exists() and not self._is_ours():
            shutil.rmtree(self.path)
        (self.path / _MARKS).mkdir(parents=True, exist_ok=True)
        if not self._is_ours():
            self._set_mark("plan", {"fingerprint": self._fingerprint})

    def _is_ours(self) -> bool:
        try:
            plan = json.loads((self.path / _MARKS / _PLAN).read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return False
        return plan == {"fingerprint": self._fingerprint}

    def _mark(self, name: str) -> Path:
        return self.path / _MARKS / f"{name}.json"

    def _set_mark(self, name: str, value: Any) -> None:  # noqa: ANN401 (any JSON)
        temporary = self._mark(name).with_suffix(f".tmp{self.share.process}")
        temporary.write_text(json.dumps(value))
        sync(temporary)
        temporary.rename(self._mark(name))


@contextlib.contextmanager
def naming_failure(destination: Path) -> Iterator[None]:
    """What goes wrong while writing, made plain.

    Raises:
        StorageError: instead of an OSError, or of tensorstore's ValueError about one.
    """
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise StorageError(_advice(destination, error.strerror or str(error), full)) from error
    except ValueError as error:
        if "os_error" not in str(error) and "No space left" not in str(error):
            raise
        raise StorageError(_advice(destination, str(error)[:160], True)) from error


def _advice(destination: Path, what: str, full: bool) -> str:
    remedy = "make room, then" if full else "mend that, then"
    return (
        f"{destination} could not be written ({what}); nothing is there under that name: {remedy} "
        "run the same command to go on"
    )


def _wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise UserError(f"waited {seconds / 60:g} minutes {what}, in vain")
        time.sleep(_POLL)
