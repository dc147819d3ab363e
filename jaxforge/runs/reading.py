"""Contents of a run directory; the run may still be in progress."""

import dataclasses
import os
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from jaxforge.cli.suggestions import path_hint
from jaxforge.config.job import JobConfig
from jaxforge.config.model import MODELS
from jaxforge.config.reading.load import load_config
from jaxforge.errors import UserError, printable
from jaxforge.runs import attempts, lines, starts
from jaxforge.runs.loads import LoadReader, Loads
from jaxforge.storage import trust
from jaxforge.storage.untrusted_json import (
    LINE,
    Field,
    Omissions,
    is_number,
    is_step,
    is_table,
    is_text,
    is_time,
    read_lines,
)
from jaxforge.telemetry.goodput import Attempt
from jaxforge.telemetry.sinks import SAMPLES

_METRICS = "metrics.jsonl"
_NEEDED = ("train/loss", "train/tokens", "train/step_time_sec", "train/skipped_steps")
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


@dataclasses.dataclass(frozen=True)
class Run:
    """Logged data of one run.

    Attributes:
        name: display name.
        config: resolved config.
        toml: text of the config file.
        parameters: number of parameters of the model; None if only a plugin knows it.
        series: series by name of the metric; "train/loss" always exists.
        loads: load of experts; None without experts.
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
    loads: Loads | None
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
            while steps and steps[-1] > step:
                steps.pop()
            steps.append(step)
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


class NotYetError(UserError):
    """Error for a run that does not exist or has logged nothing yet."""


class MetricsFile:
    """Incremental reader of `metrics.jsonl`: each call reads only the appended lines.

    Args:
        path: the run directory.
        exact: see `lines.read`.
    """

    def __init__(self, path: Path, *, exact: bool = False) -> None:
        self._path, self._exact = path, exact
        self._begin()

    def _begin(self) -> None:
        self._end, self._tail = 0, b""
        self._parts: dict[str, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = defaultdict(list)
        self._loads = LoadReader()
        self._lines = 0
        self._omissions = Omissions(self._path / _METRICS)

    @property
    def omissions(self) -> list[str]:
        """Messages about damaged lines, which are skipped."""
        return self._omissions.messages()

    def read(self, *, processes: bool = False) -> tuple[dict[str, Series], Loads | None]:
        """Return the metrics by name, and the load of experts.

        Args:
            processes: see `lines.read`.

        Raises:
            NotYetError: the file does not exist.
            UserError: the file cannot be read.
        """
        file = self._path / _METRICS
        if not file.is_file():
            raise NotYetError(_no_metrics(self._path))
        try:
            if self._read_tail(file) != self._tail:  # truncated: the run went back to a checkpoint
                self._begin()
            for part in lines.read(file, self._end, exact=self._exact, processes=processes):
                self._take(part)
            if self._remember(file) >= LINE:
                self._omissions.note(f"a line of more than {LINE:,} bytes and all after it")
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror}") from error
        series = {name: lines.joined(parts) for name, parts in self._parts.items()}
        self._parts = defaultdict(list, {name: [curve] for name, curve in series.items()})
        return (
            {name: Series(step.astype(int), *columns) for name, (step, *columns) in series.items()},
            self._loads.loads(),
        )

    def _take(self, part: lines.Columns) -> None:
        self._end = part.end
        for number, problem in part.damaged:
            self._omissions.add(self._lines + number, problem)
        self._lines += part.lines
        for name, columns in part.values.items():
            if name in self._parts or len(self._parts) < _METRICS_AT_MOST:
                self._parts[name].append(columns)
            else:
                self._omissions.note(f"more than {_METRICS_AT_MOST:,} metrics; the others")
        for line in part.lists:
            if problem := self._loads.take(line):
                self._omissions.note(f"step {line['step']:,}: {problem}; the loads")

    def _remember(self, file: Path) -> int:
        """Record the end of the lines that were read; return the number of bytes after them."""
        self._tail = self._read_tail(file)
        with file.open("rb") as opened:
            return opened.seek(0, os.SEEK_END) - self._end  # a bucket's `stat` has no st_size

    def _read_tail(self, file: Path) -> bytes:
        with file.open("rb") as opened:
            opened.seek(max(0, self._end - _TAIL))
            return opened.read(min(_TAIL, self._end))


class RunReader:
    """Reader of a run directory that may be read repeatedly.

    Args:
        path: the directory.
        name: see `Run`.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.name = name
        self._path, self._metrics = path, MetricsFile(path)
        self._parameters: dict[str, int | None] = {}

    def read(self, *, processes: bool = False) -> Run:
        """Return the present data of the run.

        Args:
            processes: see `lines.read`.

        Raises:
            NotYetError: no step has been logged.
            UserError: the directory is damaged.
        """
        series, loads = self._metrics.read(processes=processes)
        if missing := [name for name in _NEEDED if name not in series]:
            raise NotYetError(
                f"{self._path / _METRICS} has no {missing[0]}: no step is logged yet, or an older "
                "version logged them; wait for the first step, or train on with this version"
            )
        config_file, omissions = self._path / "config.toml", self._metrics.omissions
        if config_file.exists() and not config_file.is_file():
            raise UserError(f"{config_file} is not a file")
        config = load_config(config_file, trusts=trust.never)
        begun, strange = read_lines(self._path / starts.FILE_NAME, _START)
        samples, unreadable = read_lines(self._path / SAMPLES, _SAMPLE)
        accounts, unusable = attempts.read(self._path)
        toml = config_file.read_text(encoding="utf-8")
        if toml not in self._parameters:
            noted = begun[-1].get("parameters") if begun else None
            self._parameters = {toml: int(noted) if noted else _parameters(config)}
        return Run(
            name=self.name,
            config=config,
            toml=toml,
            parameters=self._parameters[toml],
            series=series,
            loads=loads,
            starts=begun,
            samples=samples,
            attempts=accounts,
            omissions=[*omissions, *strange, *unreadable, *unusable],
        )


