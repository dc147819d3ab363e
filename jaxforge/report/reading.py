"""What a run directory tells about its run; the run may still be going on."""

import dataclasses
import io
import json
import math
import re
from array import array
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from jaxforge import run_directory
from jaxforge.config.job import JobConfig
from jaxforge.errors import UserError
from jaxforge.model.transformer import build_model, parameter_count
from jaxforge.near import path_hint
from jaxforge.report.loads import LoadReader, Loads
from jaxforge.telemetry.sinks import SAMPLES

_METRICS = "metrics.jsonl"
_SAMPLES_SHOWN = 20
_NEEDED = ("train/loss", "train/tokens", "train/step_time_sec", "train/skipped_steps")
_STARTED, _RESUMED = "train step compiled", re.compile(r"resuming from step (\d+) of")


class Series(NamedTuple):
    """One metric over the run.

    Attributes:
        step: [n], increasing.
        time: [n], Unix seconds.
        value: [n]; NaN where what was logged is not finite.
    """

    step: np.ndarray
    time: np.ndarray
    value: np.ndarray

    @property
    def last(self) -> float:
        """The latest value."""
        return float(self.value[-1])


@dataclasses.dataclass(frozen=True)
class Run:
    """One run as far as it is logged.

    Attributes:
        name: what the page calls it.
        config: its resolved config.
        toml: the same, as its file has it.
        parameters: number of parameters of the model.
        series: by name of the metric; "train/loss" is always there.
        loads: of experts; None of a run without any.
        resumes: steps after which it was started again; None where the log is missing.
        samples: what the model wrote, the last of it: step, prompt, text.
    """

    name: str
    config: JobConfig
    toml: str
    parameters: int
    series: dict[str, Series]
    loads: Loads | None
    resumes: list[int] | None
    samples: Sequence[tuple[int, str, str]] = ()

    @property
    def steps(self) -> int:
        """The last step that is logged."""
        return int(self.series["train/loss"].step[-1])

    @property
    def tokens(self) -> int:
        """Tokens of applied updates, padding and masked ones included."""
        return int(self.series["train/tokens"].last)

    @property
    def skipped(self) -> int:
        """Steps whose update was not applied."""
        return int(self.series["train/skipped_steps"].last)

    @property
    def seconds(self) -> float:
        """Wall time from the first step to the last, pauses between restarts included."""
        time = self.series["train/loss"].time
        return float(time[-1] - time[0] + self.series["train/step_time_sec"].value[0])

    @property
    def seconds_in_steps(self) -> float:
        """Time spent in training steps: without evaluation, checkpoints and restarts."""
        step, _, seconds = self.series["train/step_time_sec"]
        before = max(0, int(step[0]) - self.config.metrics.log_interval)  # another run's, if any
        return float(np.sum(seconds * np.diff(step, prepend=before)))

    def position(self, steps: ArrayLike, axis: str) -> np.ndarray:
        """Where steps lie on a horizontal axis: "steps", "tokens" or "hours"."""
        if axis == "steps":
            return np.asarray(steps, float)
        step, time, tokens = self.series["train/tokens"]
        along = tokens if axis == "tokens" else (time - time[0]) / 3600
        return np.interp(np.asarray(steps), step, along)


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Reads runs; those of the same name are told apart by their paths.

    Raises:
        UserError: a directory is no run, has logged no step yet, or is damaged.
    """
    names = [path.resolve().name for path in paths]
    return [
        _read(path, name if names.count(name) == 1 else str(path))
        for path, name in zip(paths, names, strict=True)
    ]


def _read(path: Path, name: str) -> Run:
    series, loads = _read_metrics(path)
    if missing := [name for name in _NEEDED if name not in series]:
        raise UserError(
            f"{path / _METRICS} has no {missing[0]}: no step is logged yet, or an older version "
            "logged them; wait for the first step, or train on with this version"
        )
    config = run_directory.read_config(path)
    return Run(
        name=name,
        config=config,
        toml=(path / "config.toml").read_text(encoding="utf-8"),
        parameters=parameter_count(build_model(config).abstract),
        series=series,
        loads=loads,
        resumes=_read_resumes(path / "logs" / "process_0.log", series["train/loss"].step[-1]),
        samples=_read_samples(path / SAMPLES),
    )


def _read_samples(path: Path) -> list[tuple[int, str, str]]:
    """The last of them; none where the run wrote none."""
    if not path.is_file():
        return []
    last = deque(_whole_lines(path), maxlen=_SAMPLES_SHOWN)
    return [(line["step"], line["prompt"], line["text"]) for line in last]


def read_metrics(path: Path) -> dict[str, Series]:
    """What a run has logged so far, by name; lists are left out.

    Raises:
        UserError: the directory is no run, or its file is damaged.
    """
    return _read_metrics(path)[0]


def _no_metrics(path: Path) -> str:
    if not path.is_dir():
        hint = path_hint(path) or "; name the checkpoint.dir of a run"
        return f"no run directory at {path}{hint}"
    if (path / "config.toml").exists():
        return f"{path} has no {_METRICS} yet; wait for the first step to be logged"
    below = sorted(str(found.parent) for found in path.glob(f"*/{_METRICS}"))
    hint = f"; did you mean {' or '.join(below[:3])}?" if below else ""
    return f"{path} is no run directory: it has no {_METRICS}{hint}"


def _read_metrics(path: Path) -> tuple[dict[str, Series], Loads | None]:
    """The metrics by name; in columns, as a line of a long run's million costs a kilobyte."""
    if not (path / _METRICS).is_file():
        raise UserError(_no_metrics(path))
    loads = LoadReader()
    columns: dict[str, tuple[array, array, array]] = defaultdict(
        lambda: (array("q"), array("d"), array("d"))
    )
    for line in _whole_lines(path / _METRICS):
        loads.take(line)
        step, time = line.pop("step"), line.pop("time")
        for name, value in line.items():
            if isinstance(value, list):
                continue
            steps, times, values = columns[name]
            steps.append(step)
            times.append(time)
            values.append(math.nan if value is None else value)
    series = {name: Series(*map(np.array, column)) for name, column in columns.items()}
    return series, loads.loads()


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file to which a run may be writing: its last line may be torn."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield json.loads(line)
            except ValueError:
                raise UserError(
                    f"{path}:{number}: not a JSON object; remove this line, and what comes after it"
                ) from None


def _read_resumes(path: Path, last_step: int) -> list[int] | None:
    """Steps of the restarts that belong to the present curve.

    A restart from an earlier step than another one's undoes that one; a start that resumes from
    nothing undoes them all, as the metrics begin anew.
    """
    if not path.exists():
        return None
    resumes: list[int] = []
    from_checkpoint = False
    with io.TextIOWrapper(path.open("rb"), encoding="utf-8", errors="replace") as file:
        for line in file:
            if found := _RESUMED.search(line):
                step, from_checkpoint = int(found[1]), True
                resumes = [earlier for earlier in resumes if earlier <= step] + [step]
            elif _STARTED in line:
                resumes, from_checkpoint = resumes if from_checkpoint else [], False
    return [step for step in resumes if step < last_step]
