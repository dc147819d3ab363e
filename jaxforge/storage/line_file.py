"""Append-only files of JSON lines.

No line is lost while a disk is temporarily full, and a damaged line does not affect other lines.
"""

import collections
import errno
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from jaxforge.errors import StorageError
from jaxforge.storage import safe_files
from jaxforge.storage.untrusted_json import parse_line

log = logging.getLogger(__name__)

_MAX_WAITING = 100_000  # lines of about 600 bytes
_LISTED = 5  # line numbers in a message


IsRepeated = Callable[[Mapping[str, Any]], bool]
"""Whether a resumed run writes a line again."""


class LineFile:
    """Append-only file. Lines that cannot be written stay in memory until the next append.

    Args:
        path: the file, created with the first line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._waiting: collections.deque[tuple[int, bytes]] = collections.deque()
        self._dropped = 0

    def append(self, *lines: str, step: int = 0) -> None:
        """Write pending lines and then new lines.

        Args:
            lines: lines without line ends.
            step: the step of the lines.

        Raises:
            OSError: some lines could not be written; they stay pending.
        """
        # Queued before any is written: lines stay in order also after a failed write.
        self._waiting.extend((step, line.encode() + b"\n") for line in lines)
        # The oldest go first: a run on a full disk must not run out of memory as well.
        while len(self._waiting) > _MAX_WAITING:
            self._waiting.popleft()
            self._dropped += 1
        self._write_waiting()

    def rewind(self, step: int, is_repeated: IsRepeated = lambda line: False) -> None:
        """Drop the lines of later steps, as `keep_sound_lines` does.

        Args:
            step: the step from which the run continues.
            is_repeated: whether the run will write a line of this step again.

        Raises:
            OSError: the file cannot be read or changed.
        """
        earlier = (waiting for waiting in self._waiting if waiting[0] <= step)
        self._waiting = collections.deque(earlier)
        if self._path.exists():
            keep_sound_lines(self._path, step, is_repeated)
        self._close_file()  # the path may name another file now

    def close(self) -> None:
        """Make every line durable.

        Raises:
            StorageError: some lines could not be written; the message has their number.
        """
        steps = [step for step, _ in self._waiting]
        try:
            self._write_waiting()
            if self._file:
                os.fsync(self._file.fileno())
        except OSError as error:
            raise StorageError(self._loss(steps[-len(self._waiting) :], error)) from error
        finally:
            self._close_file()
        if self._dropped:
            raise StorageError(f"{self._path} lacks {self._dropped} lines: the disk was full")

    def _write_waiting(self) -> None:
        if not self._waiting:
            return
        file = self._file = self._file or safe_files.open_to_append(self._path)
        while self._waiting:
            line, end = self._waiting[0][1], file.tell()
            if file.write(line) < len(line):
                file.truncate(end)  # an incomplete line would damage the next line
                file.seek(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._waiting.popleft()

    def _close_file(self) -> None:
        if self._file:
            self._file.close()
        self._file = None

    def _loss(self, steps: list[int], error: OSError) -> str:
        """Describe the lines that could not be written."""
        reason = error.strerror or str(error)
        if not self._waiting:
            return f"{self._path} may lack its last lines: {reason}"
        of_steps = f" (steps {steps[0]} to {steps[-1]})" if steps[-1] else ""
        count = len(self._waiting) + self._dropped
        return f"{self._path} lacks the last {count} lines{of_steps}: {reason}"


def keep_sound_lines(
    path: Path, last_step: int | None = None, is_repeated: IsRepeated = lambda line: False
) -> None:
    """Drop the lines after a step, and move damaged lines to a file next to this one.

    A line is sound if it is a JSON object with an integer `step`. The damaged lines of
    `metrics.jsonl` are appended to `metrics.damaged.jsonl`, with a warning.

    Args:
        path: a file of lines.
        last_step: drop lines of later steps; by default keep all.
        is_repeated: whether to drop a line of `last_step`, too.

    Raises:
        OSError: the file cannot be read or changed.
    """
    later: set[int] = set()
    damaged: set[int] = set()
    first_end, count, needs_end = 0, 0, False  # bytes before the first removed line
    with path.open("rb") as file:
        for count, line in enumerate(file, 1):
            # The step of a line decides alone: other fields may be of a newer version.
            value, problem = parse_line(line)
            step = None if problem else value.get("step")
            if type(step) is not int:
                damaged.add(count)
            elif last_step is not None and (
                step > last_step or (step == last_step and is_repeated(value))
            ):
                later.add(count)
            elif not damaged and not later:
                first_end += len(line)
            needs_end = not line.endswith(b"\n")
    is_end = later == set(range(count - len(later) + 1, count + 1))  # or empty: common cases
    # Usual case: lines of later steps are the end of the file, which is cut off in place.
    if is_end and not damaged and not (needs_end and not later):
        with safe_files.open_to_append(path) as file:
            file.truncate(first_end)
        return
    aside = path.with_name(f"{path.stem}.damaged{path.suffix}")
    _rewrite(path, aside, later, damaged)
    if damaged:
        numbers = ", ".join(map(str, sorted(damaged)[:_LISTED]))
        more = ", ..." if len(damaged) > _LISTED else ""
        log.warning("%s had %d damaged lines (%s%s): moved to %s. All other lines are kept",
                    path, len(damaged), numbers, more, aside.name)  # fmt: skip


def _rewrite(path: Path, aside: Path, later: set[int], damaged: set[int]) -> None:
    """Replace a file by its lines that are neither later nor damaged.

    Damaged lines are durable in `aside` before they leave the file.
    """
    with path.open("rb") as source, safe_files.replacing(path, durable=True) as target:
        if damaged:
            with safe_files.open_to_append(aside) as bad:
                bad.writelines(_ended(line) for n, line in enumerate(source, 1) if n in damaged)
                bad.flush()
                os.fsync(bad.fileno())
            # Second pass: damaged lines are safe in the other file now.
            source.seek(0)
        out = later | damaged
        target.writelines(_ended(line) for n, line in enumerate(source, 1) if n not in out)


def _ended(line: bytes) -> bytes:
    return line if line.endswith(b"\n") else line + b"\n"
