"""Logging to the terminal and to `<run>/logs/process_<i>.log`, and the banner."""

import logging
import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.logging import RichHandler
from rich.table import Table
from rich.text import Text

from jaxforge.cli import streams
from jaxforge.cli.redaction import redacted_message
from jaxforge.cli.running import wide_console
from jaxforge.errors import UserError
from jaxforge.parallel import host_memory, multihost
from jaxforge.storage import safe_files
from jaxforge.telemetry.numbers import human
from jaxforge.telemetry.sinks import Metrics, Sample, Sink, format_line, format_sample, is_step

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_SHORT_FORMAT = "%(levelname)s %(message)s"
_LIBRARIES = ("absl", "asyncio")


def setup_logging(console: Console) -> None:
    """Send log messages to the terminal or stderr until there is a run directory."""
    handler: logging.Handler
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=False, show_time=False)
    else:
        handler = logging.StreamHandler(streams.tolerant(sys.stderr, "standard error"))
    handler.setFormatter(redacting("%(message)s" if console.is_terminal else _SHORT_FORMAT))
    logger = logging.getLogger("jaxforge")
    logger.handlers[:] = [handler]
    # Libraries may configure the root logger, which would print each message twice.
    logger.propagate = False
    logger.setLevel(logging.INFO)
    # Orbax and Grain log through absl, and asyncio complains about tasks that Orbax abandons when
    # it fails. We report what matters; the messages themselves only go to the log file.
    for name in _LIBRARIES:
        libraries = logging.getLogger(name)
        libraries.handlers[:], libraries.propagate = [logging.NullHandler()], False
    for hook in ("excepthook", "unraisablehook"):
        report = getattr(sys, hook)
        if not isinstance(report, _WithoutClosedLoops):
            setattr(sys, hook, _WithoutClosedLoops(report))


def begin_run() -> Console:
    """Prepare a process that trains: logging and memory allocator. Return its console."""
    console = wide_console(streams.tolerant(sys.stdout))
    setup_logging(console)
    host_memory.keep_freed_memory()
    return console


def begin_command() -> None:
    """Prepare a process that uses a run: logging, memory allocator and the processes of the job."""
    setup_logging(Console(stderr=True))
    host_memory.keep_freed_memory()
    multihost.initialize()


def redacting(layout: str) -> logging.Formatter:
    """Return a formatter that removes secrets from messages and tracebacks."""
    return _Redacting(layout)


