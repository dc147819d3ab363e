"""Staging of files next to their destination, where they appear all at once.

    DST/.<name>.partial/         what is written so far
    DST/.<name>.partial/marks/   plan.json, and one small file for each finished unit of work
    DST/.<name>.lock0, 1, ...    each locked by the process of that number
    DST/<name>/                  by one rename, when every unit is there

A conversion that was stopped goes on with the units that have no mark. Several processes share a
destination by taking turns through the units; the first one waits for the marks and commits.
"""

import contextlib
import errno
import functools
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from jaxforge.errors import StorageError, UserError
from jaxforge.storage import locks
from jaxforge.storage.atomic_directory import partial_of, read_json, write_json
from torch_compat.formats.files import sync
from torch_compat.formats.workers import Share

T = TypeVar("T")

_MARKS = "marks"
_PLAN = "plan.json"
_OS_ERROR = re.compile(r"\[os_error_code='?(\d+)")  # in the messages of tensorstore
_JOIN, _LEAVE = 600, 60  # seconds to wait for process 0 to begin, and for others to end

AT_ONCE = 3
"""Units that are written at a time: while one is synced to disk, others are read."""


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
    """The partial form of a directory, as a context manager: at its end the locks are released.

    Args:
        destination: the directory that there will be.
        plan: JSON that says what is converted into what; another plan starts anew.
        share: which of several processes this one is.

    Raises:
        UserError: the destination is there already, or another conversion to it is under way.
        StorageError: it cannot be written to.
    """

    def __init__(self, destination: Path, plan: dict[str, Any], share: Share) -> None:
        self.destination, self.share = destination, share
        self.path = partial_of(destination)
        self._fingerprint = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()
        self._check_free()
        with contextlib.ExitStack() as self._locks, naming_failure(destination):
            if share.process == 0:
                self._prepare()
            else:
                seconds = _JOIN if share.parent is None else _LEAVE
                what = f"for process 0 to begin this at {self.path}"
                locks.wait_until(self._has_joined, seconds, what)
            self._locks = self._locks.pop_all()

    def __enter__(self) -> "Staging":
        return self

    def __exit__(self, *_: object) -> None:
        self._locks.close()

    def write(self, units: Sequence[Unit], advance: Callable[[int], None]) -> None:
        """Does this process's share of the units that are not done.

        Args:
            units: all of them, the same in every process.
            advance: called with the bytes of each unit that is done, before or now.
        """
        ours = units[self.share.process :: self.share.processes]
        for_each(lambda unit: self._write_one(unit, advance), ours, AT_ONCE)

    def _write_one(self, unit: Unit, advance: Callable[[int], None]) -> None:
        if self.share.parent not in (None, os.getppid()):
            raise UserError(f"{self.destination}: process 0, which started this one, has ended")
        if not self._mark(unit.name).exists():
            with naming_failure(self.destination):
                self._set_mark(unit.name, unit.write())
        advance(unit.nbytes)

    def results(
        self, units: Sequence[Unit], check: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """Return the results of all units; wait for other processes while calling `check`."""
        names = [unit.name for unit in units]

        def complete() -> bool:
            check()
            return all(self._mark(name).exists() for name in names)

        locks.wait_until(complete, 24 * 3600, "for the other processes to do their share")
        return {name: json.loads(self._mark(name).read_text()) for name in names}

    def commit(self, file: str = "") -> None:
        """Give the result its name. Only process 0 does; nothing may change afterwards.

        Args:
            file: the file in the directory that is the result; "" if the directory is.
        """
        with naming_failure(self.destination):
            for directory, _, files in os.walk(self.path):
                for name in files:
                    sync(Path(directory, name))
                sync(Path(directory))
            shutil.rmtree(self.path / _MARKS)  # after all that a full disk can stop
            (self.path / file).rename(self.destination)
            sync(self.destination.parent)
            if file:
                self.discard()

    def discard(self) -> None:
        """Removes what is left of it."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _prepare(self) -> None:
        """Write the plan unless it is there; another plan waits until no helper is left.

        A helper holds its lock for as long as it works, and joins under the stored plan alone: that
        says how many locks there are.
        """
        self.destination.parent.mkdir(parents=True, exist_ok=True)
        if not self._take(0, self._locks):
            raise UserError(
                f"{self.destination} is being written by {locks.holder(self._lock_of(0))}: wait "
                "for that conversion, or stop it"
            )
        self._check_free()  # now that nobody else can make it
        if (stored := self._plan()) == self._as_planned:
            return
        what = f"for other processes that write to {self.path} to end"
        with contextlib.ExitStack() as helpers:
            for i in range(1, stored.get("processes", 1)):
                locks.wait_until(functools.partial(self._take, i, helpers), _LEAVE, what)
            if stored.get("fingerprint") != self._fingerprint and self.path.exists():
                shutil.rmtree(self.path)
            (self.path / _MARKS).mkdir(parents=True, exist_ok=True)
            self._set_mark("plan", self._as_planned)

    def _check_free(self) -> None:
        if self.destination.exists():
            raise UserError(f"{self.destination} is there already; remove it or name another place")

    def _has_joined(self) -> bool:
        with contextlib.ExitStack() as own:
            self._check_free()
            if not self.path.is_dir() or not self._take(self.share.process, own):
                return False
            if self._plan() == self._as_planned:
                self._locks = own.pop_all()
                return True
            if self.share.parent is not None:
                raise UserError(
                    f"{self.destination}: the source or the config has changed since process 0 "
                    "looked: run the same command again"
                )
            return False

    def _lock_of(self, process: int) -> Path:
        return self.destination.with_name(f".{self.destination.name}.lock{process}")

    def _take(self, process: int, locks_held: contextlib.ExitStack) -> bool:
        return locks_held.enter_context(locks.hold(self._lock_of(process)))

    @property
    def _as_planned(self) -> dict[str, Any]:
        return {"fingerprint": self._fingerprint, "processes": self.share.processes}

    def _plan(self) -> dict[str, Any]:
        with contextlib.suppress(json.JSONDecodeError):
            return read_json(self.path / _MARKS / _PLAN) or {}
        return {}

    def _mark(self, name: str) -> Path:
        return self.path / _MARKS / f"{name}.json"

    def _set_mark(self, name: str, value: Any) -> None:  # noqa: ANN401 (any JSON)
        write_json(self._mark(name), value)


def for_each(do: Callable[[T], object], items: Iterable[T], at_once: int) -> None:
    """Calls a function with each, `at_once` at a time, until one of them fails."""
    with ThreadPoolExecutor(at_once) as pool:
        under_way = [pool.submit(do, item) for item in items]
        try:
            for unit in under_way:
                unit.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def batches(items: Iterable[T], nbytes: Callable[[T], int], least: int) -> Iterator[list[T]]:
    """Items in their order, in lists of `least` bytes or just above; the last has what is left."""
    batch: list[T] = []
    size = 0
    for item in items:
        batch.append(item)
        size += nbytes(item)
        if size >= least:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@contextlib.contextmanager
def naming_failure(destination: Path) -> Iterator[None]:
    """Rewrite errors while writing as plain messages.

    Raises:
        StorageError: instead of an OSError, or of tensorstore's ValueError about one.
    """
    try:
        yield
    except (UserError, StorageError):  # these say what was wrong: with the source, say
        raise
    except (OSError, ValueError) as error:
        match = _OS_ERROR.search(str(error))
        if isinstance(error, OSError):
            number = error.errno or errno.EIO
        elif match:
            number = int(match[1])
        else:  # nothing of the system's
            raise
        raise StorageError(_advice(destination, number)) from error


def _advice(destination: Path, number: int) -> str:
    what = os.strerror(number)
    remedy = "make room, then" if number in (errno.ENOSPC, errno.EDQUOT) else "mend that, then"
    return (
        f"{destination} could not be written ({what}); nothing is there under that name: {remedy} "
        "run the same command to resume"
    )
