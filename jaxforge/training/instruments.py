"""Instruments of a run: metrics, watchdog and profiler."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import jax
from rich.console import Console

from jaxforge.config.job import JobConfig
from jaxforge.parallel import agreement
from jaxforge.parallel.mesh import data_parallel_size
from jaxforge.program import Program
from jaxforge.runs.attempts import AttemptLog
from jaxforge.state.progress import Progress
from jaxforge.storage import mirror
from jaxforge.storage.run_lock import RunLock
from jaxforge.telemetry import prometheus
from jaxforge.telemetry.console import LiveLine, banner
from jaxforge.telemetry.measures import StepCost
from jaxforge.telemetry.metric_writers import MetricWriter, check_libraries, open_writers
from jaxforge.telemetry.profiler import Profiler
from jaxforge.telemetry.prometheus import RunMetrics
from jaxforge.telemetry.tracker import Tracker
from jaxforge.training.callbacks.callback import Callback
from jaxforge.training.health.attention_logits import AttentionLogits
from jaxforge.training.health.watchdog import Watchdog


@dataclasses.dataclass(frozen=True)
class Session:
    """Inputs of a run from its caller.

    Attributes:
        callbacks: callbacks of the user.
        console: console for the banner and lines of metrics.
        watchdog: ends the process if it hangs.
        lock: lock of the run directory.
        attempt: records the account of this attempt.
        live: the live line of a terminal; None without one.
        metrics: values for Prometheus; None if they are not served.
    """

    callbacks: Sequence[Callback]
    console: Console
    watchdog: Watchdog
    lock: RunLock
    attempt: AttemptLog
    live: LiveLine | None = None
    metrics: RunMetrics | None = None

    def show_banner(self, rows: Mapping[str, str]) -> None:
        """Print the banner of the run."""
        banner(self.console, rows)


@dataclasses.dataclass
class Instruments:
    """Observers of a run.

    Attributes:
        tracker: logs metrics.
        watchdog: ends the process if it hangs.
        profiler: traces the steps of `[profiling]`.
        attention_logits: measures the largest attention logit; None if it is off.
        attempt: records the account of this attempt; None if it is not recorded.
    """

    tracker: Tracker
    watchdog: Watchdog
    profiler: Profiler
    attention_logits: AttentionLogits | None = None
    attempt: AttemptLog | None = None

    @classmethod
    def open(
        cls, session: Session, program: Program, progress: Progress, profiler: Profiler
    ) -> "Instruments":
        """Open the writers of metrics, and the measurement of attention logits if it is on."""
        interval, logits = program.config.metrics.max_attention_logit_interval, None
        if interval:
            logits = AttentionLogits(interval, program.model, program.mesh)
        tracker = open_tracker(session, program, progress)
        return cls(tracker, session.watchdog, profiler, logits, session.attempt)


def open_profiler(config: JobConfig) -> Profiler:
    """Check the libraries of `[metrics]` and return the profiler.

    Raises:
        UserError: `[profiling]` names a process that does not exist, or a library of `[metrics]` is
            not installed.
    """
    check_libraries(config.metrics)
    return Profiler(config.profiling, mirror.files(config.checkpoint.dir))


@contextlib.contextmanager
def serving_metrics(config: JobConfig, watchdog: Watchdog) -> Iterator[RunMetrics | None]:
    """Serve metrics and health in the block, if `metrics.prometheus_port` is set.

    Every process of the job must call this: several of one host use consecutive ports.

    Raises:
        UserError: the library is not installed.
    """
    section = config.metrics
    if not section.prometheus_port:
        yield None
        return
    prometheus.check_library()
    values = RunMetrics(
        jax.process_index(), config.train.max_steps, watchdog.clock, watchdog.activity
    )
    server = prometheus.start_server(
        values, watchdog.clock, lambda: watchdog.idle(0.0), section.prometheus_address,
        section.prometheus_port + agreement.index_on_host(),
    )  # fmt: skip
    try:
        yield values
    finally:
        if server is not None:
            server.stop()


def open_tracker(session: Session, program: Program, progress: Progress) -> Tracker:
    """Open the writers of metrics."""
    config = program.config
    ramp = config.train.ramp(data_parallel_size(program.mesh))
    cost = StepCost.of(config, ramp.sequences(config.train.grad_accum_steps))
    examples = progress.sequences_per_epoch
    writers = open_writers(
        session.console, config, progress.run_id, progress.step, cost, examples, session.live,
        repeats_evaluation=progress.validation is not None,
    )  # fmt: skip
    # Prometheus is scraped at any time, so it has the values of the console.
    if session.metrics is not None:
        writers.append(MetricWriter("Prometheus", session.metrics, config.metrics.log_interval))
    names = [dataset.label for dataset in config.data.datasets]
    extras = config.metrics.collect
    left_out = {n: ramp.sequences(ramp.accum(n - 1)) for n in config.train.iterations_to_skip}
    return Tracker(
        writers, cost, progress, config.train.max_steps, names, extras, left_out,
        session.watchdog.clock, program.read_metrics,
    )  # fmt: skip
