"""Metrics on their way from the device to the sinks, one step late.

The host launches step n + 1 before it reads the metrics of step n, and reads them only where they
are due: between two logged steps nothing is copied from the device.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax

from jaxforge.telemetry.sinks import Sink


class _Launched(NamedTuple):
    step: int
    metrics: dict[str, jax.Array]


class Tracker:
    """Decides which steps are logged, times them, writes them to every sink.

    Args:
        sinks: where metrics go.
        interval: `metrics.log_interval`.
        tokens_per_step: tokens of one update, over all devices.
        step: the step that the run starts from.
        last_step: `train.max_steps`.

    Attributes:
        consecutive_bad: bad steps in a row, as of the last metrics fetched.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        interval: int,
        tokens_per_step: int,
        step: int,
        last_step: int,
    ) -> None:
        self._sinks, self._interval, self._last_step = sinks, interval, last_step
        self.consecutive_bad = 0
        self._tokens_per_step = tokens_per_step
        self._latest: _Launched | None = None
        self._is_due = False
        self._since_step, self._since_time, self._paused = step, time.perf_counter(), 0.0

    def start_clock(self) -> None:
        """Starts timing here: set-up and compilation are not steps."""
        self._since_time, self._paused = time.perf_counter(), 0.0

    def due(self, step: int) -> bool:
        """Whether `step` is logged: the first, every `interval`-th, the last."""
        return step in (1, self._last_step) or step % self._interval == 0

    def end_step(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Takes a step that has been launched; logs the one before it, if that was due."""
        self.flush()
        self._latest = _Launched(step, {name: metrics[name] for name in _FETCHED})
        self._is_due = self.due(step)

    def flush(self) -> None:
        """Logs the latest step now if it is due, waiting for the device."""
        if self._latest is not None and self._is_due:
            self.log_latest(self._latest.step)

    def log_latest(self, step: int) -> None:
        """Logs the metrics of the latest step, due or not, as those of `step`."""
        if self._latest is None:
            return
        values, self._latest = jax.device_get(self._latest.metrics), None
        self.consecutive_bad = int(values["consecutive"])
        seconds = self._seconds_per_step(step)
        self.log(
            step,
            {
                "train/loss": float(values["loss"]),
                "train/grad_norm": float(values["grad_norm"]),
                "train/lr": float(values["lr"]),
                "train/tokens_per_sec": self._tokens_per_step / seconds,
                "train/step_time_sec": seconds,
                "train/skipped_steps": float(values["skipped"]),
            },
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Writes to every sink."""
        for sink in self._sinks:
            sink.write(step, metrics)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside does not count as step time: evaluation, checkpoints."""
        self.flush()
        if self._latest is not None:
            jax.block_until_ready(self._latest.metrics)  # this wait is still the step's
        start = time.perf_counter()
        yield
        self._paused += time.perf_counter() - start

    def close(self) -> None:
        """Logs what is due and closes the sinks."""
        self.flush()
        for sink in self._sinks:
            sink.close()

    def _seconds_per_step(self, step: int) -> float:
        now = time.perf_counter()
        seconds = (now - self._since_time - self._paused) / max(1, step - self._since_step)
        self._since_step, self._since_time, self._paused = step, now, 0.0
        return max(seconds, 1e-9)


_FETCHED = ("loss", "grad_norm", "lr", "skipped", "consecutive")
