"""Where metrics go. Each sink takes (step, {name: value}); only process 0 has any."""

import collections
import contextlib
import errno
import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rich.console import Console

from jaxforge import safe_files
from jaxforge.errors import UserError

Metrics = dict[str, Any]
"""Numbers by name; of experts, lists of numbers."""

_MAX_WAITING = 100_000  # lines, of some 600 bytes
_CLIPPED = 160  # characters of a sample on the console


class Sample(NamedTuple):
    """What the model wrote.

    Attributes:
        prompt: a text.
        text: what it was continued with.
    """

    prompt: str
    text: str


class Sink(Protocol):
    """Receives what is logged."""

    def write(self, step: int, metrics: Metrics) -> None:
        """Takes the metrics of one logged step, or of one evaluation."""

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Takes what the model wrote after a step."""

    def rewind(self, step: int) -> None:
        """The run goes on from an earlier step, and what follows is of the steps after it."""

    def close(self, exit_code: int) -> None:
        """Flushes; the process is about to end with this code."""


class JsonlSink:
    """`metrics.jsonl`, and `samples.jsonl` beside it: objects with `step` and `time`, a line each.

    Append-only while a run lasts. A resumed run first drops the lines that came after its
    checkpoint, and a line torn by a kill: those steps are run, and logged, again. Lines that a full
    disk does not take wait in memory, and are written with the first one that it takes again.

    Args:
        path: the file of metrics.
        resumed_step: the step that the run goes on from; 0 for a new run.
    """

    def __init__(self, path: Path, resumed_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._metrics = _Lines(path, resumed_step)
        self._samples_path, self._samples = path.with_name(SAMPLES), None
        if self._samples_path.exists():
            self._samples = _Lines(self._samples_path, resumed_step)

    def write(self, step: int, metrics: Metrics) -> None:
        """Appends one line, and those that wait, and hands them to the operating system."""
        self._metrics.append(step, as_json(step, metrics))

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Appends a line for each."""
        self._samples = self._samples or _Lines(self._samples_path, step)
        for sample in samples:
            self._samples.append(step, sample_as_json(step, sample))

    def rewind(self, step: int) -> None:
        """Drops the lines of later steps."""
        for lines in self._files():
            lines.rewind(step)

    def close(self, exit_code: int) -> None:
        """Makes them durable."""
        with contextlib.ExitStack() as each:
            for lines in self._files():
                each.callback(lines.close)

    def _files(self) -> list["_Lines"]:
        return [lines for lines in (self._metrics, self._samples) if lines]


SAMPLES = "samples.jsonl"
"""The file of a run with what the model wrote."""


