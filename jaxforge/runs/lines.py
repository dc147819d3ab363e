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

from jaxforge.runs import uniform_json_lines
from jaxforge.storage.untrusted_json import LATEST, LINE, STEPS, parse_metrics

_BLOCK = 1 << 20  # bytes parsed at a time
_KINDS = {int, float, type(None), list}  # of values
_LARGE = 1 << 25  # bytes of a file that are worth another process


class Columns(NamedTuple):
    """Some lines.

    Attributes:
        values: by name of a metric, its steps, times and values ([n] each), NaN where null.
        lists: what is a list in them, line by line, with its "step".
        end: where they end in the file, in bytes.
        lines: how many there are, damaged ones included.
        damaged: number (from 1) and reason of lines that are left out.
    """

    values: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]
    lists: list[dict[str, Any]]
    end: int
    lines: int
    damaged: list[tuple[int, str]]


def read(
    path: Path, start: int = 0, *, exact: bool = True, processes: bool = False
) -> Iterator[Columns]:
    """Read a file from a place on, a local one in parts. Damaged lines are left out.

    Args:
        path: where a run may be writing: the file is read up to its last whole line.
        start: in bytes, the beginning of a line.
        exact: to the last bit; otherwise twice as quick.
        processes: others may help; only where this process' `__main__` can be imported again.
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
    """Yield the offsets at which chunks of whole lines end."""
    size = file.seek(0, os.SEEK_END)
    while start < size:
        at = min(start + _BLOCK, size)
        while at > start:  # back to the last line's end; a line of `LINE` bytes ends the file
            low = max(start, at - 4096)
            file.seek(low)
            newline = file.read(at - low).rfind(b"\n")
            if newline >= 0:
                at = low + newline + 1
                break
            at = low
        if at == start:  # a torn line, or one that is longer than a part
            file.seek(start)
            line = file.readline(LINE)
            if not line.endswith(b"\n"):
                return
            at = start + len(line)
        yield at
        start = at


def _read_part(path: Path, start: int, end: int, exact: bool) -> Columns:
    with path.open("rb") as file:
        file.seek(start)
        text = file.read(end - start)
    lines = text.count(b"\n")
    try:
        quick, others = ({}, text) if exact else uniform_json_lines.read(text)
        rows = json.loads(b"[" + others[:-1].replace(b"\n", b",") + b"]")
        return Columns(*_columns(rows, quick), end, lines, [])
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        rows, damaged = _sound_rows(text)  # slower, and it says which line is damaged
        return Columns(*_columns(rows, {}), end, lines, damaged)


def _sound_rows(text: bytes) -> tuple[list[dict[str, Any]], list[tuple[int, str]]]:
    """Split lines into objects of sound lines, and numbers of damaged lines with a reason."""
    rows, damaged = [], []
    for number, line in enumerate(text.split(b"\n")[:-1], 1):
        row, problem = parse_metrics(line)
        problem = problem or ("" if "time" in row else "no time")
        if problem:
            damaged.append((number, problem))
        else:
            rows.append(row)
    return rows, damaged


def _columns(
    rows: Sequence[dict[str, Any]], quick: Mapping[str, np.ndarray]
) -> tuple[dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]], list[dict[str, Any]]]:
    """Gather metrics and lists of rows, and of columns that were read at once.

    Raises:
        Exception: of many kinds, where a value is not what it should be.
    """
    by_names = defaultdict(list)
    for row in rows:
        by_names[tuple(row)].append(row)
    columns, with_lists = defaultdict(list), False
    if quick:
        _check_axes(quick["step"], quick["time"])
    for name, values in quick.items():
        if name not in ("step", "time"):
            columns[name].append((quick["step"], quick["time"], values))
    for names, group in by_names.items():
        step, time = (np.array([row[name] for row in group], float) for name in ("step", "time"))
        _check_axes(step, time)
        for name in names:
            cells = [row[name] for row in group]
            kinds = set(map(type, cells))
            if not kinds <= _KINDS:
                raise TypeError(name)
            if list in kinds:
                with_lists = True
                scalars = [i for i, cell in enumerate(cells) if not isinstance(cell, list)]
                if scalars:
                    column = np.array([cells[i] for i in scalars], float)
                    columns[name].append((step[scalars], time[scalars], column))
            elif name not in ("step", "time"):
                columns[name].append((step, time, np.array(cells, float)))  # None becomes NaN
    lists = [
        {name: x for name, x in row.items() if name == "step" or isinstance(x, list)}
        for row in (rows if with_lists else ())
    ]
    return {name: joined(parts) for name, parts in columns.items()}, lists


def _check_axes(step: np.ndarray, time: np.ndarray) -> None:
    """Raise ValueError where steps or times are none."""
    steps = (step >= 0) & (step < STEPS) & (step == np.floor(step))
    if not (steps & (time >= 0) & (time < LATEST)).all():
        raise ValueError


def joined(
    parts: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Columns one after the other, by step; those of the same step stay as they are."""
    step, time, value = (np.concatenate(column) for column in zip(*parts, strict=True))
    if (np.diff(step) < 0).any():
        order = np.argsort(step, kind="stable")
        step, time, value = step[order], time[order], value[order]
    return step, time, value
