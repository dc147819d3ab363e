"""One line on a terminal that says where a run is, and moves every second, whatever the loop does.

    step 1200/100000  1%  loss 3.2145  350K tok/s  1:23:45 left  ━━━━──────────────
    step 1200/100000  1%  ⠹ evaluating 0:12  loss 3.2145
    ⠹ compiling 0:48

What does not fit the terminal's width is left out, the least important first. All else that is
printed, log messages and evaluations, stands above it.
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
_RECENT = 8  # logged intervals whose mean is the rate
_GAP = "  "
_BAR = range(10, 31)  # columns
_EXTRAS = {
    "MFU {:.0%}": ("train/mfu",),
    "lr {:.2e}": ("train/lr",),
    "|g| {:.3f}": ("train/grad_norm",),
    "{:.1f}/{:.0f} GB": ("gpu/peak_gb", "gpu/total_gb"),
}
"""Part of the line -> the metrics that it needs."""
_SPINNERS = {False: "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", True: "|/-\\"}  # by whether the terminal has ASCII alone
_BARS = {False: ("━", "─"), True: ("#", "-")}


class Moment(NamedTuple):
    """Current activity of a run.

    Attributes:
        step: the last one that was launched; None before the first.
        doing: its activity in a word or two; empty while it steps.
        seconds: since that began, or since the last step.
    """

    step: int | None
    doing: str
    seconds: float


class LiveLine:
    """The line, and the sink behind it: evaluations stay on the screen.

    Args:
        console: a terminal.
        moment: tells what the run is at; asked by the thread that redraws the line.
    """

    def __init__(self, console: Console, moment: Callable[[], Moment]) -> None:
        self._console, self._moment = console, moment
        self._step = self._max_steps = self._logged = 0
        self._metrics: Metrics = {}
        self._pace: deque[tuple[int, float]] = deque(maxlen=_RECENT)  # steps, seconds
        self._is_first = True
        self._live = Live(
            self, console=console, refresh_per_second=_REDRAWN_PER_SECOND, transient=True
        )

    def __enter__(self) -> "LiveLine":
        self._live.start()
        self._console.show_cursor(True)  # a process that is killed leaves the terminal as it was
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def begin(self, step: int, max_steps: int) -> None:
        """There is a run, which goes on from a step."""
        self._step = self._logged = step
        self._max_steps = max_steps

    def write(self, step: int, metrics: Metrics) -> None:
        """Takes the metrics of a step; prints a line for an evaluation."""
        if not is_step(metrics):
            if line := format_line(step, metrics):
                self._print(line)
            return
        if self._is_first and self._pace:
            self._pace.clear()  # the first step of a start has more to do than the others
            self._is_first = False
        if seconds := metrics.get("train/step_time_sec"):
            self._pace.append((max(1, step - self._logged), seconds))
        self._step = self._logged = step
        self._metrics = metrics

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Prints each."""
        for sample in samples:
            self._print(format_sample(step, sample))

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def rewind(self, step: int) -> None:
        """Goes back."""
        self._step = self._logged = step

    def close(self, exit_code: int) -> None:
        """Leaves the last state on the screen, where there was a step."""
        last = self._moment()._replace(doing="", seconds=0.0)
        self._moment = lambda: last
        self._live.transient = not self._metrics
        self._live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The line for a width."""
        text = self.text(self._moment(), options.max_width, ascii_only=options.ascii_only)
        yield Text(text, no_wrap=True, overflow="crop", end="")

    def text(self, moment: Moment, width: int, *, ascii_only: bool = False) -> str:
        """The line.

        Args:
            moment: what the run is at.
            width: columns of the terminal.
            ascii_only: the terminal shows no other characters.
        """
        first, *parts = [*self._parts(moment, ascii_only), ""]
        line = first[:width]
        for part in filter(None, parts):
            if len(line) + len(_GAP) + len(part) > width:
                return line
            line += _GAP + part
        if not self._max_steps or _room(line, width) < _BAR[0]:
            return line
        for part in self._extras():
            if _room(line, width - len(_GAP) - len(part)) < _BAR[0]:
                break
            line += _GAP + part
        return line + _GAP + self._bar(moment, min(_room(line, width), _BAR[-1]), ascii_only)

    def _parts(self, moment: Moment, ascii_only: bool) -> Iterator[str]:
        """Yield the parts of the line except the bar, the most important first."""
        step, total, metrics = self._at(moment), self._max_steps, self._metrics
        if total:
            yield f"step {step}/{total}"
        if moment.doing:
            spinner = _SPINNERS[ascii_only]
            turn = spinner[int(moment.seconds * _REDRAWN_PER_SECOND) % len(spinner)]
            yield f"{turn} {moment.doing} {clock(moment.seconds)}"
        if total:
            yield f"{math.floor(100 * step / total)}%"
        if metrics:
            yield f"loss {metrics['train/loss']:.4f}"
            yield f"{human(metrics['train/tokens_per_sec'])} tok/s"
        if not moment.doing and (left := self.seconds_left(moment)):
            yield f"{clock(left)} left"
        if skipped := metrics.get("train/skipped_steps"):
            yield f"{skipped:.0f} skipped"

    def _extras(self) -> Iterator[str]:
        """Yield the parts that stand before the bar if there is room."""
        for text, names in _EXTRAS.items():
            if self._metrics.keys() >= set(names):
                yield text.format(*(self._metrics[name] for name in names))

    def _bar(self, moment: Moment, width: int, ascii_only: bool) -> str:
        done, to_do = _BARS[ascii_only]
        filled = width * self._at(moment) // self._max_steps
        return done * filled + to_do * (width - filled)

    def _at(self, moment: Moment) -> int:
        """The step launched last, as far as the run has not gone back since."""
        return self._step if moment.step is None else min(moment.step, self._max_steps)

    def seconds_left(self, moment: Moment) -> float | None:
        """Time for the steps that are left, evaluations and checkpoints not counted.

        None as long as no step was timed.
        """
        if not self._pace:
            return None
        steps, seconds = (sum(n) for n in zip(*((k, k * s) for k, s in self._pace), strict=True))
        of_one = seconds / steps
        left = (self._max_steps - self._at(moment)) * of_one
        return max(0.0, left - min(moment.seconds, of_one))


def _room(line: str, width: int) -> int:
    """Columns for one part more."""
    return width - len(line) - len(_GAP)


def clock(seconds: float) -> str:
    """0:07, 12:34, 1:02:03, 2d 03:04."""
    minutes, second = divmod(math.ceil(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d {hours % 24:02}:{minute:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
