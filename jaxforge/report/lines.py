"""`metrics.jsonl` as columns: quick enough for the million lines of a long run.

Lines are parsed many at a time, and of a large file by several processes; this module imports
little, as each of them does.
"""

import json
import multiprocessing
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxforge.report import alike

_BLOCK = 1 << 20  # bytes parsed at a time
_LARGE = 1 << 25  # bytes of a file that are worth another process


class Columns(NamedTuple):
    """Some lines.

    Attributes:
        values: by name of a metric, its steps, times and values ([n] each), NaN where null.
        lists: what is a list in them, line by line, with its "step".
        end: where they end in the file, in bytes.
    """

    values: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]
    lists: list[dict[str, Any]]
    end: int


class DamagedError(Exception):
    """A line is no JSON object with a step and a time.

    Attributes:
        start: of the part of the file that it is in, in bytes.
        line: its number within that part, from 1.
    """

    def __init__(self, start: int, line: int) -> None:
        super().__init__(start, line)
        self.start, self.line = start, line


def read(
    path: Path, start: int = 0, *, exact: bool = True, processes: bool = False
) -> Iterator[Columns]:
    """What a file has from a place on: of a local one, in parts.

    Args:
        path: where a run may be writing: the file is read up to its last whole line.
        start: in bytes, the beginning of a line.
        exact: to the last bit; otherwise twice as quick.
        processes: others may help; only where this process' `__main__` can be imported again.

    Raises:
        DamagedError: at the first such line.
    """
    with path.open("rb") as file:
        ends = list(_ends(file, start))
    parts = list(zip([start, *ends], ends, strict=False))
    workers = min(os.cpu_count() or 1, (ends[-1] - start) // _LARGE) if processes and ends else 1
    if workers < 2:
        for part in parts:
            yield _read_part(path, *part, exact)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context) as pool:
        whole = ([path] * len(parts), *zip(*parts, strict=True), [exact] * len(parts))
        yield from pool.map(_read_part, *whole, chunksize=8)


def _ends(file: Any, start: int) -> Iterator[int]:  # noqa: ANN401
    """Where parts of whole lines end."""
    size = file.seek(0, os.SEEK_END)
    while start < size:
        at = min(start + _BLOCK, size)
        while at > start:  # back to the last line's end
            low = max(start, at - 4096)
            file.seek(low)
            found = file.read(at - low).rfind(b"\n")
            if found >= 0:
                at = low + found + 1
                break
            at = low
        if at == start:  # a torn line, or one that is longer than a part
            file.seek(start)
            line = file.readline()
            if not line.endswith(b"\n"):
                return
            at = start + len(line)
        yield at
        start = at


def _read_part(path: Path, start: int, end: int, exact: bool) -> Columns:
    with path.open("rb") as file:
        file.seek(start)
        text = file.read(end - start)
    try:
        quick, others = ({}, text) if exact else alike.read(text)
        rows = json.loads(b"[" + others[:-1].replace(b"\n", b",") + b"]")
        return _columns(rows, quick, end)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise DamagedError(start, _damaged_line(text)) from None


def _damaged_line(text: bytes) -> int:
    for number, line in enumerate(text.splitlines(), 1):
        try:
            one = json.loads(line)
            _ = one["step"], one["time"]
        except (ValueError, TypeError, KeyError):
            return number
    raise AssertionError("each line alone is whole")


def _columns(rows: Sequence[dict[str, Any]], quick: Mapping[str, np.ndarray], end: int) -> Columns:
    """Of rows, and of such as are columns already."""
    alike = defaultdict(list)
    for row in rows:
        alike[tuple(row)].append(row)
    found, with_lists = defaultdict(list), False
    for name, values in quick.items():
        if name not in ("step", "time"):
            found[name].append((quick["step"], quick["time"], values))
    for names, group in alike.items():
        step, time = (np.array([row[name] for row in group], float) for name in ("step", "time"))
        for name in names:
            if isinstance(group[0][name], list):
                with_lists = True
            elif name not in ("step", "time"):
                values = np.array([row[name] for row in group], float)  # None becomes NaN
                found[name].append((step, time, values))
    lists = [_lists(row) for row in rows] if with_lists else []
    return Columns({name: joined(parts) for name, parts in found.items()}, lists, end)


def _lists(row: dict[str, Any]) -> dict[str, Any]:
    return {name: one for name, one in row.items() if name == "step" or isinstance(one, list)}


def joined(
    parts: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Columns one after the other, by step; those of the same step stay as they are."""
    step, time, value = (np.concatenate(column) for column in zip(*parts, strict=True))
    if (np.diff(step) < 0).any():
        order = np.argsort(step, kind="stable")
        step, time, value = step[order], time[order], value[order]
    return step, time, value
