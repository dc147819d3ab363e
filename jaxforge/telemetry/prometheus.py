"""Metrics for Prometheus, and health for Kubernetes, over HTTP: `metrics.prometheus_port`.

    /metrics   OpenMetrics, or the text format of Prometheus, whichever the client accepts
    /healthz   200 while the process makes progress, 503 once a limit of the watchdog has expired
    /readyz    200 while the run steps, 503 before its first step and when it ends

`RunMetrics` is a sink of logged metrics. All other values are read when a client asks for them, so
they cost the loop nothing. No request touches a device. The only labels are the number of the
process, categories and versions: nothing from configs, commands or the environment.
"""

import errno
import importlib.util
import logging
import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING, NamedTuple

import jaxforge
from jaxforge.cli.servers import BoundedServer, QuietHandler
from jaxforge.errors import UserError
from jaxforge.telemetry.console import Activity
from jaxforge.telemetry.goodput import CATEGORIES, ActivityClock, ratio
from jaxforge.telemetry.sinks import Metrics, Sink

if TYPE_CHECKING:
    from prometheus_client import Metric

log = logging.getLogger(__name__)

_LIBRARY = "prometheus_client"
_GIB = 2.0**30
_POLL_SEC = 0.1  # bounds the time in which the server ends


class _Gauge(NamedTuple):
    name: str
    help: str
    factor: float = 1.0


GAUGES = {
    "train/loss": _Gauge("loss", "Loss of the last logged step, in nats per token."),
    "train/grad_norm": _Gauge("gradient_norm", "Norm of the gradients before clipping."),
    "train/lr": _Gauge("learning_rate", "Learning rate of the next update."),
    "train/tokens": _Gauge("tokens", "Tokens of the updates applied so far."),
    "train/skipped_steps": _Gauge("skipped_steps", "Steps not applied so far."),
    "train/tokens_per_sec": _Gauge("tokens_per_second", "Tokens per second, all devices together."),
    "train/step_time_sec": _Gauge("step_time_seconds", "Mean time of a step."),
    "train/data_wait_sec": _Gauge("data_wait_seconds", "Mean wait for data per step."),
    "train/mfu": _Gauge("mfu_ratio", "Model FLOPs utilization."),
    "eval/loss": _Gauge("evaluation_loss", "Loss of the last evaluation, in nats per token."),
    "eval/ema_loss": _Gauge(
        "evaluation_loss_of_average", "Loss of the average of the parameters, in nats per token."
    ),
    "gpu/allocated_gb": _Gauge(
        "device_memory_allocated_bytes", "Memory in arrays of the fullest device.", _GIB
    ),
    "gpu/peak_gb": _Gauge(
        "device_memory_peak_bytes", "Largest memory use of the fullest device.", _GIB
    ),
    "gpu/total_gb": _Gauge("device_memory_limit_bytes", "Limit of the allocator.", _GIB),
    "checkpoint/blocking_sec": _Gauge(
        "checkpoint_blocking_seconds", "Time in which the last save blocked training."
    ),
    "checkpoint/save_sec": _Gauge(
        "checkpoint_save_seconds", "Time until the last checkpoint was durable."
    ),
}
"""Logged metric -> gauge with the latest value."""


class RunMetrics(Sink):
    """Latest values of a run, as a sink of logged metrics and a collector of `prometheus_client`.

    Args:
        process: index of this process in the job.
        max_steps: `train.max_steps`.
        clock: the clock of this process.
        activity: returns the current activity.
    """

    def __init__(
        self, process: int, max_steps: int, clock: ActivityClock, activity: Callable[[], Activity]
    ) -> None:
        self._process, self._max_steps = str(process), max_steps
        self._clock, self._activity = clock, activity
        self._latest: Metrics = {}
        self._logged_step = 0
        self._durable: float | None = None

    def write(self, step: int, metrics: Metrics) -> None:
        """Keep the values; other metrics are ignored."""
        self._logged_step = step
        # A new dict, not an update: a thread of the server may be reading the old one.
        self._latest = self._latest | {name: metrics[name] for name in GAUGES if name in metrics}
        # Logged when a save is found durable, not when it began.
        if "checkpoint/save_sec" in metrics:
            self._durable = time.monotonic()

    def rewind(self, step: int) -> None:
        """Continue from an earlier step."""
        self._logged_step = step

    def collect(self) -> "Iterator[Metric]":
        """Yield all metrics with their present values."""
        from prometheus_client import core

        # Read once: the training thread may replace both while this one yields.
        activity, latest = self._activity(), self._latest
        yield core.InfoMetricFamily(
            "jaxforge", "Version of jaxforge.", {"version": jaxforge.__version__}
        )
        yield self._gauge("max_steps", "Last step of the run.", self._max_steps)
        yield self._gauge("logged_step", "Step of the logged values.", self._logged_step)
        yield self._gauge("step", "Step that was launched last.", activity.step or 0)
        yield self._gauge(
            "activity_seconds",
            "Time since the present activity began, or since the last step.",
            activity.seconds,
        )
        for name, gauge in GAUGES.items():
            if name in latest:
                yield self._gauge(gauge.name, gauge.help, gauge.factor * latest[name])
        if self._durable is not None:
            yield self._gauge(
                "checkpoint_age_seconds",
                "Time since a checkpoint of this start was noticed to be durable.",
                time.monotonic() - self._durable,
            )
        yield from self._times()

    def _times(self) -> "Iterator[Metric]":
        """Yield the account of the run and the present category."""
        from prometheus_client import core

        seconds, current = self._clock.run(), self._clock.current
        yield self._gauge("goodput_ratio", "Share of all time that went into new steps.",
                          ratio(seconds))  # fmt: skip
        times = core.CounterMetricFamily(
            "jaxforge_time_seconds", "Time of the run by category.", labels=["process", "category"]
        )
        state = core.StateSetMetricFamily(
            "jaxforge_activity", "Present category of time.", labels=["process"]
        )
        for name in CATEGORIES:
            times.add_metric([self._process, name], seconds[name])
        state.add_metric([self._process], {name: name == current for name in CATEGORIES})
        yield times
        yield state

    def _gauge(self, name: str, text: str, value: float) -> "Metric":
        from prometheus_client import core

        gauge = core.GaugeMetricFamily(f"jaxforge_{name}", text, labels=["process"])
        gauge.add_metric([self._process], value)
        return gauge


