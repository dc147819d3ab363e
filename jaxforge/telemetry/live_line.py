"""Live line of a terminal: the progress of a run, redrawn twice a second.

    step 1200/100000  1%  loss 3.2145  350K tok/s  1:23:45 left  ━━━━──────────────
    step 1200/100000  1%  ⠹ evaluating 0:12  loss 3.2145
    ⠹ compiling 0:48

Parts that do not fit the width of the terminal are omitted, the least important first. Log messages
and evaluations are printed above the line.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from jaxforge.telemetry.numbers import human
from jaxforge.telemetry.sinks import Metrics, Sample, format_line, format_sample, is_step

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


class LiveLine:
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
