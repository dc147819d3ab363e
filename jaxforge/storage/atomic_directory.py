"""Directory that is written completely or not at all, and resumed after a kill.

.DIR.partial/
    plan.json       options and inputs: a run with another plan starts over
    journal.json    durable progress: content of out/ beyond it is discarded
    out/            becomes DIR by a rename
.DIR.old            previous DIR, during a replacement
.DIR.lock           held by the one process that writes

States after a kill -9, in the order of writing. The lock ends with the process (`locks`).

    killed ...                    DIR      .DIR.partial         next run
    before the first commit       old      plan.json, out/      starts over
    after a commit                old      all                  resumes at journal.json
    between the two renames       none     all                  resumes, then renames
    after the second rename       new      without out/         DIR exists; overwrite starts over

Objects of a bucket cannot be renamed, so an unfinished directory is visible there, and readers
refuse it (`check_complete`):

DIR/INCOMPLETE             exists until everything is written; its removal completes DIR
DIR/.prepare/plan.json     as above, and journal.json
DIR/.prepare/run.lock      held by the process that writes (`run_lock`)
DIR/...                    objects under their final names
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxforge.errors import InputChangedError, StorageError, UserError, file_error
from jaxforge.storage import locks, run_lock, safe_files, urls
from jaxforge.storage.seals import add_seal, remove_seal

PLAN, JOURNAL = "plan.json", "journal.json"
INCOMPLETE = "INCOMPLETE"
_STATE = ".prepare"
_NOTE = b"jaxforge prepare has not finished this directory. The same command resumes it.\n"

_FILE = "file"  # key of the name of a sealed file
_MOST_BYTES = 1 << 30  # 10 million inputs

Plan = dict[str, Any]
"""JSON with `options` (values by name) and `inputs` (lists of strings that begin with a name)."""


@dataclass
class AtomicDirectory:
    """An unfinished directory.

    Attributes:
        out: the directory that becomes DIR.
        journal: progress of an earlier run; None at the start.
        state: directory of the plan and of the progress, which does not become a part of DIR.
        is_complete: False to leave the directory unfinished for other processes.
    """

    out: Path
    journal: dict[str, Any] | None
    state: Path
    is_complete: bool = True

    def commit(self, journal: dict[str, Any]) -> None:
        """Record the progress durably. The caller has already synced the files it refers to."""
        # A kill before this write repeats the work since the last commit, but never skips any.
        self.journal = journal
        write_sealed(self.state / JOURNAL, journal)


@contextmanager
def atomic_directory(
    output: Path,
    plan: Plan,
    *,
    marker: str,
    overwrite: bool = False,
    shared: bool = False,
    say: Callable[[str], None] = print,
) -> Iterator[AtomicDirectory | None]:
    """Make the directory `output` completely or not at all.

    After a failure, finished parts stay next to `output`. The next run with the same plan resumes
    from them.

    Args:
        output: the directory to create, on a disk or in a bucket.
        plan: everything that determines its content.
        marker: a file below `output` that identifies directories created by this program.
        overwrite: replace an existing `output` that was created by this program. In a bucket, its
            objects are removed at the start.
        shared: several processes need `output`. One creates it while the others wait. If it exists,
            None is yielded. Only for disks.
        say: receives messages about resuming and starting over.

    Raises:
        UserError: `output` exists without `overwrite`, cannot be written, or is being written by
            another process.
        StorageError: the disk is full or fails, or an input does not arrive from a bucket.
    """
    plan = json.loads(json.dumps(plan))  # comparable with the file: tuples become lists
    if urls.in_bucket(output):
        assert not shared
        with _in_bucket(output, plan, marker, say, overwrite=overwrite) as directory:
            yield directory
        return
    output = output.absolute()
    partial, old = partial_of(output), output.with_name(f".{output.name}.old")
    try:
        if not shared:
            check_output(output, marker, overwrite)
        with suppress(FileExistsError):  # the parent is a file, which the lock reports
            output.parent.mkdir(parents=True, exist_ok=True)
        with locks.hold(output.with_name(f".{output.name}.lock"), wait=shared) as is_held:
            if not is_held:
                raise UserError(_IN_USE.format(output))
            if shared and output.exists():  # another process has finished while this one waited
                yield None
                return
            partial.mkdir(exist_ok=True)
            directory = _open(partial, plan, say)
            with _cleaned_up(directory, partial, lambda: _remove(partial), say):
                yield directory
            if not directory.is_complete:
                return
            # A directory cannot be replaced by one rename, so DIR is missing between these two. The
            # old content is removed last: at any time, a complete version is on the disk.
            _remove(old)
            if output.exists():
                output.rename(old)
            directory.out.rename(output)
            _remove(old)
            _remove(partial)
    except StorageError:
        raise
    except OSError as error:
        raise file_error(f"cannot write {error.filename or output}", error) from error


_IN_USE = "another process is writing {}; wait for it, or stop it"


@contextmanager
def _cleaned_up(
    directory: AtomicDirectory, where: Path, remove: Callable[[], None], say: Callable[[str], None]
) -> Iterator[None]:
    """Remove a directory after a failure from which nothing can resume."""
    try:
        yield
    except BaseException as error:
        if directory.journal is None or isinstance(error, InputChangedError):
            remove()
        else:
            say(f"finished parts stay in {where}: the same command resumes from there")
        raise


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def check_output(output: Path, marker: str, overwrite: bool) -> None:
    """Check that a directory can be written; arguments as for `atomic_directory`.

    Raises:
        UserError: `output` exists without `overwrite`, or was not made by this program.
    """
    if output.exists() and not overwrite:
        raise UserError(f"{output} exists; choose another --output or pass --overwrite")
    if output.exists() and not (output / marker).exists():
        raise UserError(f"{output} was not made by this command; remove it yourself")


def _resumed(
    out: Path, state: Path, plan: Plan, say: Callable[[str], None], *, is_begun: bool
) -> AtomicDirectory | None:
    """Return the directory of an earlier run with the same plan, or say why there is none."""
    before, journal = read_sealed(state / PLAN), read_sealed(state / JOURNAL)
    if is_begun and before == plan and journal is not None:
        return AtomicDirectory(out, journal, state)
    if is_begun and (reason := _restart_reason(state, before, plan, journal)):
        say(f"starting over: {reason}")
    return None


def _open(partial: Path, plan: Plan, say: Callable[[str], None]) -> AtomicDirectory:
    out = partial / "out"
    # A kill after the final rename leaves a journal without out/, from which nothing can resume.
    if directory := _resumed(out, partial, plan, say, is_begun=out.is_dir()):
        say(f"resuming from {partial}")
        return directory
    # The journal goes first: after a kill in this loop, nothing must resume from parts of out/.
    (partial / JOURNAL).unlink(missing_ok=True)
    for path in partial.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    out.mkdir()
    write_sealed(partial / PLAN, plan)
    return AtomicDirectory(out, None, partial)


@contextmanager
def _in_bucket(
    output: Path, plan: Plan, marker: str, say: Callable[[str], None], *, overwrite: bool
) -> Iterator[AtomicDirectory]:
    state = output / _STATE
    with run_lock.RunLock(state) as lock:
        try:
            lock.take()
        except UserError as error:
            if run_lock.holder(state) is None:
                raise
            raise UserError(_IN_USE.format(output)) from error
        is_begun = (output / INCOMPLETE).exists()
        if not is_begun and any(not name.startswith(_STATE) for name in _objects(output)):
            check_output(output, marker, overwrite)
        directory = _resumed(output, state, plan, say, is_begun=is_begun)
        if directory:
            say(f"resuming from {output}")
        else:
            # The order matters: after a kill, no reader may see parts, and no run may resume from
            # them.
            write_bytes(output / INCOMPLETE, _NOTE)
            for name in (JOURNAL, PLAN):
                (state / name).unlink(missing_ok=True)
            _remove_objects(output)
            write_sealed(state / PLAN, plan)
            directory = AtomicDirectory(output, None, state)

        def remove() -> None:
            _remove_objects(output)
            (output / INCOMPLETE).unlink()

        with _cleaned_up(directory, output, remove, say):
            yield directory
        if directory.is_complete:
            (output / INCOMPLETE).unlink()
            _remove_objects(state)


def _objects(directory: Path) -> list[str]:
    """Return the objects below a directory, except for the marker and the lock."""
    from jaxforge.storage import buckets  # the clients take a second to import

    lock = run_lock.NAME if directory.name == _STATE else f"{_STATE}/{run_lock.NAME}"
    return sorted({*buckets.keys(str(directory))} - {INCOMPLETE, lock})


def _remove_objects(directory: Path) -> None:
    from jaxforge.storage import files

    files.remove(directory, _objects(directory))


def check_complete(directory: Path) -> None:
    """Check that `prepare` has finished a directory of a bucket, or the directory above it.

    Raises:
        UserError: it has not.
    """
    for path in (directory, directory.parent):
        if (path / INCOMPLETE).exists():
            raise UserError(
                f"{path} is incomplete: `jaxforge prepare` is writing it, or was interrupted. "
                "Wait for it, or repeat its command, which resumes"
            )


def attach(output: Path, plan: Plan) -> AtomicDirectory:
    """Return the unfinished directory of another process, to help it.

    Raises:
        UserError: there is no plan, or that process has another one.
    """
    if urls.in_bucket(output):
        out, state = output, output / _STATE
    else:
        state = partial_of(output.absolute())
        out = state / "out"
    before = read_sealed(state / PLAN)
    if before is None:
        raise UserError(
            f"nothing is planned for {output}, or it is complete: plan it with --slurm N first"
        )
    plan = json.loads(json.dumps(plan))
    if before != plan:
        raise UserError(
            f"{output} was planned otherwise: {difference(before, plan)}. Plan it again"
        )
    return AtomicDirectory(out, read_sealed(state / JOURNAL), state)


def discard(state: Path, source: str) -> None:
    """Change a plan, so that no process resumes from work on an input that has changed.

    Args:
        state: directory of the plan.
        source: name of the input.
    """
    plan = read_sealed(state / PLAN)
    if plan:
        items = [[source, "changed"] if item[0] == source else item for item in plan["inputs"]]
        write_sealed(state / PLAN, {**plan, "inputs": items})


def _restart_reason(state: Path, before: Plan | None, plan: Plan, journal: object) -> str:
    """Return why nothing can resume from a state; "" if there is nothing to resume from.

    Args:
        state: directory of the state.
        before: its plan; None if it does not exist or is damaged.
        plan: the present plan.
        journal: its journal; None if it does not exist or is damaged.
    """
    for name, values in ((PLAN, before), (JOURNAL, journal)):
        if values is None and (state / name).exists():
            return f"{state / name} is damaged, or from another version of jaxforge"
    return difference(before, plan) if journal and before and before != plan else ""


def difference(before: Plan, now: Plan) -> str:
    """Describe in one line how a plan differs from an earlier one."""
    was, value = before["options"], now["options"]
    for name in value | was:
        if was.get(name) != value.get(name):
            return f"{name} was {was.get(name)}, and is {value.get(name)}"
    old, new = ({item[0]: item for item in plan["inputs"]} for plan in (before, now))
    changed = [name for name in old | new if old.get(name) != new.get(name)]
    if not changed:
        return "the order of inputs changed"
    name, more = changed[0], f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
    verb = "changed" if name in old and name in new else "is new" if name in new else "is gone"
    return f"{name} {verb} since the earlier run{more}"


def partial_of(destination: Path) -> Path:
    """Return the directory that collects the content of `destination`."""
    return destination.with_name(f".{destination.name}.partial")


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file or an object of a bucket.

    None if it does not exist or is damaged, so that what it describes is made again.
    """
    try:
        value = json.loads(safe_files.read_regular(path, _MOST_BYTES, end=b"}"))
    except (FileNotFoundError, safe_files.IrregularFileError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_sealed(path: Path) -> dict[str, Any] | None:
    """Return the values of `write_sealed` as `read_json`."""
    try:
        values = remove_seal(read_json(path), str(path))
    except (ValueError, RecursionError):
        return None
    return values if values.pop(_FILE, None) == path.name else None


def write_sealed(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON file as `write_json`, with its name and a checksum for `read_sealed`."""
    write_json(path, add_seal({**values, _FILE: path.name}))


def write_json(path: Path, value: object) -> None:
    """Write a JSON file, or an object of a bucket, atomically and durably."""
    write_bytes(path, json.dumps(value).encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file, or an object of a bucket, atomically and durably."""
    if urls.in_bucket(path):
        path.write_bytes(data)
        return
    with safe_files.replacing(path, durable=True) as file:
        file.write(data)