class _Redacting(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redacted_message(super().format(record))


class _WithoutClosedLoops:
    """Exception hook that ignores threads whose event loop is closed.

    When a save fails, Orbax closes its event loop while TensorStore still writes other arrays. Each
    of its threads then fails to report and prints a traceback. The failure of the save is raised.
    """

    def __init__(self, report: Callable[..., object]) -> None:
        self._report = report

    def __call__(self, *failure: Any) -> None:  # noqa: ANN401 (of either hook of `sys`)
        is_raised = len(failure) > 1
        error = failure[1] if is_raised else failure[0].exc_value
        is_on_main_thread = is_raised and threading.current_thread() is threading.main_thread()
        if is_on_main_thread or str(error) != "Event loop is closed":
            self._report(*failure)


def add_log_file(run: Path) -> None:
    """Also log to the file of this process. Other processes than 0 show only warnings on stderr.

    Raises:
        UserError: the file cannot be written.
    """
    logger = logging.getLogger("jaxforge")
    if jax.process_index() > 0:
        # Thousands of processes would otherwise repeat the same lines.
        logger.handlers[0].setLevel(logging.WARNING)
    path = run / "logs" / f"process_{jax.process_index()}.log"
    try:
        safe_files.make_directory(path.parent)
        handler = _LogFile(path)
    except OSError as error:
        raise UserError(f"cannot write {error.filename or path}: {error.strerror}") from error
    handler.setFormatter(redacting(_FORMAT))
    logger.addHandler(handler)
    for name in _LIBRARIES:
        logging.getLogger(name).addHandler(handler)


class _LogFile(logging.FileHandler):
    """A log file whose failures are reported once: messages are on the terminal too."""

    _has_warned = False

    def _open(self) -> TextIOWrapper:
        file = safe_files.open_to_append(Path(self.baseFilename))
        # Unbuffered: a killed process loses no messages.
        return TextIOWrapper(file, encoding="utf-8", write_through=True)

    def handleError(self, record: logging.LogRecord) -> None:
        """Report a failed write once, instead of a traceback for each message."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._has_warned:
            # Once: a full disk would otherwise flood the terminal.
            self._has_warned = True
            stderr = streams.tolerant(sys.stderr)
            print(f"cannot write log messages to {self.baseFilename}: {error}", file=stderr)


def banner(console: Console, rows: Mapping[str, str]) -> None:
    """Print the banner of a run as a two-column table."""
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(f"[bold]{name}", redacted_message(value))
    console.print(table)


_REDRAWN_PER_SECOND = 2
_RECENT = 8  # logged intervals that determine the rate
_GAP = "  "
_BAR = range(10, 31)  # columns
_EXTRAS = {
    "MFU {:.0%}": ("train/mfu",),
    "lr {:.2e}": ("train/lr",),
    "|g| {:.3f}": ("train/grad_norm",),
    "{:.1f}/{:.0f} GB": ("gpu/peak_gb", "gpu/total_gb"),
}
"""Part of the line -> metrics that it needs."""
_SPINNERS = {False: "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", True: "|/-\\"}  # True for a terminal with ASCII only
_BARS = {False: ("━", "─"), True: ("#", "-")}


class Activity(NamedTuple):
    """Current activity of a run.

    Attributes:
        step: the step that was launched last; None before the first.
        name: name of the activity; empty while the run steps.
        seconds: time since the activity began, or since the last step.
    """

    step: int | None
    name: str
    seconds: float


class LiveLine(Sink):
    """The live line, as a sink of metrics; evaluations stay on the screen.

    Args:
        console: a terminal.
        activity: returns the current activity; called by the thread that redraws the line.
    """

    def __init__(self, console: Console, activity: Callable[[], Activity]) -> None:
        self._console, self._activity = console, activity
        self._step = self._max_steps = self._logged = 0
        self._metrics: Metrics = {}
        self._pace: deque[tuple[int, float]] = deque(maxlen=_RECENT)  # steps, seconds
        self._is_first = True
        self._live = Live(
            self, console=console, refresh_per_second=_REDRAWN_PER_SECOND, transient=True
        )

    def __enter__(self) -> "LiveLine":
        self._live.start()
        self._console.show_cursor(True)  # a killed process would leave the cursor hidden
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def begin(self, step: int, max_steps: int) -> None:
        """Set the first step of this start and the last step of the run."""
        self._step = self._logged = step
        self._max_steps = max_steps

    def write(self, step: int, metrics: Metrics) -> None:
        """Show the metrics of a step; print a line for an evaluation."""
        if not is_step(metrics):
            if line := format_line(step, metrics):
                self._print(line)
            return
        if self._is_first and self._pace:
            self._pace.clear()  # the first step of a start is slower than the others
            self._is_first = False
        if seconds := metrics.get("train/step_time_sec"):
            # Intervals weigh by their steps, since the last one may be shorter.
            self._pace.append((max(1, step - self._logged), seconds))
        self._step = self._logged = step
        self._metrics = metrics

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Print each sample."""
        for sample in samples:
            self._print(format_sample(step, sample))

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def rewind(self, step: int) -> None:
        """Continue from an earlier step."""
        self._step = self._logged = step

    def close(self, exit_code: int) -> None:
        """Leave the last line on the screen, if there was a step."""
        # The line that stays on the screen shows the last step, not an activity.
        last = self._activity()._replace(name="", seconds=0.0)
        self._activity = lambda: last
        self._live.transient = not self._metrics
        self._live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the line for the width of the console."""
        text = self.text(self._activity(), options.max_width, ascii_only=options.ascii_only)
        yield Text(text, no_wrap=True, overflow="crop", end="")

    def text(self, activity: Activity, width: int, *, ascii_only: bool = False) -> str:
        """Return the line.

        Parts are added from the left until the next one does not fit. Only if all fit, extras and
        a bar follow: extras as long as the shortest bar still fits behind them.

        Args:
            activity: current activity of the run.
            width: columns of the terminal.
            ascii_only: True if the terminal shows only ASCII characters.
        """
        first, *parts = [*self._parts(activity, ascii_only), ""]
        line = first[:width]
        for part in filter(None, parts):
            if len(line) + len(_GAP) + len(part) > width:
                return line
            line += _GAP + part
        if not self._max_steps or _room(line, width) < _BAR[0]:
            return line
        for text, names in _EXTRAS.items():
            if not self._metrics.keys() >= set(names):
                continue
            part = text.format(*(self._metrics[name] for name in names))
            if _room(line, width - len(_GAP) - len(part)) < _BAR[0]:
                break
            line += _GAP + part
        done, to_do = _BARS[ascii_only]
        columns = min(_room(line, width), _BAR[-1])
        filled = columns * self._current_step(activity) // self._max_steps
        return line + _GAP + done * filled + to_do * (columns - filled)

    def _parts(self, activity: Activity, ascii_only: bool) -> Iterator[str]:
        """Yield the parts of the line except the bar, the most important first."""
        step, total, metrics = self._current_step(activity), self._max_steps, self._metrics
        if total:
            yield f"step {step}/{total}"
        if activity.name:
            spinner = _SPINNERS[ascii_only]
            turn = spinner[int(activity.seconds * _REDRAWN_PER_SECOND) % len(spinner)]
            yield f"{turn} {activity.name} {clock(activity.seconds)}"
        if total:
            yield f"{math.floor(100 * step / total)}%"
        if metrics:
            yield f"loss {metrics['train/loss']:.4f}"
            yield f"{human(metrics['train/tokens_per_sec'])} tok/s"
        if not activity.name and (remaining := self.seconds_left(activity)):
            yield f"{clock(remaining)} left"
        if skipped := metrics.get("train/skipped_steps"):
            yield f"{skipped:.0f} skipped"

    def _current_step(self, activity: Activity) -> int:
        """Return the step launched last; before the first launch, the step of the start."""
        return self._step if activity.step is None else min(activity.step, self._max_steps)

    def seconds_left(self, activity: Activity) -> float | None:
        """Return the time of the remaining steps, without evaluations and checkpoints.

        Returns:
            Seconds; None before the first timed step.
        """
        if not self._pace:
            return None
        steps, seconds = (sum(n) for n in zip(*((k, k * s) for k, s in self._pace), strict=True))
        step_time = seconds / steps
        # At most one step is subtracted, so that a hang does not look like progress.
        remaining = (self._max_steps - self._current_step(activity)) * step_time
        return max(0.0, remaining - min(activity.seconds, step_time))


def _room(line: str, width: int) -> int:
    """Return the columns for another part."""
    return width - len(line) - len(_GAP)


def clock(seconds: float) -> str:
    """Return a duration as 0:07, 12:34, 1:02:03 or 2d 03:04."""
    minutes, second = divmod(math.ceil(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d {hours % 24:02}:{minute:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