def readers(paths: Sequence[Path]) -> list[RunReader]:
    """Return a reader for each run; runs with the same directory name are named by their paths."""
    names = [Path(os.path.realpath(path)).name for path in paths]
    return [
        RunReader(path, name if names.count(name) == 1 else str(path))
        for path, name in zip(paths, names, strict=True)
    ]


def read_runs(paths: Sequence[Path], *, processes: bool = False) -> list[Run]:
    """Read the logged data of runs.

    Args:
        paths: run directories.
        processes: see `lines.read`.

    Raises:
        UserError: a directory is not a run, has no logged step, or its config is damaged.
    """
    return [reader.read(processes=processes) for reader in readers(paths)]


def read_metrics(path: Path) -> dict[str, Series]:
    """Return the metrics that a run has logged so far, by name.

    Lists are omitted. Damaged lines are skipped with a warning.

    Raises:
        UserError: the directory is not a run.
    """
    file = MetricsFile(path, exact=True)
    series, _ = file.read()
    for message in file.omissions:
        warnings.warn(printable(message), stacklevel=2)
    return series


def _parameters(config: JobConfig) -> int | None:
    """Return the number of parameters of a model; None for a plugin's model."""
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


def _no_metrics(path: Path) -> str:
    if not path.is_dir():
        hint = path_hint(path) or "; name the checkpoint.dir of a run"
        return f"no run directory at {path}{hint}"
    if (path / "config.toml").exists():
        return f"{path} has no {_METRICS} yet; wait for the first step to be logged"
    below = sorted(str(path_.parent) for path_ in path.glob(f"*/{_METRICS}"))
    hint = f"; did you mean {' or '.join(below[:3])}?" if below else ""
    return f"{path} is no run directory: it has no {_METRICS}{hint}"
