"""Directory in a bucket that readers refuse until it is complete.

    DIR/INCOMPLETE               exists until everything is written; its removal completes DIR
    DIR/.prepare/plan.json       options and inputs: a run with another plan starts over
    DIR/.prepare/journal.json    exists when there is something to resume
    DIR/.prepare/run.lock        held by the process that writes (`run_lock`)
    DIR/...                      objects under their final names

Objects cannot be renamed, so an unfinished directory is visible. `atomic_directory` does the same
for local disks, where nothing is visible before the end.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxforge.errors import InputChangedError, UserError
from jaxforge.storage import buckets, files, run_lock
from jaxforge.storage.atomic_directory import (
    JOURNAL,
    PLAN,
    AtomicDirectory,
    Plan,
    check_plan,
    read_sealed,
    restart_reason,
    write_sealed,
)

INCOMPLETE = "INCOMPLETE"
_STATE = ".prepare"
_NOTE = b"jaxforge prepare has not finished this directory. The same command resumes it.\n"


@contextmanager
def bucket_directory(
    output: Path,
    plan: Plan,
    *,
    marker: str,
    overwrite: bool = False,
    say: Callable[[str], None] = print,
) -> Iterator[AtomicDirectory]:
    """Make a directory of a bucket; see `atomic_directory` for the arguments.

    With `overwrite`, the earlier objects are removed at the start.

    Raises:
        UserError: `output` exists without `overwrite`, or is being written by another process.
    """
    with run_lock.RunLock(output / _STATE) as lock:
        _take(lock, output)
        if not (output / INCOMPLETE).exists():
            _check_output(output, marker, overwrite)
        directory = _open(output, plan, say)
        try:
            yield directory
        except BaseException as error:
            if directory.journal is None or isinstance(error, InputChangedError):
                # nothing to resume from
                _remove(output)
                (output / INCOMPLETE).unlink()
            else:
                say(f"finished parts stay in {output}: the same command resumes from there")
            raise
        if directory.is_complete:
            (output / INCOMPLETE).unlink()
            _remove(output / _STATE)


def attach(output: Path, plan: Plan) -> AtomicDirectory:
    """Return the unfinished directory of another process, to help it.

    Raises:
        UserError: that process has another plan.
    """
    state = output / _STATE
    check_plan(read_sealed(state / PLAN), plan, output)
    return AtomicDirectory(output, read_sealed(state / JOURNAL), state)


def check_complete(directory: Path) -> None:
    """Check that `prepare` has finished a directory, or the directory above it.

    Raises:
        UserError: it has not.
    """
    for path in (directory, directory.parent):
        if (path / INCOMPLETE).exists():
            raise UserError(
                f"{path} is incomplete: `jaxforge prepare` is writing it, or was interrupted. "
                "Wait for it, or repeat its command, which resumes"
            )


def _check_output(output: Path, marker: str, overwrite: bool) -> None:
    if all(name.startswith(f"{_STATE}/") for name in buckets.keys(str(output))):
        return
    if not overwrite:
        raise UserError(f"{output} exists; choose another --output or pass --overwrite")
    if not (output / marker).exists():
        raise UserError(f"{output} was not made by jaxforge.prepare; remove it yourself")


def _take(lock: run_lock.RunLock, output: Path) -> None:
    try:
        lock.take()
    except UserError as error:
        if run_lock.holder(output / _STATE) is None:
            raise
        raise UserError(f"another process is writing {output}; wait for it, or stop it") from error


def _open(output: Path, plan: Plan, say: Callable[[str], None]) -> AtomicDirectory:
    plan = json.loads(json.dumps(plan))  # comparable with the object: tuples become lists
    state = output / _STATE
    before, journal = read_sealed(state / PLAN), read_sealed(state / JOURNAL)
    is_begun = (output / INCOMPLETE).exists()
    if is_begun and before == plan and journal is not None:
        say(f"resuming from {output}")
        return AtomicDirectory(output, journal, state)
    if is_begun and (reason := restart_reason(state, before, plan, journal)):
        say(f"starting over: {reason}")
    # The order matters: after a kill, no reader may see parts, and no run may resume from them.
    files.write(output / INCOMPLETE, _NOTE)
    for name in (JOURNAL, PLAN):
        (state / name).unlink(missing_ok=True)
    _remove(output)
    write_sealed(state / PLAN, plan)
    return AtomicDirectory(output, None, state)


def _remove(directory: Path) -> None:
    """Remove all objects below a directory, except for the marker and the lock."""
    names = set(buckets.keys(str(directory))) - {INCOMPLETE, f"{_STATE}/{run_lock.NAME}"}
    files.remove(directory, sorted(names))
