"""Progress bar and loss curve of a run in a notebook, updated during training.

    import jaxforge as jf
    from jaxforge.tools.notebook import LivePlot

    jf.fit(jf.load_config("my_run.toml"), callbacks=[LivePlot()])

The notebook's Stop (or "Interrupt kernel") acts as Ctrl-C: the run saves, `jf.fit` returns, and
the kernel stays alive. The same cell resumes the run.
"""

import importlib.util
import math
import time
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

import jax

from jaxforge.config.job import JobConfig
from jaxforge.exit_codes import Exit
from jaxforge.telemetry.console import clock
from jaxforge.training.callbacks.callback import Callback, EvalContext, StepContext

Point = tuple[int, float]
"""A step and a loss."""

_WIDTH, _HEIGHT, _LEFT, _BELOW = 640, 220, 48, 18  # pixels; the last two are for the axes
_TRAINED, _EVALUATED = "#3b6ea8", "#c2681f"
_MOST_POINTS = 400  # of a curve; beyond, every second point is dropped


class LivePlot(Callback):
    """Live progress of a run; without IPython, a line of text at its end.

    Each update of the display reads a loss from the device and so waits for its step. Between
    updates the run is not delayed.

    Args:
        seconds: minimum time between two updates.
    """

    def __init__(self, seconds: float = 1.0) -> None:
        self._seconds, self._drawn = seconds, 0.0
        self._handle: Any = None
        self._trained: list[Point] = []
        self._evaluated: list[Point] = []
        self._begun: tuple[int, float] | None = None
        self._max_steps = self._step = 0
        self._state = "running"

    def on_train_begin(self, config: JobConfig) -> None:
        """Create the display in the notebook."""
        self._max_steps = config.train.max_steps
        if jax.process_index() == 0 and importlib.util.find_spec("IPython") is not None:
            from IPython.display import display  # an optional dependency

            self._handle = display(self._data(), raw=True, display_id=True)

    def on_step_end(self, context: StepContext) -> None:
        """Update the display if it is due."""
        self._step, now = context.step, time.monotonic()
        if self._begun is None:
            self._begun = context.step, now
        if now - self._drawn >= self._seconds:
            self._trained.append((context.step, context.loss))
            if len(self._trained) > _MOST_POINTS:
                self._trained = self._trained[::2]
            self._draw()

    def on_eval_end(
        self, metrics: dict[str, float], step: int, context: EvalContext | None = None
    ) -> None:
        """Add a point to the evaluation curve, if all sets were evaluated."""
        if "eval/loss" in metrics:
            self._evaluated.append((step, metrics["eval/loss"]))
        self._draw()

    def on_train_end(self, step: int, tokens_seen: int, reason: Exit | None) -> None:
        """Show the final state."""
        self._step = step
        self._state = "failed" if reason is None else reason.name.lower().replace("_", " ")
        self._draw()
        if self._handle is None and jax.process_index() == 0:
            print(self.text())

    def text(self) -> str:
        """Return the progress of the run in one line."""
        share = self._step / self._max_steps if self._max_steps else 0.0
        parts = [self._state, f"step {self._step:,} of {self._max_steps:,} ({share:.0%})"]
        parts += [f"loss {loss:.4f}" for _, loss in self._trained[-1:]]
        parts += [f"evaluation {loss:.4f}" for _, loss in self._evaluated[-1:]]
        if self._state == "running" and (left := self._seconds_left()) is not None:
            parts.append(f"{clock(left)} left")
        return ", ".join(parts)

    def _seconds_left(self) -> float | None:
        """Return the estimated remaining time, from the steps since this start, pauses included."""
        if self._begun is None or self._step <= self._begun[0]:
            return None
        per_step = (time.monotonic() - self._begun[1]) / (self._step - self._begun[0])
        return per_step * (self._max_steps - self._step)

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        if self._handle is not None:
            self._handle.update(self._data(), raw=True)

    def _data(self) -> dict[str, str]:
        """Return the display in each MIME type."""
        bar = f'<progress style="width:{_WIDTH}px" max="{self._max_steps}" value="{self._step}">'
        curves = curve_svg(self._trained, self._evaluated, self._max_steps)
        html = f"<div>{escape(self.text())}</div><div>{bar}</progress></div>{curves}"
        return {"text/html": html, "text/plain": self.text()}


def curve_svg(trained: Sequence[Point], evaluated: Sequence[Point], max_steps: int) -> str:
    """Return the curves as SVG; empty with fewer than two finite points."""
    finite = [loss for _, loss in (*trained, *evaluated) if math.isfinite(loss)]
    if len(finite) < 2:
        return ""
    low, high = min(finite), max(finite)
    span = (high - low) or 1.0
    width, height = _WIDTH - _LEFT, _HEIGHT - _BELOW

    def to_text(point: Point) -> str:
        step, loss = point
        x = _LEFT + width * step / max(1, max_steps)
        return f"{x:.1f},{4 + (height - 8) * (high - loss) / span:.1f}"

    def curve(points: Sequence[Point], colour: str) -> Iterator[str]:
        positions = " ".join(to_text(point) for point in points if math.isfinite(point[1]))
        yield f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{positions}"/>'

    def dots(points: Sequence[Point], colour: str) -> Iterator[str]:
        for x, y in (to_text(point).split(",") for point in points if math.isfinite(point[1])):
            yield f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>'

    def label(x: float, y: float, anchor: str, text: str, colour: str = "currentColor") -> str:
        return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}">{text}</text>'

    return "".join((
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" font-size="11">',
        *curve(trained, _TRAINED),
        *curve(evaluated, _EVALUATED),
        *dots(evaluated, _EVALUATED),
        label(_LEFT - 6, 12, "end", f"{high:.3g}"),
        label(_LEFT - 6, height, "end", f"{low:.3g}"),
        label(_LEFT, _HEIGHT - 4, "start", "0"),
        label(_WIDTH - 2, _HEIGHT - 4, "end", f"{max_steps:,} steps"),
        label(_WIDTH - 2, 12, "end", "loss", _TRAINED),
        label(_WIDTH - 2, 26, "end", "evaluation" if evaluated else "", _EVALUATED),
        "</svg>",
    ))  # fmt: skip