class MetricsServer(BoundedServer):
    """HTTP server of one process; its threads are daemons, and no failure reaches the run.

    Args:
        metrics: the values to serve.
        clock: tells whether the run steps.
        hung: returns the message of an expired limit of the watchdog, or None.
        address: address to listen on.
        port: port to listen on; 0: any free port.

    Raises:
        OSError: the port is taken, or the address does not belong to this host.
        OverflowError: the port is too large.
    """

    def __init__(
        self,
        metrics: RunMetrics,
        clock: ActivityClock,
        hung: Callable[[], str | None],
        address: str,
        port: int,
    ) -> None:
        from prometheus_client import CollectorRegistry

        # Not the global registry: callbacks of users may have metrics there.
        self.registry, self.clock, self.hung = CollectorRegistry(), clock, hung
        self.registry.register(metrics)
        super().__init__((address, port), _Handler)

    def start(self) -> None:
        """Serve in a thread."""
        threading.Thread(
            target=self.serve_forever, args=(_POLL_SEC,), name="prometheus", daemon=True
        ).start()

    def stop(self) -> None:
        """Stop listening; open connections end with the process."""
        self.shutdown()
        self.server_close()


class _Handler(QuietHandler):
    server: MetricsServer

    def do_GET(self) -> None:
        """Answer a request of Prometheus or of a probe."""
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._send_metrics()
        elif path == "/healthz":
            self._send_state(self.server.hung() or "")
        elif path == "/readyz":
            clock = self.server.clock
            self._send_state("" if clock.is_stepping else f"not training: {clock.current}")
        else:
            self._send_text(HTTPStatus.NOT_FOUND, "there are /metrics, /healthz and /readyz")

    def _send_metrics(self) -> None:
        from prometheus_client.exposition import choose_encoder

        encode, kind = choose_encoder(self.headers.get("Accept", ""))
        self.answer(HTTPStatus.OK, kind, encode(self.server.registry))

    def _send_state(self, problem: str) -> None:
        status = HTTPStatus.SERVICE_UNAVAILABLE if problem else HTTPStatus.OK
        self._send_text(status, problem or "ok")

    def _send_text(self, status: HTTPStatus, text: str) -> None:
        self.answer(status, "text/plain; charset=utf-8", f"{text}\n".encode())


def check_library() -> None:
    """Check that the library of Prometheus is installed.

    Raises:
        UserError: it is missing; the message says how to install it.
    """
    if importlib.util.find_spec(_LIBRARY) is None:
        raise UserError(
            f"metrics.prometheus_port needs {_LIBRARY}: pip install 'jaxforge[prometheus]', or set "
            "metrics.prometheus_port = 0"
        )


def start_server(
    metrics: RunMetrics,
    clock: ActivityClock,
    hung: Callable[[], str | None],
    address: str,
    port: int,
) -> MetricsServer | None:
    """Start the server; log an error and return None if it cannot listen.

    The arguments are those of `MetricsServer`.
    """
    try:
        server = MetricsServer(metrics, clock, hung, address, port)
    except (OSError, OverflowError) as error:
        # Monitoring is not worth a failed start of a large job: log, and train without it.
        is_taken = getattr(error, "errno", None) == errno.EADDRINUSE
        reason = "is in use by another process" if is_taken else f"cannot be opened: {error}"
        log.error(
            "port %d of %s %s. The run continues without /metrics, /healthz and /readyz; set "
            "another metrics.prometheus_port (each further process of a host uses the next port)",
            port, address, reason,
        )  # fmt: skip
        return None
    server.start()
    log.info("metrics, health and readiness: http://%s:%d/metrics, /healthz, /readyz",
             address, server.port)  # fmt: skip
    return server
