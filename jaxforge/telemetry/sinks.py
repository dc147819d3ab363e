"""Sinks of metrics: each receives (step, {name: value}); only process 0 has sinks."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from jaxforge.config.eval import CORE_METRICS, STDERR_SUFFIX, TASKS_PREFIX
from jaxforge.errors import StorageError, UserError
from jaxforge.storage.line_file import LineFile
from jaxforge.telemetry.numbers import finite

Metrics = dict[str, Any]
"""Numbers by name; loads of experts are lists of numbers."""

_CLIPPED = 160  # characters of a sample on the console


class Sample(NamedTuple):
    """Text that the model generated.

    Attributes:
        prompt: the prompt.
        text: the continuation.
    """

    prompt: str
    text: str


class Sink:
    """Destination of metrics and samples; by default nothing but `write` has an effect."""

    def write(self, step: int, metrics: Metrics) -> None:
        """Write the metrics of a step or of an evaluation."""

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Write samples of the model after a step."""

    def rewind(self, step: int) -> None:
        """Continue from an earlier step: later entries are repeated."""

    def close(self, exit_code: int) -> None:
        """Flush and close; the process is about to end with this code."""


def finite_numbers(metrics: Metrics) -> dict[str, float]:
    """Return the finite numbers of metrics; elements of a list are named `<name>/<index>`."""
    numbers = {}
    for name, value in metrics.items():
        elements = (
            {f"{name}/{i}": x for i, x in enumerate(value)}
            if isinstance(value, list)
            else {name: value}
        )
        for key, x in elements.items():
            # Services refuse NaN and infinity, or replace them by text.
            if isinstance(x, Real) and math.isfinite(x):
                numbers[key] = float(x)
    return numbers


def has_evaluation(metrics: Mapping[str, Any]) -> bool:
    """Return whether a line of metrics holds results of an evaluation."""
    return any(name.startswith("eval/") for name in metrics)


class JsonlSink(Sink):
    """`metrics.jsonl` and `samples.jsonl`: one JSON object with `step` and `time` per line.

    Lines are only appended during a run. A resumed run first drops the lines after its checkpoint,
    since those steps run and are logged again. `line_file` handles damaged lines and full disks.

    Args:
        path: the file of metrics.
        resumed_step: the step from which the run continues; 0 for a new run.
        repeats_evaluation: whether the run repeats the evaluation of that step, because it was
            killed before the checkpoint recorded the end of the evaluation.
    """

    def __init__(self, path: Path, resumed_step: int, *, repeats_evaluation: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        samples_path = path.with_name(SAMPLES)
        # A link in a downloaded run could name any file of the user.
        for file in (path, samples_path):
            if file.is_symlink():
                raise UserError(
                    f"{file} is a symbolic link, through which a run does not write. Remove it"
                )
        self._metrics, self._samples = LineFile(path), LineFile(samples_path)
        # Readers find the file before the first step is logged.
        path.touch()
        self._metrics.rewind(
            resumed_step, has_evaluation if repeats_evaluation else lambda line: False
        )
        self._samples.rewind(resumed_step)

    def write(self, step: int, metrics: Metrics) -> None:
        """Append one line of metrics."""
        self._metrics.append(as_json(step, metrics), step=step)

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Append a line for each sample."""
        self._samples.append(*(sample_as_json(step, sample) for sample in samples), step=step)

    def rewind(self, step: int) -> None:
        """Drop the lines of later steps."""
        for lines in (self._metrics, self._samples):
            lines.rewind(step)

    def close(self, exit_code: int) -> None:
        """Make all lines durable.

        Raises:
            StorageError: lines are lost.
        """
        # Close both files before raising: the second may still be written.
        losses = []
        for lines in (self._metrics, self._samples):
            try:
                lines.close()
            except StorageError as error:
                losses.append(str(error))
        if losses:
            raise StorageError(". ".join(losses))


SAMPLES = "samples.jsonl"
"""File name of the samples of a run."""


def as_json(step: int, metrics: Metrics) -> str:
    """Return a JSON object of `step`, `time` (Unix seconds) and metrics; null if not finite."""
    return json.dumps({"step": step, "time": round(time.time(), 3), **finite(metrics)})


def sample_as_json(step: int, sample: Sample) -> str:
    """Return a JSON object of `step`, `prompt`, `text` and `time` (Unix seconds)."""
    values = {"step": step, **sample._asdict(), "time": round(time.time(), 3)}
    return json.dumps(values, ensure_ascii=False)


def is_step(metrics: Metrics) -> bool:
    """Return whether metrics belong to a training step, not to an evaluation."""
    return "train/loss" in metrics


_FORMATS = {
    "loss={:.4f}": ("train/loss",),
    "lr={:.2e}": ("train/lr",),
    "grad_norm={:.3f}": ("train/grad_norm",),
    "tok/s={:,.0f}": ("train/tokens_per_sec",),
    "mfu={:.1%}": ("train/mfu",),
    "mem={:.1f}/{:.0f}GB": ("gpu/peak_gb", "gpu/total_gb"),
}
"""Segment of a line -> metrics that it needs, in the order of KempnerForge; then the step time."""


def format_line(step: int, metrics: Metrics) -> str:
    """Return the line of a step or an evaluation; empty if it has nothing to show.

    The line is `[step 10] loss=5.0213 | lr=3.00e-04 | grad_norm=1.234 | tok/s=12,345 |
    step_time=0.42s`, with `mfu=41.3% | mem=61.2/80GB` before the time if peak and memory of the
    device are known.
    """
    described = " | ".join(_segments(metrics))
    return f"[step {step}] {described}" if described else ""


def format_sample(step: int, sample: Sample) -> str:
    """Return `[step 10] sample: "Once" ... " upon a time"`, cut to two lines of a terminal."""
    prompt, text = (json.dumps(part, ensure_ascii=False) for part in sample)
    line = f"[step {step}] sample: {f'{prompt} ... ' if sample.prompt else ''}{text}"
    return line if len(line) <= _CLIPPED else f"{line[: _CLIPPED - 3]}..."


def _segments(metrics: Metrics) -> list[str]:
    parts = [
        text.format(*(metrics[name] for name in names))
        for text, names in _FORMATS.items()
        if metrics.keys() >= set(names)
    ]
    # Small models take milliseconds, for which two digits would be 0.00.
    if (seconds := metrics.get("train/step_time_sec")) is not None:
        parts.append(f"step_time={seconds:.{2 if seconds >= 0.1 else 4}f}s")
    parts += [
        f"{name.replace('/', '_')}={value:.{4 if name.endswith('loss') else 2}f}"
        for name, value in metrics.items()
        if name.startswith("eval/") and not name.startswith(TASKS_PREFIX)
    ]
    parts += _task_segments(metrics)
    if metrics.get("train/skipped_steps"):
        parts.append(f"skipped={metrics['train/skipped_steps']:.0f}")
    return parts


def _task_segments(metrics: Metrics) -> list[str]:
    """Return `lambada_openai/acc=0.3512±0.0066` for each metric of a task.

    Of CORE only the aggregate is shown, if it is known.
    """
    names = [name for name in metrics if name.startswith(TASKS_PREFIX)]
    if any(name in metrics for name in CORE_METRICS):
        names = [name for name in names if not name.startswith(f"{TASKS_PREFIX}core/")]
    parts = []
    for name in names:
        if not name.endswith(STDERR_SUFFIX):
            error = metrics.get(name + STDERR_SUFFIX)
            suffix = "" if error is None else f"±{error:.4f}"
            parts.append(f"{name.removeprefix(TASKS_PREFIX)}={metrics[name]:.4f}{suffix}")
    return parts
