"""Writers of metrics: sinks with intervals, whose failures do not stop the run.

Every process has the same writers, since they decide when metrics are read. Only process 0 has
sinks.
"""

import importlib.util
import logging
from collections.abc import Callable, Sequence

import jax
from rich.console import Console

from jaxforge.config.job import JobConfig
from jaxforge.config.metrics import MetricsConfig
from jaxforge.errors import StorageError, UserError
from jaxforge.exit_codes import Exit
from jaxforge.storage import mirror
from jaxforge.telemetry.console import LiveLine
from jaxforge.telemetry.line_formats import LINE_FORMATS, LineSink, RunFacts
from jaxforge.telemetry.measures import StepCost
from jaxforge.telemetry.sinks import JsonlSink, Metrics, Sample, Sink
from jaxforge.telemetry.writers import MlflowSink, TensorBoardSink, TrackioSink, WandbSink

log = logging.getLogger(__name__)

_LIBRARIES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow",
              "trackio": "trackio"}  # fmt: skip
"""Extra of jaxforge -> module of its library."""
PATIENCE = 3
"""Failures in a row after which a sink is disabled."""


class MetricWriter:
    """A sink with an interval, whose failures do not stop the run.

    Args:
        name: name of the sink in messages.
        sink: the sink; None if this process writes nothing.
        interval: steps between writes.
        catches_up: True if the sink retains what it cannot write and writes it later. Such a sink
            is never disabled.
    """

    def __init__(
        self, name: str, sink: Sink | None, interval: int, *, catches_up: bool = False
    ) -> None:
        self._name, self._sink, self._interval = name, sink, interval
        self._catches_up = catches_up
        self._failures = 0

    def due(self, step: int) -> bool:
        """Return whether `step` is a multiple of the interval, even without a sink."""
        return step % self._interval == 0

    def write(self, step: int, metrics: Metrics) -> None:
        """Write metrics, or warn of a failure."""
        self._try(lambda sink: sink.write(step, metrics))

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Write samples of the model."""
        self._try(lambda sink: sink.write_samples(step, samples))

    def _try(self, write: Callable[[Sink], None]) -> None:
        if self._sink is None:
            return
        try:
            write(self._sink)
        # Trackers raise errors of many types; none of them may end a training run.
        except Exception as error:
            self._failures += 1
            self._report(error)
        else:
            if self._failures and self._catches_up:
                log.info("%s works again; no metrics are missing", self._name)
            self._failures = 0

    def rewind(self, step: int) -> None:
        """Rewind the sink to an earlier step, after a rollback."""
        try:
            if self._sink is not None:
                self._sink.rewind(step)
        except Exception as error:
            self._failures += 1
            self._report(error)

    def close(self, exit_code: int = 0) -> bool:
        """Close the sink. Later metrics are dropped.

        Args:
            exit_code: exit code of the run, for sinks that store it.

        Returns:
            False if metrics are lost.
        """
        # First: a sink that fails to close must not be written again.
        sink, self._sink = self._sink, None
        try:
            if sink is not None:
                sink.close(exit_code)
        except StorageError as error:
            log.error("%s", error)
            return False
        except Exception as error:
            log.warning("%s could not be closed: %s", self._name, _reason(error))
        return True

    def _report(self, error: Exception) -> None:
        # Once per series of failures: a full disk fails at every step.
        if self._failures == 1:
            log.warning("%s failed: %s. The run continues", self._name, _reason(error))
        if self._failures == PATIENCE and not self._catches_up:
            log.error("%s is disabled until the next start: it failed %d times in a row. Last "
                      "failure: %s", self._name, PATIENCE, _reason(error))  # fmt: skip
            self.close(Exit.ERROR.code)


def open_writers(
    console: Console,
    config: JobConfig,
    run_id: str,
    step: int,
    cost: StepCost | None = None,
    examples: int | None = None,
    live: LiveLine | None = None,
    *,
    repeats_evaluation: bool = False,
) -> list[MetricWriter]:
    """Open all sinks of `[metrics]`.

    Args:
        console: console for lines of metrics.
        config: the resolved config.
        run_id: id of the run in trackers.
        step: the step from which the run continues.
        cost: tokens and FLOPs of an update; by default, those of the config without samples.
        examples: sequences of the training data, for formats that print them.
        live: the live line of a terminal; None for plain lines.
        repeats_evaluation: whether the run repeats the evaluation of the step.

    Raises:
        UserError: the settings of a sink do not work.
        StorageError: `metrics.jsonl` cannot be read or changed.
    """
    metrics, train, run = config.metrics, config.train, mirror.files(config.checkpoint.dir)

    def jsonl_sink() -> Sink:
        path = run / "metrics.jsonl"
        return JsonlSink(path, step, repeats_evaluation=repeats_evaluation)

    def console_sink() -> Sink:
        if live is not None:
            live.begin(step, train.max_steps)
            return live
        facts = RunFacts(train.max_steps, train.seq_len, train.grad_accum_steps,
                         cost or StepCost.of(config, samples=0), examples)  # fmt: skip
        return LineSink(console, LINE_FORMATS[metrics.log_format](facts))

    trackers: dict[str, tuple[str, Callable[[], Sink]]] = {
        "tensorboard": ("TensorBoard", lambda: TensorBoardSink.of_run(run, step, config)),
        "wandb": ("W&B", lambda: WandbSink(run, config, run_id)),
        "mlflow": ("MLflow", lambda: MlflowSink(config, run_id)),
        "trackio": ("Trackio", lambda: TrackioSink(config, run_id)),
    }
    writers = [
        # First: without this record of the run, no other sink is opened.
        _open("metrics.jsonl", jsonl_sink, metrics.log_interval, catches_up=True),
        _open("the console", console_sink, metrics.log_interval),
    ]
    for key, (name, sink) in trackers.items():
        if settings := metrics.writer(key):
            writers.append(_open(name, sink, settings.interval or metrics.log_interval))
    return writers


def _open(
    name: str, sink: Callable[[], Sink], interval: int, *, catches_up: bool = False
) -> MetricWriter:
    # The writer exists everywhere, since its interval decides when all processes read metrics.
    if jax.process_index() != 0:
        return MetricWriter(name, None, interval)
    try:
        return MetricWriter(name, sink(), interval, catches_up=catches_up)
    except UserError:
        raise
    except Exception as error:
        # metrics.jsonl is the record of the run: without it, nothing is trained.
        if catches_up and isinstance(error, OSError):
            raise StorageError(f"{name} cannot be opened: {error}") from error
        log.error("%s is disabled until the next start: %s", name, _reason(error))
        return MetricWriter(name, None, interval)


def check_libraries(config: MetricsConfig) -> None:
    """Check that the libraries of all sinks are installed.

    Raises:
        UserError: a library is missing; the message says how to install it.
    """
    for key, library in _LIBRARIES.items():
        if config.writer(key) and importlib.util.find_spec(library) is None:
            raise UserError(
                f"{key} in metrics.writers needs {library}: pip install 'jaxforge[{key}]', or "
                "remove the writer"
            )


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
