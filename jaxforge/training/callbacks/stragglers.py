"""Detection of hosts that delay the others.

All devices step together, so step times are the same on every host. Hosts differ in the time they
spend before their step can run: waiting for data, and launching. A slow device is not visible here,
but in a profile (`[profiling]`, `profiling.hosts`).
"""

import logging
import socket
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Bool, Float

from jaxforge.config.metrics import MetricsConfig
from jaxforge.exit_codes import Exit
from jaxforge.step.train_step import CompiledSteps
from jaxforge.telemetry.tracker import HostTimes
from jaxforge.training.callbacks.callback import IntervalContext
from jaxforge.training.callbacks.run_callback import RunCallback, RunParts

log = logging.getLogger(__name__)

_NAME_BYTES = 64
_NOTICEABLE = 0.1
"""Share of a step below which the own time of a host is noise."""


class Report(NamedTuple):
    """Seconds per step, over the steps since the last report, host by host.

    Attributes:
        data_wait: waiting for batches.
        launch: from the arrival of a batch to the launch of its step.
        step: the whole step; nearly the same on all hosts.
    """

    data_wait: Float[np.ndarray, "hosts"]
    launch: Float[np.ndarray, "hosts"]
    step: Float[np.ndarray, "hosts"]

    @property
    def own(self) -> Float[np.ndarray, "hosts"]:
        """Time that each host spends before its step can run."""
        return self.data_wait + self.launch

    @property
    def scores(self) -> Float[np.ndarray, "hosts"]:
        """Time of the fastest host / own time, 1 for the fastest: NVRx's relative score."""
        return self.own.min() / np.maximum(self.own, 1e-9)

    @property
    def z_scores(self) -> Float[np.ndarray, "hosts"]:
        """Standard deviations above the mean."""
        return (self.own - self.own.mean()) / max(self.own.std(), 1e-9)

    def slow(self, threshold: float) -> Bool[np.ndarray, "hosts"]:
        """Return which hosts score below the threshold with an own time above noise."""
        return (self.scores < threshold) & (self.own > _NOTICEABLE * self.step)


class Stragglers(RunCallback):
    """Reports the own time of hosts and names slow hosts.

    Args:
        config: the `[metrics]` section.
    """

    def __init__(self, config: MetricsConfig) -> None:
        self.every, self._config = config.straggler_report_interval, config
        self._hosts: list[str] = []
        self._since: tuple[int, HostTimes] | None = None

    @classmethod
    def of_run(cls, run: RunParts) -> "Stragglers | None":
        """Return the callback if `metrics.straggler_report_interval` is set."""
        section = run.config.metrics
        return cls(section) if section.straggler_report_interval else None

    def on_compiled(self, steps: CompiledSteps) -> None:
        """Gather the names of all hosts."""
        self._hosts = _host_names()

    def on_interval(self, context: IntervalContext) -> Exit | None:
        """Report the times; return `Exit.STRAGGLER` if that is enabled, on every process alike."""
        step, since, now = context.step, self._since, context.tracker.host_times()
        self._since = step, now
        if since is None:
            return None  # these steps include the setup
        mean = (np.subtract(now, since[1]) / (step - since[0])).astype(np.float32)  # per step
        clock, data_wait, launch = multihost_utils.process_allgather(mean).T
        report = Report(data_wait, launch, clock)
        slow = report.slow(self._config.straggler_threshold)
        if jax.process_index() == 0:
            for level, text in describe(report, slow, self._hosts):
                log.log(level, "step %d: %s", step, text)
        if slow.any() and self._config.stop_if_detected_straggler:
            log.warning("Exiting program due to straggler detection.")
            return Exit.STRAGGLER
        return None


def describe(
    report: Report, slow: Bool[np.ndarray, "hosts"], hosts: Sequence[str]
) -> Iterator[tuple[int, str]]:
    """Yield log levels and messages: the spread over all hosts, then each slow host.

    Args:
        report: times of all hosts.
        slow: True for slow hosts.
        hosts: names of the hosts.
    """
    spread = ", ".join(
        f"{name.replace('_', ' ')} {times.min():.4f}/{np.median(times):.4f}/{times.max():.4f}"
        for name, times in report._asdict().items()
    )
    yield logging.INFO, f"seconds per step, min/median/max of {len(hosts)} hosts: {spread}"
    for i in np.flatnonzero(slow).tolist():
        yield (
            logging.WARNING,
            (
                f"host {i} ({hosts[i]}) is slow: per step it waits {report.data_wait[i]:.4f} s for "
                f"data and launches in {report.launch[i]:.4f} s; score {report.scores[i]:.2f}, "
                f"z-score {report.z_scores[i]:.1f}"
            ),
        )


def _host_names() -> list[str]:
    """Return the host name of every process."""
    encoded = np.zeros(_NAME_BYTES, np.uint8)
    name = socket.gethostname().encode()[:_NAME_BYTES]
    encoded[: len(name)] = np.frombuffer(name, np.uint8)
    names = multihost_utils.process_allgather(encoded)
    return [bytes(name).rstrip(b"\0").decode(errors="replace") for name in names]
