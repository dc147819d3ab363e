"""Contents of a run directory; the run may still be in progress."""

import dataclasses
import os
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import orjson
from numpy.typing import ArrayLike

from jaxforge.cli.suggestions import path_hint
from jaxforge.config.job import JobConfig
from jaxforge.config.model import MODELS
from jaxforge.config.reading.load import load_config
from jaxforge.errors import UserError, printable
from jaxforge.runs import attempts, starts
from jaxforge.storage import trust
from jaxforge.storage.untrusted_json import (
    LATEST,
    LINE,
    STEPS,
    Field,
    Omissions,
    is_number,
    is_step,
    is_table,
    is_text,
    is_time,
    parse_metrics,
    read_lines,
)
from jaxforge.telemetry.goodput import Attempt
from jaxforge.telemetry.sinks import SAMPLES

FILE_NAME = "metrics.jsonl"

BLOCK = 1 << 20  # bytes parsed at a time
_KINDS = {int, float, type(None), list}  # types of values
_METRICS_AT_MOST = 4000  # per run; a model of 500 layers has 2,500


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


def read_series(run: Path) -> tuple[dict[str, Series], list[str]]:
    """Return the metrics that a run has logged so far by name, and messages about skipped lines.

    Lists, such as loads of experts, are left out.

    Raises:
        UserError: the file does not exist, or cannot be read.
    """
    path = run / FILE_NAME
    if not path.is_file():
        raise UserError(_no_metrics(run))
    omissions, parts, n_lines, end = Omissions(path), defaultdict[str, list[Series]](list), 0, 0
    try:
        with path.open("rb") as file:
            for block in blocks(file):
                for name, series in _columns_of_block(block, n_lines, omissions).items():
                    if name in parts or len(parts) < _METRICS_AT_MOST:
                        parts[name] += series
                    else:
                        omissions.note(f"more than {_METRICS_AT_MOST:,} metrics; the others")
                n_lines, end = n_lines + block.count(b"\n"), end + len(block)
            # A bucket's `stat` has no st_size, so the size is the end of the opened file.
            if file.seek(0, os.SEEK_END) - end >= LINE:
                omissions.note(f"a line of more than {LINE:,} bytes and all after it")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    joined = {name: _joined(columns) for name, columns in parts.items()}
    return joined, omissions.messages()


def _columns_of_block(block: bytes, before: int, omissions: Omissions) -> dict[str, list[Series]]:
    """Return a block of lines as columns, without damaged lines, which are noted.

    Args:
        block: whole lines.
        before: number of lines before the block.
        omissions: notes of damaged lines.
    """
    lines = block.split(b"\n")[:-1]
    # Almost all blocks are sound: only the others are checked line by line.
    try:
        return _columns([orjson.loads(line) for line in lines])
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        rows = []
    for number, line in enumerate(lines, before + 1):
        row, problem = parse_metrics(line)
        if problem := problem or ("" if "time" in row else "no time"):
            omissions.add(number, problem)
        else:
            rows.append(row)
    return _columns(rows)


def blocks(file: BinaryIO) -> Iterator[bytes]:
    """Yield blocks of whole lines; the last line of an active run may be incomplete.

    A line of more than `LINE` bytes ends the reading, so that a damaged file costs little memory.
    """
    while block := file.read(BLOCK):
        if not block.endswith(b"\n"):
            block += file.readline(LINE)
        # A line without an end is being written, or is longer than `LINE`.
        whole = block[: block.rfind(b"\n") + 1]
        if whole:
            yield whole
        if len(whole) < len(block):
            return


def _columns(rows: Sequence[dict[str, Any]]) -> dict[str, list[Series]]:
    """Return the numbers of rows as columns by name; lists are left out.

    Raises:
        Exception: of many types, if a value is invalid.
    """
    by_names = defaultdict(list)
    for row in rows:
        # Lines have few different sets of keys: one conversion per set instead of one per line.
        by_names[tuple(row)].append(row)
    columns = defaultdict(list)
    for names, group in by_names.items():
        columns_of_group = zip(*(row.values() for row in group), strict=True)
        cells_by_name = dict(zip(names, columns_of_group, strict=True))
        step, time = (_axis(cells_by_name.pop(name)) for name in ("step", "time"))
        if not ((step < STEPS) & (step == np.floor(step)) & (time < LATEST)).all():
            raise ValueError
        for name, cells in cells_by_name.items():
            if not set(map(type, cells)) <= _KINDS:
                raise TypeError(name)
            if scalars := [i for i, cell in enumerate(cells) if not isinstance(cell, list)]:
                column = np.array([cells[i] for i in scalars], float)  # None becomes NaN
                columns[name].append(Series(step[scalars], time[scalars], column))
    return columns


def _axis(cells: Sequence[Any]) -> np.ndarray:
    """Return steps or times as an array; raise ValueError unless all are numbers from 0 on."""
    # By exact type: `true` is not a number.
    if not {int, float}.issuperset(map(type, cells)) or min(cells) < 0:
        raise ValueError
    return np.array(cells, float)


def _joined(parts: Sequence[Series]) -> Series:
    """Concatenate columns and sort them by step, stably."""
    step, time, value = (np.concatenate(column) for column in zip(*parts, strict=True))
    # `_columns` groups lines by their keys, which can break the order of steps.
    if (np.diff(step) < 0).any():
        order = np.argsort(step, kind="stable")
        step, time, value = step[order], time[order], value[order]
    return Series(step.astype(int), time, value)


def read_metrics(run: Path) -> dict[str, Series]:
    """Return the metrics that a run has logged so far, by name.

    Lists are omitted. Damaged lines are skipped with a warning.

    Raises:
        UserError: the directory is not a run.
    """
    series, omissions = read_series(run)
    for message in omissions:
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


