"""Reader of `metrics.jsonl` as columns, fast enough for a million lines."""

import os
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import orjson

from jaxforge.cli.suggestions import path_hint
from jaxforge.errors import UserError, printable
from jaxforge.storage.untrusted_json import LATEST, LINE, STEPS, Omissions, is_number, parse_metrics
from jaxforge.telemetry.measures import LOAD

_NAME = re.compile(rf"{re.escape(LOAD)}[0-9]{{1,6}}$")
_EXPERTS = 1 << 16  # limit per layer
_VALUES = 600_000  # limit per run over all layers and experts, for the size of the page
_FEWEST, _MOST = 32, 300  # columns; a figure is a few hundred pixels wide


class Loads(NamedTuple):
    """Load of experts in columns, each the mean of consecutive logged steps.

    Attributes:
        layers: [L], layers with experts.
        step: [n], increasing, mean step of each column.
        value: [n, L, E], assignments of an expert relative to an even load; NaN if not finite.
        each: logged steps per column; the last column may have fewer.
        most: upper bound of n.
        last_step: the last logged step.
        last: [L, E], load at the last logged step.
    """

    layers: list[int]
    step: np.ndarray
    value: np.ndarray
    each: int
    most: int
    last_step: int
    last: np.ndarray


class LoadReader:
    """Accumulator of the expert loads of logged steps.

    When the number of columns would exceed `Loads.most`, pairs of columns are merged, and later
    columns hold as many steps. So the steps of a column depend on the run alone.
    """

    def __init__(self) -> None:
        self._layers: list[int] = []
        self._shape: tuple[int, ...] = ()  # layers, experts
        self._most, self._each = 0, 1
        self._sums: list[np.ndarray] = []  # by column, [1 + L E]: sum of steps, sums of loads
        self._counts: list[int] = []  # by column: number of logged steps
        self._last = np.empty(0)

    def take(self, line: Mapping[str, Any]) -> str:
        """Add the loads of a line of metrics.jsonl, if it has any.

        Returns:
            The reason why the loads are skipped, or "".
        """
        lists = {int(name.removeprefix(LOAD)): line[name] for name in line if _NAME.match(name)}
        if not lists:
            return ""
        if not all(map(_is_load, lists.values())) or len(set(map(len, lists.values()))) > 1:
            return "the load of experts is not as many numbers for each layer"
        loads = np.array([*lists.values()], float)  # None becomes NaN
        if not self._layers:
            self._layers, self._shape = list(lists), loads.shape
            self._most = min(max(_VALUES // loads.size, _FEWEST), _MOST) // 2 * 2
        if self._layers != list(lists) or self._shape != loads.shape:
            return "the load of experts has other layers or experts than before"
        self._last = np.concatenate([[line["step"]], loads.ravel()])
        self._add(self._last)
        return ""

    def _add(self, row: np.ndarray) -> None:
        if not self._counts or self._counts[-1] == self._each:
            if len(self._counts) == self._most:
                self._halve()
            self._sums.append(np.zeros_like(row))
            self._counts.append(0)
        self._sums[-1] += row
        self._counts[-1] += 1

    def _halve(self) -> None:
        """Merge pairs of columns; all columns are full, and their number is even."""
        pairs = zip(self._sums[::2], self._sums[1::2], strict=True)
        self._sums = [first + second for first, second in pairs]
        self._each *= 2
        self._counts = [self._each] * len(self._sums)

    def loads(self) -> Loads | None:
        """Return the accumulated loads; None if no line had any."""
        if not self._layers:
            return None
        columns = np.stack(self._sums) / np.array(self._counts)[:, None]
        return Loads(
            layers=self._layers,
            step=columns[:, 0],
            value=columns[:, 1:].reshape(len(columns), *self._shape),
            each=self._each,
            most=self._most,
            last_step=int(self._last[0]),
            last=self._last[1:].reshape(self._shape),
        )


def _is_load(values: Sequence[Any]) -> bool:
    """Return whether a list holds a number or null for each expert."""
    known = (value is None or isinstance(value, float) or is_number(value) for value in values)
    return 0 < len(values) <= _EXPERTS and all(known)


FILE_NAME = "metrics.jsonl"

BLOCK = 1 << 20  # bytes parsed at a time
_KINDS = {int, float, type(None), list}  # types of values
_METRICS_AT_MOST = 4000  # per run; a model of 500 layers has 2,500
_TAIL = 256  # bytes that identify the part of a file that was read


class Series(NamedTuple):
    """One metric over the run.

    Attributes:
        step: [n], increasing.
        time: [n], Unix seconds.
        value: [n]; NaN for values that are not finite.
    """

    step: np.ndarray
    time: np.ndarray
    value: np.ndarray

    @property
    def last(self) -> float:
        """Latest value."""
        return float(self.value[-1])

    @property
    def last_finite(self) -> float:
        """Latest finite value, or 0."""
        finite = self.value[np.isfinite(self.value)]
        return float(finite[-1]) if finite.size else 0.0

    @property
    def smoothed(self) -> float:
        """Mean of the finite values among the last 2 %, or NaN."""
        late = self.value[-max(1, len(self.value) // 50) :]
        finite = late[np.isfinite(late)]
        return float(finite.mean()) if finite.size else np.nan


class NotYetError(UserError):
    """Error for a run that does not exist or has logged nothing yet."""


class MetricsFile:
    """Incremental reader of `metrics.jsonl`: each call reads only the appended lines.

    Args:
        run: the run directory.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._begin()

    def _begin(self) -> None:
        self._end, self._tail = 0, b""
        self._parts: dict[str, list[Series]] = defaultdict(list)
        self._loads = LoadReader()
        self._lines = 0
        self._omissions = Omissions(self._run / FILE_NAME)

    @property
    def omissions(self) -> list[str]:
        """Messages about damaged lines, which are skipped."""
        return self._omissions.messages()

    def read(self) -> tuple[dict[str, Series], Loads | None]:
        """Return the metrics by name, and the load of experts.

        Raises:
            NotYetError: the file does not exist.
            UserError: the file cannot be read.
        """
        path = self._run / FILE_NAME
        if not path.is_file():
            raise NotYetError(_no_metrics(self._run))
        try:
            with path.open("rb") as file:
                # The tail differs if the run went back to a checkpoint and wrote other lines.
                if self._read_tail(file) != self._tail:
                    self._begin()
                file.seek(self._end)
                for block in blocks(file):
                    self._take(block)
                self._tail = self._read_tail(file)
                # A bucket's `stat` has no st_size, so the size is the end of the opened file.
                if file.seek(0, os.SEEK_END) - self._end >= LINE:
                    self._omissions.note(f"a line of more than {LINE:,} bytes and all after it")
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        series = {name: _joined(parts) for name, parts in self._parts.items()}
        self._parts = defaultdict(list, {name: [curve] for name, curve in series.items()})
        with_steps = {name: s._replace(step=s.step.astype(int)) for name, s in series.items()}
        return with_steps, self._loads.loads()

    def _take(self, block: bytes) -> None:
        try:
            columns, lists = _columns([orjson.loads(line) for line in block.split(b"\n")[:-1]])
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            columns, lists = _columns(self._sound_rows(block))
        self._end += len(block)
        self._lines += block.count(b"\n")
        for name, series in columns.items():
            if name in self._parts or len(self._parts) < _METRICS_AT_MOST:
                self._parts[name] += series
            else:
                self._omissions.note(f"more than {_METRICS_AT_MOST:,} metrics; the others")
        for line in lists:
            if problem := self._loads.take(line):
                self._omissions.note(f"step {line['step']:,}: {problem}; the loads")

    def _sound_rows(self, block: bytes) -> list[dict[str, Any]]:
        """Return the objects of the sound lines; note the damaged lines."""
        rows = []
        for number, line in enumerate(block.split(b"\n")[:-1], self._lines + 1):
            row, problem = parse_metrics(line)
            problem = problem or ("" if "time" in row else "no time")
            if problem:
                self._omissions.add(number, problem)
            else:
                rows.append(row)
        return rows

    def _read_tail(self, file: BinaryIO) -> bytes:
        file.seek(max(0, self._end - _TAIL))
        return file.read(min(_TAIL, self._end))


def blocks(file: BinaryIO) -> Iterator[bytes]:
    """Yield blocks of whole lines; the last line of an active run may be incomplete.

    A line of more than `LINE` bytes ends the reading, so that a damaged file costs little memory.
    """
    while block := file.read(BLOCK):
        if not block.endswith(b"\n"):
            block += file.readline(LINE)
        whole = block[: block.rfind(b"\n") + 1]
        if whole:
            yield whole
        if len(whole) < len(block):
            return


def _columns(
    rows: Sequence[dict[str, Any]],
) -> tuple[dict[str, list[Series]], list[dict[str, Any]]]:
    """Return rows as columns by name, and the lists of each row with its "step".

    Raises:
        Exception: of many types, if a value is invalid.
    """
    by_names = defaultdict(list)
    for row in rows:
        by_names[tuple(row)].append(row)
    columns, with_lists = defaultdict(list), False
    for names, group in by_names.items():
        columns_of_group = zip(*(row.values() for row in group), strict=True)
        cells_by_name = dict(zip(names, columns_of_group, strict=True))
        step, time = (_axis(cells_by_name.pop(name)) for name in ("step", "time"))
        if not ((step < STEPS) & (step == np.floor(step)) & (time < LATEST)).all():
            raise ValueError
        for name, cells in cells_by_name.items():
            kinds = set(map(type, cells))
            if not kinds <= _KINDS:
                raise TypeError(name)
            if list in kinds:
                with_lists = True
                scalars = [i for i, cell in enumerate(cells) if not isinstance(cell, list)]
                if scalars:
                    column = np.array([cells[i] for i in scalars], float)
                    columns[name].append(Series(step[scalars], time[scalars], column))
            else:
                columns[name].append(Series(step, time, np.array(cells, float)))  # None: NaN
    lists = [
        {name: x for name, x in row.items() if name == "step" or isinstance(x, list)}
        for row in (rows if with_lists else ())
    ]
    return columns, lists


def _axis(cells: Sequence[Any]) -> np.ndarray:
    """Return steps or times as an array; raise ValueError unless all are numbers from 0 on."""
    if not {int, float}.issuperset(map(type, cells)) or min(cells) < 0:
        raise ValueError
    return np.array(cells, float)


def _joined(parts: Sequence[Series]) -> Series:
    """Concatenate columns and sort them by step, stably."""
    step, time, value = (np.concatenate(column) for column in zip(*parts, strict=True))
    if (np.diff(step) < 0).any():
        order = np.argsort(step, kind="stable")
        step, time, value = step[order], time[order], value[order]
    return Series(step, time, value)


def read_metrics(run: Path) -> dict[str, Series]:
    """Return the metrics that a run has logged so far, by name.

    Lists are omitted. Damaged lines are skipped with a warning.

    Raises:
        UserError: the directory is not a run.
    """
    file = MetricsFile(run)
    series, _ = file.read()
    for message in file.omissions:
        warnings.warn(printable(message), stacklevel=2)
    return series


def _no_metrics(path: Path) -> str:
    if not path.is_dir():
        hint = path_hint(path) or "; name the checkpoint.dir of a run"
        return f"no run directory at {path}{hint}"
    if (path / "config.toml").exists():
        return f"{path} has no {FILE_NAME} yet; wait for the first step to be logged"
    below = sorted(str(path_.parent) for path_ in path.glob(f"*/{FILE_NAME}"))
    hint = f"; did you mean {' or '.join(below[:3])}?" if below else ""
    return f"{path} is not a run directory: it has no {FILE_NAME}{hint}"