class _Lines:
    """A file of lines, each of a step."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        if path.is_symlink():
            raise UserError(f"{path} is a link, and a run writes through none: remove it")
        self._path, self._file = path, safe_files.open_to_append(path)
        self._waiting: collections.deque[tuple[int, bytes]] = collections.deque(maxlen=_MAX_WAITING)
        self.rewind(resumed_step)

    def append(self, step: int, line: str) -> None:
        self._waiting.append((step, line.encode() + b"\n"))
        self._catch_up()

    def rewind(self, step: int) -> None:
        kept = [one for one in self._waiting if one[0] <= step]
        self._waiting = collections.deque(kept, maxlen=_MAX_WAITING)
        self._file.truncate(_end_of_step(self._path, step))
        self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        with self._file:
            self._catch_up()
            os.fsync(self._file.fileno())

    def _catch_up(self) -> None:
        while self._waiting:
            line, end = self._waiting[0][1], self._file.tell()
            if self._file.write(line) < len(line):
                self._file.truncate(end)  # nothing half written: what follows would go unread
                self._file.seek(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._waiting.popleft()


def as_json(step: int, metrics: Metrics) -> str:
    """One object: `step`, `time` (Unix seconds) and the metrics, null where not finite."""
    shown = {name: _finite(value) for name, value in metrics.items()}
    return json.dumps({"step": step, "time": round(time.time(), 3), **shown})


def sample_as_json(step: int, sample: Sample) -> str:
    """One object: `step`, `prompt`, `text`, `time` (Unix seconds)."""
    values = {"step": step, **sample._asdict(), "time": round(time.time(), 3)}
    return json.dumps(values, ensure_ascii=False)


def _finite(value: Any) -> Any:  # noqa: ANN401 (a number, or a list of them)
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return value if math.isfinite(value) else None


def _end_of_step(path: Path, step: int) -> int:
    """Length of the leading part of the file whose lines are whole and not after `step`."""
    end = 0
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                break
        except (json.JSONDecodeError, KeyError, TypeError):
            break
        end += len(line)
    return end


class LineFormat(Protocol):
    """How plain lines look; `telemetry.line_formats` has them all."""

    def banner(self) -> str:
        """What comes before the first step; may be empty."""

    def train(self, step: int, metrics: Metrics) -> str:
        """What is said of a logged step."""

    def evaluation(self, step: int, metrics: Metrics) -> str:
        """What is said of an evaluation, if anything."""

    def sample(self, step: int, sample: Sample) -> str:
        """What is said of a sample."""


class LineSink:
    """Plain lines for each logged step: where nobody watches a terminal, or parsers read along.

    Args:
        console: where they go, as they are: nothing is wrapped, coloured or replaced.
        lines: what they look like.
    """

    def __init__(self, console: Console, lines: LineFormat) -> None:
        self._console, self._lines = console, lines
        self._print(lines.banner())

    def write(self, step: int, metrics: Metrics) -> None:
        """Prints a step or an evaluation."""
        of = self._lines.train if is_step(metrics) else self._lines.evaluation
        self._print(of(step, metrics))

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Prints each."""
        for sample in samples:
            self._print(self._lines.sample(step, sample))

    def rewind(self, step: int) -> None:
        """Nothing to do."""

    def close(self, exit_code: int) -> None:
        """Nothing to do."""

    def _print(self, text: str) -> None:
        if text:
            self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)


def is_step(metrics: Metrics) -> bool:
    """Whether these are of a training step, not of an evaluation."""
    return "train/loss" in metrics


_FORMATS = {
    "loss={:.4f}": ("train/loss",),
    "lr={:.2e}": ("train/lr",),
    "grad_norm={:.3f}": ("train/grad_norm",),
    "tok/s={:,.0f}": ("train/tokens_per_sec",),
    "mfu={:.1%}": ("train/mfu",),
    "mem={:.1f}/{:.0f}GB": ("gpu/peak_gb", "gpu/total_gb"),
    "step_time={:.2f}s": ("train/step_time_sec",),
}
"""Part of a line -> the metrics that it needs, in KempnerForge's order."""


def format_line(step: int, metrics: Metrics) -> str:
    """`[step 10] loss=5.0213 | lr=3.00e-04 | grad_norm=1.234 | tok/s=12,345 | step_time=0.42s`.

    With `mfu=41.3% | mem=61.2/80GB` before the time where the device's peak and memory are known.
    Empty where nothing of a step or an evaluation is there.
    """
    described = _describe(metrics, " | ")
    return f"[step {step}] {described}" if described else ""


def format_sample(step: int, sample: Sample) -> str:
    """`[step 10] sample: "Once" ... " upon a time"`, cut to two lines of a terminal."""
    prompt, text = (json.dumps(part, ensure_ascii=False) for part in sample)
    line = f"[step {step}] sample: {f'{prompt} ... ' if sample.prompt else ''}{text}"
    return line if len(line) <= _CLIPPED else f"{line[: _CLIPPED - 3]}..."


def _describe(metrics: Metrics, separator: str) -> str:
    parts = [
        text.format(*(metrics[name] for name in names))
        for text, names in _FORMATS.items()
        if metrics.keys() >= set(names)
    ]
    parts += [
        f"{name.replace('/', '_')}={value:.{4 if name.endswith('loss') else 2}f}"
        for name, value in metrics.items()
        if name.startswith("eval/")
    ]
    if metrics.get("train/skipped_steps"):
        parts.append(f"skipped={metrics['train/skipped_steps']:.0f}")
    return separator.join(parts)