_NEEDED = ("train/loss", "train/tokens", "train/step_time_sec", "train/skipped_steps")


@dataclasses.dataclass(frozen=True)
class Run:
    """Logged data of one run.

    Attributes:
        name: display name.
        config: resolved config.
        toml: text of the config file.
        parameters: number of parameters of the model; None if only a plugin knows it.
        series: series by name of the metric; "train/loss" always exists.
        starts: results of `starts.read`, the latest last.
        samples: lines of samples.jsonl with generated texts, the latest last.
        attempts: attempts of each process (`attempts.read`); empty for a run of an older version.
        omissions: messages about damaged parts of files, which are skipped.
    """

    name: str
    config: JobConfig
    toml: str
    parameters: int | None
    series: dict[str, Series]
    starts: Sequence[Mapping[str, Any]]
    samples: Sequence[Mapping[str, Any]]
    attempts: Mapping[int, Sequence[Attempt]] = dataclasses.field(default_factory=dict)
    omissions: Sequence[str] = ()

    @property
    def resumes(self) -> list[int]:
        """Steps after which the run was resumed, on the present curve.

        A start from an earlier step undoes the later starts.
        """
        steps: list[int] = []
        for step in (start["step"] for start in self.starts):
            # Going back to a step removes the later part of the curve, with its resumes.
            while steps and steps[-1] > step:
                steps.pop()
            steps.append(step)
        # A resume at the last logged step has no curve after it yet.
        logged = self.series["train/loss"].step
        return [step for step in steps if logged[0] <= step < logged[-1]]

    @property
    def steps(self) -> int:
        """Last logged step."""
        return int(self.series["train/loss"].step[-1])

    @property
    def tokens(self) -> int:
        """Tokens of applied updates, including padding and masked tokens."""
        return int(self.series["train/tokens"].last_finite)

    @property
    def skipped(self) -> int:
        """Number of steps whose update was not applied."""
        return int(self.series["train/skipped_steps"].last_finite)

    @property
    def seconds(self) -> float:
        """Wall time from the first step to the last, including pauses between restarts."""
        time = self.series["train/loss"].time
        # The first time is that of the end of a step, so that its duration is added.
        return float(time[-1] - time[0] + self.series["train/step_time_sec"].value[0])

    @property
    def seconds_in_steps(self) -> float:
        """Time spent in training steps: without evaluation, checkpoints and restarts."""
        step, _, seconds = self.series["train/step_time_sec"]
        before = max(
            0, int(step[0]) - self.config.metrics.log_interval
        )  # steps of another run, if any
        return float(np.sum(seconds * np.diff(step, prepend=before)))

    def position(self, steps: ArrayLike, axis: str) -> np.ndarray:
        """Return the positions of steps on a horizontal axis: "steps", "tokens" or "hours"."""
        if axis == "steps":
            return np.asarray(steps, float)
        step, time, tokens = self.series["train/tokens"]
        along = tokens if axis == "tokens" else (time - time[0]) / 3600
        finite = np.isfinite(along)
        if not finite.any():
            return np.zeros(np.shape(steps))
        return np.interp(np.asarray(steps), step[finite], along[finite])


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read the logged data of runs; those with the same directory name are named by their paths.

    Args:
        paths: run directories.

    Raises:
        UserError: a directory is not a run, has no logged step, or its config is damaged.
    """
    # Real paths: "." and links do not name the run.
    names = [Path(os.path.realpath(path)).name for path in paths]
    return [
        _read(path, name if names.count(name) == 1 else str(path))
        for path, name in zip(paths, names, strict=True)
    ]


def _read(path: Path, name: str) -> Run:
    series, omissions = read_series(path)
    if missing := [metric for metric in _NEEDED if metric not in series]:
        raise UserError(
            f"{path / FILE_NAME} has no {missing[0]}: no step is logged yet, or an older version "
            "logged them; wait for the first step, or train on with this version"
        )
    config_file = path / "config.toml"
    if config_file.exists() and not config_file.is_file():
        raise UserError(f"{config_file} is not a file")
    # A report imports no plugins, which are code of whoever made the run.
    config = load_config(config_file, trusts=trust.never)
    begun, strange = read_lines(path / starts.FILE_NAME, _START)
    samples, unreadable = read_lines(path / SAMPLES, _SAMPLE)
    accounts, unusable = attempts.read(path)
    # The last start counted them. Building the model needs seconds of imports.
    noted = begun[-1].get("parameters") if begun else None
    return Run(
        name=name,
        config=config,
        toml=config_file.read_text(encoding="utf-8"),
        parameters=int(noted) if noted else _parameters(config),
        series=series,
        starts=begun,
        samples=samples,
        attempts=accounts,
        omissions=[*omissions, *strange, *unreadable, *unusable],
    )


def _parameters(config: JobConfig) -> int | None:
    """Return the number of parameters of a model; None for a plugin's model."""
    # `report` imports no plugins: they may be of a stranger's run.
    if config.model.model_type not in MODELS.names():
        return None
    from jaxforge.model.transformer import build_model, parameter_count  # imports JAX: two seconds

    return parameter_count(build_model(config).abstract)


_SAMPLE = {
    "step": Field(is_step, "the number of a step"),
    "prompt": Field(is_text, "text"),
    "text": Field(is_text, "text"),
}
_START = {
    "step": Field(is_step, "the number of a step"),
    "time": Field(is_time, "a time in seconds since 1970"),
    "command": Field(is_text, "text"),
    "versions": Field(lambda value: is_table(value, str), "a table of texts"),
    "git": Field(
        lambda git: is_table(git, str | bool) and is_text(git.get("commit", "")), "a table of texts"
    ),
    "parameters": Field(is_number, "a number", required=False),
    "devices": Field(is_text, "text", required=False),
}
