"""A directory in the making: it takes its place when whole, and a killed run goes on with it.

.DIR.partial/
    plan.json       what is to be made: a run that plans something else starts over
    journal.json    how far it is; what the files hold beyond is cut off
    out/            becomes DIR

One process at a time works on it: the one that has locked `.DIR.lock`.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxforge.errors import UserError
from jaxforge.storage import locks, safe_files

Plan = dict[str, Any]
"""`options`: values by name; `inputs`: lists of strings that begin with a name. For JSON."""


@dataclass
class AtomicDirectory:
    """The directory in the making.

    Attributes:
        out: what becomes DIR.
        journal: how far an earlier run came; None at the start.
    """

    out: Path
    journal: dict[str, Any] | None

    def commit(self, journal: dict[str, Any]) -> None:
        """Records, durably, how far it is. The files that it speaks of are on the disk."""
        self.journal = journal
        write_json(self.out.parent / "journal.json", journal)


@contextmanager
def atomic_directory(
    output: Path,
    plan: Plan,
    *,
    made_by: str,
    overwrite: bool = False,
    shared: bool = False,
    say: Callable[[str], None] = print,
) -> Iterator[AtomicDirectory | None]:
    """Make the directory `output` completely or not at all.

    After a failure, what is finished stays next to `output` and serves the next run with the same
    plan.

    Args:
        output: the directory to make.
        plan: what it depends on.
        made_by: a file below `output` that tells that this program made it.
        overwrite: `output` may exist, if this program made it.
        shared: any number of processes want `output`: one makes it while the others wait. Where
            it exists, None is yielded.
        say: is told why work starts over, goes on, or stays.

    Raises:
        UserError: `output` exists and is not to be overwritten, or cannot be written, or another
            process is making it.
    """
    output = output.absolute()
    partial, old = partial_of(output), output.with_name(f".{output.name}.old")
    try:
        if not shared:
            _check_output(output, made_by, overwrite)
        with suppress(FileExistsError):  # a file, as the lock will find
            output.parent.mkdir(parents=True, exist_ok=True)
        with locks.hold(output.with_name(f".{output.name}.lock"), wait=shared) as is_held:
            if not is_held:
                raise UserError(f"another process is writing {output}; wait for it, or end it")
            if shared and output.exists():
                yield None
                return
            partial.mkdir(exist_ok=True)
            directory = _open(partial, plan, say)
            try:
                yield directory
            except BaseException:
                if directory.journal is None:
                    shutil.rmtree(partial, ignore_errors=True)
                else:
                    say(f"what is finished stays in {partial}: the same command goes on from there")
                raise
            shutil.rmtree(old, ignore_errors=True)
            if output.exists():
                output.rename(old)
            directory.out.rename(output)
            for leftover in (old, partial):
                shutil.rmtree(leftover, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"cannot write {error.filename or output}: {error.strerror or error}"
        ) from error


def _check_output(output: Path, made_by: str, overwrite: bool) -> None:
    if output.exists() and not overwrite:
        raise UserError(f"{output} exists; choose another --output or pass --overwrite")
    if output.exists() and not (output / made_by).exists():
        raise UserError(f"{output} was not made by jaxforge.prepare; remove it yourself")


def _open(partial: Path, plan: Plan, say: Callable[[str], None]) -> AtomicDirectory:
    plan = json.loads(json.dumps(plan))  # as it will be read back
    before, journal = (read_json(partial / name) for name in ("plan.json", "journal.json"))
    if before == plan and journal is not None:
        say(f"going on with {partial}")
        return AtomicDirectory(partial / "out", journal)
    if before is not None and journal is not None:
        say(f"starting over: {_difference(before, plan)}")
    for path in partial.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (partial / "out").mkdir()
    write_json(partial / "plan.json", plan)
    return AtomicDirectory(partial / "out", None)


def _difference(before: Plan, now: Plan) -> str:
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
    """Return the directory in which the content of `destination` gathers."""
    return destination.with_name(f".{destination.name}.partial")


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file; None if the file does not exist."""
    with suppress(FileNotFoundError):
        return json.loads(path.read_bytes())
    return None


def write_json(path: Path, value: object) -> None:
    """Replace a JSON file by one whose content is on the disk."""
    with safe_files.replacing(path, durable=True) as file:
        file.write(json.dumps(value).encode())
