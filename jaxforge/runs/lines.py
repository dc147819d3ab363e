"""Reader of `metrics.jsonl` as columns, fast enough for a million lines.

Lines are parsed in blocks, and large files by several processes. This module imports little,
because each process imports it.
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

BLOCK = 1 << 20  # bytes parsed at a time
_KINDS = {int, float, type(None), list}  # types of values
LARGE = 1 << 25  # bytes per process


class Columns(NamedTuple):
    """Consecutive lines as columns.

    Attributes:
        values: steps, times and values ([n] each, NaN for null) of each metric by name.
        lists: list values of each line, with its "step".
        end: offset of the end of the lines in the file, in bytes.
        lines: number of lines, damaged lines included.
        damaged: number (from 1) and problem of each damaged line, which is skipped.
    """

    values: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]
    lists: list[dict[str, Any]]
    end: int
    lines: int
    damaged: list[tuple[int, str]]


def read(
    path: Path, start: int = 0, *, exact: bool = True, processes: bool = False
) -> Iterator[Columns]:
    """Yield the lines of a file from an offset on, in blocks. Damaged lines are skipped.

    Args:
        path: the file; if a run is writing to it, it is read up to the last whole line.
        start: offset of the beginning of a line, in bytes.
        exact: parse numbers exactly; otherwise twice as fast, with errors in the last bit.
        processes: allow several processes; this process' `__main__` must be importable.
    """
    with path.open("rb") as file:
        ends = list(_ends(file, start))
    parts = list(zip([start, *ends], ends, strict=False))
    workers = min(os.cpu_count() or 1, (ends[-1] - start) // LARGE) if processes and ends else 1
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
        at = min(start + BLOCK, size)
        while at > start:  # search backwards for the last newline
            low = max(start, at - 4096)
            file.seek(low)
            newline = file.read(at - low).rfind(b"\n")
            if newline >= 0:
                at = low + newline + 1
                break
            at = low
        if at == start:  # an incomplete line, or a line longer than a block
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
        rows, damaged = _sound_rows(text)  # slower, but finds the damaged lines
        return Columns(*_columns(rows, {}), end, lines, damaged)


def _sound_rows(text: bytes) -> tuple[list[dict[str, Any]], list[tuple[int, str]]]:
    """Return the objects of valid lines, and the numbers of damaged lines with the problem."""
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
    """Combine rows and vectorized columns to metrics and lists.

    Raises:
        Exception: of many types, if a value is invalid.
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
    """Raise ValueError for invalid steps or times."""
    steps = (step >= 0) & (step < STEPS) & (step == np.floor(step))
    if not (steps & (time >= 0) & (time < LATEST)).all():
        raise ValueError


def joined(
    parts: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Concatenate columns and sort them by step, stably."""
    step, time, value = (np.concatenate(column) for column in zip(*parts, strict=True))
    if (np.diff(step) < 0).any():
        order = np.argsort(step, kind="stable")
        step, time, value = step[order], time[order], value[order]
    return step, time, value
