"""Metrics on their way from the device to the sinks, one step late.

The host launches step n + 1 before it reads the metrics of step n, and reads them only where they
are due somewhere: between two logged steps nothing is copied from the device.
"""

import collections
import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
from jaxtyping import Array, Float

from jaxforge.telemetry.measures import Smoothed, Work, collected, memory
from jaxforge.telemetry.outlets import Outlet
from jaxforge.telemetry.sinks import Metrics


class Start(NamedTuple):
    """Where a run goes on from.

    Attributes:
        step: steps attempted.
        tokens: tokens of applied updates.
        skipped: steps whose update was not applied.
    """

    step: int = 0
    tokens: int = 0
    skipped: int = 0


class _Launched(NamedTuple):
    step: int
    metrics: dict[str, Array]
    waited: float


class _Mark(NamedTuple):
    """A moment of the run: its step, the seconds of its clock, those spent waiting for data."""

    step: int
    seconds: float
    waited: float


class Tracker:
    """Decides which steps are logged where, times them, writes them.

    Args:
        outlets: where metrics go; the same on every process.
        work: what an update takes.
        start: where the run goes on from.
        last_step: `train.max_steps`.
        extras: `metrics.collect`; logged besides.

    Attributes:
        consecutive_bad: bad steps in a row, as of the last metrics fetched.
    """

    def __init__(
        self,
        outlets: Sequence[Outlet],
        work: Work,
        start: Start,
        last_step: int,
        extras: Sequence[str] = (),
    ) -> None:
        self._extras = extras
        self._outlets, self._work, self._start, self._last_step = outlets, work, start, last_step
        self.consecutive_bad = 0
        self._latest: _Launched | None = None
        # Of the steps since the last fetch; a hundred back, a loss weighs 0.9^100 and can go.
        self._losses: collections.deque[Float[Array, ""]] = collections.deque(maxlen=100)
        self._smoothed = Smoothed()
        self._paused = self._waited = 0.0
        self.start_clock()

    def start_clock(self) -> None:
        """Starts timing here: set-up and compilation are not steps."""
        self._fetched = _Mark(self._start.step, self._clock(), self._waited)
        self._written = [self._fetched] * len(self._outlets)

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Time spent inside is the step's, and counts as `train/data_wait_sec`."""
        start = time.perf_counter()
        yield
        self._waited += time.perf_counter() - start

    def end_step(self, step: int, metrics: dict[str, Array]) -> None:
        """Takes a step that has been launched; logs the one before it, where that was due."""
        self.flush()
        fetched = {name: metrics[name] for name in (*_FETCHED, *self._extras)}
        self._latest = _Launched(step, fetched, self._waited)
        self._losses.append(metrics["loss"])

    def flush(self) -> None:
        """Logs the latest step now where it is due, waiting for the device."""
        if self._latest is not None and (due := self._due(self._latest.step)):
            self._log_latest(self._latest, self._latest.step, due)

    def log_latest(self, step: int) -> None:
        """Logs the metrics of the latest step everywhere, due or not, as those of `step`."""
        if self._latest is not None:
            self._log_latest(self._latest, step, range(len(self._outlets)))

    def log(self, step: int, metrics: Metrics) -> None:
        """Writes to every outlet."""
        for outlet in self._outlets:
            outlet.write(step, metrics)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside does not count as step time: evaluation, checkpoints, traces.

        It begins when every step that was launched has ended.
        """
        self.flush()
        if self._latest is not None:
            jax.block_until_ready(self._latest.metrics)  # this wait is still the step's
        start = time.perf_counter()
        yield
        self._paused += time.perf_counter() - start

    def close(self) -> None:
        """Logs what is due and closes the outlets."""
        self.flush()
        for outlet in self._outlets:
            outlet.close()

    def _due(self, step: int) -> Sequence[int]:
        """The outlets to which `step` goes: all take the first and the last."""
        everywhere = step in (1, self._last_step)
        return [i for i, outlet in enumerate(self._outlets) if everywhere or outlet.due(step)]

    def _log_latest(self, latest: _Launched, step: int, outlets: Sequence[int]) -> None:
        values, fetched = jax.device_get((latest.metrics, list(self._losses)))
        losses = [float(loss) for loss in fetched]
        self._latest = None
        self._losses.clear()
        self.consecutive_bad = int(values["consecutive"])
        since, now = self._fetched, _Mark(step, self._clock(), latest.waited)
        self._fetched = now
        speed = self._work.speed(_seconds_per_step(since, now))
        metrics = {
            "train/loss": losses[-1],
            "train/grad_norm": float(values["grad_norm"]),
            "train/lr": float(values["lr"]),
            "train/tokens": self._tokens(step, int(values["skipped"])),
            "train/skipped_steps": float(values["skipped"]),
            **collected({name: values[name] for name in self._extras}),
            **self._smoothed.update(losses, _steps(since, now), speed),
            **memory(jax.local_devices()),
        }
        for i in outlets:
            self._outlets[i].write(step, metrics | self._interval(self._written[i], now))
            self._written[i] = now

    def _interval(self, since: _Mark, now: _Mark) -> Metrics:
        """Means over the steps between two marks: each outlet has those of its own interval."""
        speed = self._work.speed(_seconds_per_step(since, now))
        return {**speed, "train/data_wait_sec": (now.waited - since.waited) / _steps(since, now)}

    def _tokens(self, step: int, skipped: int) -> float:
        applied = (step - self._start.step) - (skipped - self._start.skipped)
        return float(self._start.tokens + applied * self._work.tokens)

    def _clock(self) -> float:
        return time.perf_counter() - self._paused


_FETCHED = ("grad_norm", "lr", "skipped", "consecutive")


def _steps(since: _Mark, now: _Mark) -> int:
    return max(1, now.step - since.step)  # a run that gave up stands at an earlier step


def _seconds_per_step(since: _Mark, now: _Mark) -> float:
    return max((now.seconds - since.seconds) / _steps(since, now), 1e-9)
