"""Staging of files next to their destination, which appears by one rename.

    DST/.<name>.partial/         files written so far
    DST/.<name>.partial/marks/   plan.json, and one small file per finished unit
    DST/.<name>.lock             locked by the conversion
    DST/<name>/                  the result, once every unit is finished

A conversion that was stopped resumes with the units that have no mark.
"""

import contextlib
import errno
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

T = TypeVar("T")

_MARKS = "marks"
_PLAN = "plan.json"
_OS_ERROR = re.compile(r"\[os_error_code='?(\d+)")  # in messages of tensorstore

AT_ONCE = 3
"""Number of units written concurrently: while one is synced to disk, others are read."""


class Unit(NamedTuple):
    """Unit of work, which is finished or not.

    Attributes:
        name: name of the mark.
        nbytes: number of bytes written.
        write: idempotent function that does the work; its result is stored in the mark as JSON.
    """

    name: str
    nbytes: int
    write: Callable[[], Any]


class Staging:
    """Partial directory, as a context manager that releases the locks on exit.

    Args:
        destination: directory to create.
        plan: JSON description of the conversion. A stored partial result of another plan is
            deleted.

    Raises:
        UserError: the destination exists, or another conversion to it is running.
        StorageError: the destination cannot be written.
    """

    def __init__(self, destination: Path, plan: dict[str, Any]) -> None:
        self.destination = destination
        self.path = partial_of(destination)
        fingerprint = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()
        # Before a lock file is created next to a finished result.
        self._check_free()
        with contextlib.ExitStack() as self._locks, naming_failure(destination):
            self._prepare({"fingerprint": fingerprint})
            # Without an exception the lock outlives this block, until `__exit__`.
            self._locks = self._locks.pop_all()

    def __enter__(self) -> "Staging":
        return self

    def __exit__(self, *_: object) -> None:
        self._locks.close()

    def write(self, units: Sequence[Unit], advance: Callable[[int], None]) -> None:
        """Write the unfinished units.

        Args:
            units: all units.
            advance: called with the bytes of each finished unit, including earlier ones.
        """
        for_each(lambda unit: self._write_unit(unit, advance), units, AT_ONCE)

    def _write_unit(self, unit: Unit, advance: Callable[[int], None]) -> None:
        if not self._mark(unit.name).exists():
            with naming_failure(self.destination):
                # The mark follows the data, which are durable by then: a crash repeats the unit.
                self.set_mark(unit.name, unit.write())
        advance(unit.nbytes)

    def results(self, units: Sequence[Unit]) -> dict[str, Any]:
        """Return name -> result of finished units."""
        return {unit.name: json.loads(self._mark(unit.name).read_text()) for unit in units}

    def commit(self, file: str = "") -> None:
        """Sync all files and rename the result to its destination.

        Args:
            file: file in the directory that is the result; "" if the directory is the result.
        """
        with naming_failure(self.destination):
            # Some files, such as a DCP's `.metadata`, are written outside units and not yet
            # durable.
            for directory, _, files in os.walk(self.path):
                for name in files:
                    sync(Path(directory, name))
                sync(Path(directory))
            # Last before the rename: a full disk can no longer stop the conversion, which would
            # have to start anew without its marks.
            shutil.rmtree(self.path / _MARKS)
            (self.path / file).rename(self.destination)
            # The rename is durable once its directory is.
            sync(self.destination.parent)
            if file:
                self.discard()

    def discard(self) -> None:
        """Remove the partial directory."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _prepare(self, plan: dict[str, str]) -> None:
        """Take the lock, and start anew unless the stored plan is the same."""
        self.destination.parent.mkdir(parents=True, exist_ok=True)
        lock = self.destination.with_name(f".{self.destination.name}.lock")
        if not self._locks.enter_context(locks.hold(lock)):
            raise UserError(
                f"{self.destination} is being written by {locks.holder(lock)}: wait for that "
                "conversion, or stop it"
            )
        self._check_free()  # again, now that no other process can create it
        if read_json(self.path / _MARKS / _PLAN) != plan:
            if self.path.exists():
                shutil.rmtree(self.path)
            (self.path / _MARKS).mkdir(parents=True)
            # Last: after a crash before this line, the next attempt starts anew.
            self.set_mark("plan", plan)

    def _check_free(self) -> None:
        if self.destination.exists():
            raise UserError(
                f"{self.destination} is there already; remove it or name another directory"
            )

    def _mark(self, name: str) -> Path:
        return self.path / _MARKS / f"{name}.json"

    def set_mark(self, name: str, value: Any) -> None:  # noqa: ANN401 (any JSON)
        """Write a note of the conversion, which a later attempt reads."""
        write_json(self._mark(name), value)


def for_each(do: Callable[[T], object], items: Iterable[T], at_once: int) -> None:
    """Call a function with each item, `at_once` concurrently, until a call fails."""
    with ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(do, item) for item in items]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def batches(items: Iterable[T], nbytes: Callable[[T], int], least: int) -> Iterator[list[T]]:
    """Yield consecutive items in lists of at least `least` bytes; the last list may be smaller."""
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
    """Turn write errors into StorageErrors that name the destination.

    Raises:
        StorageError: for an OSError, or a ValueError of tensorstore with a system error code.
    """
    try:
        yield
    except (UserError, StorageError):  # with a message already, such as about the source
        raise
    except (OSError, ValueError) as error:
        match = _OS_ERROR.search(str(error))
        if isinstance(error, OSError):
            number = error.errno or errno.EIO
        elif match:
            number = int(match[1])
        else:  # no system error
            raise
        raise StorageError(_advice(destination, number)) from error


def _advice(destination: Path, number: int) -> str:
    what = os.strerror(number)
    remedy = "free space, then" if number in (errno.ENOSPC, errno.EDQUOT) else "fix that, then"
    return (
        f"{destination} could not be written ({what}); nothing exists under that name: {remedy} "
        "run the same command to resume"
    )
