"""Contents of a run directory; the run may still be in progress."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxforge.config.job import JobConfig
from jaxforge.config.model import MODELS
from jaxforge.config.reading.load import load_config
from jaxforge.errors import UserError
from jaxforge.runs import attempts, starts
from jaxforge.runs.metrics_file import FILE_NAME, Loads, MetricsFile, NotYetError, Series
from jaxforge.storage import trust
from jaxforge.storage.untrusted_json import (
    Field,
    is_number,
    is_step,
    is_table,
    is_text,
    is_time,
    read_lines,
)
from jaxforge.telemetry.goodput import Attempt
from jaxforge.telemetry.sinks import SAMPLES

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

    def read(self) -> Run:
        """Return the present data of the run.

        Raises:
            NotYetError: no step has been logged.
            UserError: the directory is damaged.
        """
        series, loads = self._metrics.read()
        if missing := [name for name in _NEEDED if name not in series]:
            raise NotYetError(
                f"{self._path / FILE_NAME} has no {missing[0]}: no step is logged yet, or an older "
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


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read the logged data of runs.

    Args:
        paths: run directories.

    Raises:
        UserError: a directory is not a run, has no logged step, or its config is damaged.
    """
    return [reader.read() for reader in readers(paths)]


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
