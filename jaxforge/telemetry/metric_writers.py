"""Sinks with their intervals, and what happens when one fails: the run continues.

Every process has the same writers, for they decide when metrics are read; only process 0 has the
sinks behind them.
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
from jaxforge.telemetry.line_formats import LINE_FORMATS, RunFacts
from jaxforge.telemetry.live_line import LiveLine
from jaxforge.telemetry.measures import StepCost
from jaxforge.telemetry.mlflow import MlflowSink
from jaxforge.telemetry.sinks import JsonlSink, LineSink, Metrics, Sample, Sink
from jaxforge.telemetry.tensorboard import TensorBoardSink
from jaxforge.telemetry.wandb import WandbSink

log = logging.getLogger(__name__)

_LIBRARIES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}
"""Extra of jaxforge -> module of its library."""
PATIENCE = 3
"""Failures in a row after which a sink is switched off."""


class MetricWriter:
    """Sink that is written at an interval, and whose failures do not stop the run.

    Args:
        name: for messages.
        sink: None where there is nothing to write to.
        interval: steps between writes.
        catches_up: the sink keeps what it cannot write for later, and is never switched off.
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
        """Writes, or says why it could not."""
        self._try(lambda sink: sink.write(step, metrics))

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Write samples of the model."""
        self._try(lambda sink: sink.write_samples(step, samples))

    def _try(self, write: Callable[[Sink], None]) -> None:
        if self._sink is None:
            return
        try:
            write(self._sink)
        except Exception as error:
            self._failures += 1
            self._tell(error)
        else:
            if self._failures and self._catches_up:
                log.info("%s takes metrics again; none is missing", self._name)
            self._failures = 0

    def rewind(self, step: int) -> None:
        """Tells the sink that the run continues from an earlier step."""
        try:
            if self._sink is not None:
                self._sink.rewind(step)
        except Exception as error:
            self._failures += 1
            self._tell(error)

    def close(self, exit_code: int = 0) -> bool:
        """Close the sink, which may keep the run's exit code. Later metrics are dropped.

        Returns:
            False if the sink has lost metrics that it should have kept.
        """
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

    def _tell(self, error: Exception) -> None:
        if self._failures == 1:
            log.warning("%s takes no metrics: %s; the run continues", self._name, _reason(error))
        if self._failures == PATIENCE and not self._catches_up:
            log.error("%s is switched off until the next start: it failed %d times in a row, "
                      "lastly with %s", self._name, PATIENCE, _reason(error))  # fmt: skip
            self.close(Exit.ERROR.code)


def open_writers(
    console: Console,
    config: JobConfig,
    run_id: str,
    step: int,
    cost: StepCost | None = None,
    examples: int | None = None,
    live: LiveLine | None = None,
) -> list[MetricWriter]:
    """Open all sinks of `[metrics]`.

    Args:
        console: where the user looks.
        config: the run's.
        run_id: names the run in W&B.
        step: the step that the run continues from.
        cost: what an update takes, for lines that say so.
        examples: sequences of the training data, for the same lines.
        live: the line of a terminal; None where there are plain lines.

    Raises:
        UserError: a sink cannot work as it is set up.
        StorageError: `metrics.jsonl` cannot be read or changed.
    """
    metrics, train, run = config.metrics, config.train, mirror.files(config.checkpoint.dir)

    def watched() -> Sink:
        if live is not None:
            live.begin(step, train.max_steps)
            return live
        facts = RunFacts(train.max_steps, train.seq_len, train.grad_accum_steps,
                         cost or StepCost.of(config, samples=0), examples)  # fmt: skip
        return LineSink(console, LINE_FORMATS[metrics.log_format](facts))

    def writer(
        name: str,
        sink: Callable[[], Sink],
        interval: int | None = None,
        *,
        catches_up: bool = False,
    ) -> MetricWriter:
        return _open(name, sink, interval or metrics.log_interval, catches_up=catches_up)

    writers = [
        writer("metrics.jsonl", lambda: JsonlSink(run / "metrics.jsonl", step), catches_up=True),
        writer("the console", watched),
    ]
    if metrics.enable_tensorboard:
        events = run / metrics.tensorboard_dir
        interval = metrics.tensorboard_interval
        writers.append(
            writer("TensorBoard", lambda: TensorBoardSink(events, step, config), interval)
        )
    if metrics.enable_wandb:
        interval = metrics.wandb_interval
        writers.append(writer("W&B", lambda: WandbSink(run, config, run_id), interval))
    if metrics.enable_mlflow:
        interval = metrics.mlflow_interval
        writers.append(writer("MLflow", lambda: MlflowSink(config, run_id), interval))
    return writers


def _open(
    name: str, sink: Callable[[], Sink], interval: int, *, catches_up: bool = False
) -> MetricWriter:
    if jax.process_index() != 0:
        return MetricWriter(name, None, interval)
    try:
        return MetricWriter(name, sink(), interval, catches_up=catches_up)
    except UserError:
        raise
    except Exception as error:
        if catches_up and isinstance(error, OSError):
            raise StorageError(f"{name} of the run cannot be opened: {error}") from error
        log.error("%s gets no metrics until the next start: %s", name, _reason(error))
        return MetricWriter(name, None, interval)


def check_libraries(config: MetricsConfig) -> None:
    """Refuses, before anything is done, sinks whose library is not installed.

    Raises:
        UserError: names the library and what installs it.
    """
    for key, library in _LIBRARIES.items():
        if getattr(config, f"enable_{key}") and importlib.util.find_spec(library) is None:
            raise UserError(
                f"metrics.enable_{key} = true needs {library}: pip install 'jaxforge[{key}]', "
                f"or set metrics.enable_{key} = false"
            )


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
