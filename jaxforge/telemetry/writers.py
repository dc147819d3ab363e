"""Sinks of metrics for TensorBoard, Weights & Biases, MLflow and Trackio."""

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxforge.cli.redaction import redacted, redacted_command, redacted_value
from jaxforge.config.job import JobConfig
from jaxforge.errors import UserError
from jaxforge.telemetry.sinks import Metrics, Sample, Sink, finite_numbers

if TYPE_CHECKING:
    from tensorboardX.proto.summary_pb2 import Summary
    from wandb import Run


_DIRECTORY = "tb_logs"


class TensorBoardSink(Sink):
    """A new event file for each start, written in the calling thread.

    The `SummaryWriter` of tensorboardX is not used: after a full disk has ended its thread, its
    queue blocks forever. In the calling thread, failures are visible.

    Args:
        directory: directory of the event files.
        resumed_step: the step from which the run continues; TensorBoard drops later steps of
            earlier files.
        config: the config of the run, written as text; None writes none.

    Raises:
        UserError: the directory cannot be written.
    """

    def __init__(self, directory: Path, resumed_step: int, config: JobConfig | None = None) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.summary import text

        self._event, self._summary, self._text = Event, Summary, text
        try:
            directory.mkdir(parents=True, exist_ok=True)
            # File names contain whole seconds; starts within one second have different process ids.
            self._file = EventsWriter(str(directory / "events"), f".{os.getpid()}")
        except OSError as error:
            raise UserError(
                f"tensorboard in metrics.writers: {directory}: {error.strerror}. Set "
                "its location to a directory that can be written"
            ) from error
        self._start = SessionLog(status=SessionLog.START)
        self.rewind(resumed_step)
        if config is not None:
            self._write_text("config", redacted(config.to_toml()), resumed_step)

    @classmethod
    def of_run(cls, run: Path, resumed_step: int, config: JobConfig) -> "TensorBoardSink":
        """Return the sink of a run that has this writer."""
        location = config.metrics.required_writer("tensorboard").location
        return cls(run / (location or _DIRECTORY), resumed_step, config)

    def write(self, step: int, metrics: Metrics) -> None:
        """Write one event with a scalar for each metric, and flush it."""
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in metrics.items()
            if not isinstance(value, list)
        ]
        self._write_summary(self._summary(value=values), step)

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Write a text for each prompt, named by its index."""
        for number, sample in enumerate(samples):
            self._write_text(f"samples/{number}", f"{sample.prompt}{sample.text}", step)

    def _write_text(self, name: str, text: str, step: int) -> None:
        """Write text verbatim: indented lines are code in TensorBoard's Markdown."""
        indented = "".join(f"    {line}\n" for line in text.splitlines())
        self._write_summary(self._text(name, indented), step)

    def _write_summary(self, summary: "Summary", step: int) -> None:
        self._file.write_event(self._event(wall_time=time.time(), step=step, summary=summary))
        self._file.flush()

    def rewind(self, step: int) -> None:
        """Make TensorBoard drop the events of later steps."""
        # A START event with a step purges events of earlier files from this step on.
        event = self._event(wall_time=time.time(), step=step + 1, session_log=self._start)
        self._file.write_event(event)
        self._file.flush()

    def close(self, exit_code: int) -> None:
        """Close the file."""
        self._file.close()


_UPLOAD_SECONDS = 60.0  # at the end of a run; `wandb sync` sends what remains


def _settings(config: JobConfig) -> dict[str, dict[str, Any]]:
    """Return the settings of a run by section, without secrets."""
    return redacted_value(config.model_dump(mode="json"))


_COLUMNS = list(Sample._fields)


def _rows(samples: Sequence[Sample]) -> list[list[str]]:
    """Return the rows of a table of samples."""
    return [list(sample) for sample in samples]


class WandbSink(Sink):
    """A run in W&B, continued by every restart; the axis is the step.

    W&B accepts each step once: steps that a resumed run repeats retain the values logged first.
    Files are in `<run>/wandb`. The environment variables of W&B apply (`WANDB_MODE`, ...).

    Args:
        run: the run directory.
        config: the config of the run, stored with the run in W&B.
        run_id: id of the run in W&B.

    Raises:
        UserError: W&B is not set up, or the user is unknown.
    """

    def __init__(self, run: Path, config: JobConfig, run_id: str) -> None:
        import wandb

        settings = config.metrics.required_writer("wandb")
        arguments = sys.argv
        try:
            sys.argv = shlex.split(redacted_command(arguments))  # W&B stores the command
            self._run: Run = wandb.init(
                project=settings.project,
                name=settings.run_name,
                id=run_id,
                resume="allow",
                dir=run,
                config=_settings(config),
                # A resumed run may have other settings.
                allow_val_change=True,
                # W&B must not capture the console, nor delay the end of a run without a network.
                settings=wandb.Settings(console="off", finish_timeout=_UPLOAD_SECONDS),
            )
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise UserError(
                f"wandb in metrics.writers: {error} Offline, set WANDB_MODE=offline"
            ) from error
        finally:
            # Also after a failure: other code reads the command line.
            sys.argv = arguments

    def write(self, step: int, metrics: Metrics) -> None:
        """Pass metrics to the process of W&B."""
        self._run.log(metrics, step=step)

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Log samples as a table."""
        import wandb

        self._run.log({"samples": wandb.Table(columns=[*_COLUMNS], data=_rows(samples))}, step=step)

    def close(self, exit_code: int) -> None:
        """End the run in W&B, after waiting at most a minute for uploads.

        Args:
            exit_code: 0 marks the run as finished, any other code as failed.
        """
        self._run.finish(exit_code)


_TAG = "jaxforge.run_id"
_LONGEST = 500  # characters of a parameter that every MLflow store takes
_PARAMS_AT_ONCE = 100  # MLflow's limit for one request


class MlflowSink(Sink):
    """One run in MLflow, continued by every restart; the axis is the step.

    Metrics of a list, such as tokens per expert, become one metric for each element. Numbers that
    are not finite are left out. MLflow's environment variables apply.

    Args:
        config: the run's config, whose settings become parameters of the run.
        run_id: identifier of the run, stored as the tag `jaxforge.run_id`.

    Raises:
        UserError: MLflow cannot use the store, the server refuses the experiment, or the run does
            not exist.
    """

    def __init__(self, config: JobConfig, run_id: str) -> None:
        from mlflow.entities import ViewType
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        settings = config.metrics.required_writer("mlflow")
        try:
            self._client = MlflowClient(tracking_uri=settings.location)
            name = settings.project
            # The client does not create experiments itself, unlike `mlflow.set_experiment`.
            known = self._client.get_experiment_by_name(name)
            experiment = known.experiment_id if known else self._client.create_experiment(name)
            if settings.run_id:
                run = self._client.get_run(settings.run_id)
            else:
                # MLflow chooses its own ids: the tag finds the run that an earlier start created.
                started = self._client.search_runs(
                    [experiment], f"tags.`{_TAG}` = '{run_id}'", ViewType.ACTIVE_ONLY, 1
                )
                run = next(iter(started), None) or self._client.create_run(
                    experiment, tags={_TAG: run_id}, run_name=settings.run_name
                )
        except (MlflowException, ImportError) as error:
            raise UserError(
                f"mlflow in metrics.writers: MLflow refuses: {error}. Set "
                "its location to the address of a server, or to a file such as "
                "\"sqlite:///mlflow.db\", which needs pip install 'jaxforge[mlflow]'"
            ) from error
        self.run_id: str = run.info.run_id
        self._client.update_run(self.run_id, status="RUNNING")
        self._log_settings(config, set(run.data.params))

    def _log_settings(self, config: JobConfig, known: set[str]) -> None:
        """Log the settings of a run that has none; MLflow does not change parameters later."""
        from mlflow.entities import Param

        values = _settings(config)
        params = [
            Param(f"{section}.{key}", str(value)[:_LONGEST])
            for section, table in values.items()
            for key, value in table.items()
            if f"{section}.{key}" not in known
        ]
        for start in range(0, len(params), _PARAMS_AT_ONCE):
            self._client.log_batch(self.run_id, params=params[start : start + _PARAMS_AT_ONCE])

    def write(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of a step or of an evaluation in one request."""
        from mlflow.entities import Metric

        # MLflow's unit of time.
        milliseconds = round(time.time() * 1000)
        points = [
            Metric(name, x, milliseconds, step) for name, x in finite_numbers(metrics).items()
        ]
        self._client.log_batch(self.run_id, metrics=points)

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Store the samples of a step as a JSON artifact."""
        rows = [sample._asdict() for sample in samples]
        self._client.log_dict(self.run_id, {"samples": rows}, f"samples/step_{step}.json")

    def close(self, exit_code: int) -> None:
        """End the run in MLflow as finished or failed."""
        self._client.set_terminated(self.run_id, "FAILED" if exit_code else "FINISHED")


class TrackioSink(Sink):
    """One run in Trackio, continued by every restart; the axis is the step.

    Metrics of a list, such as tokens per expert, become one metric for each element. Numbers that
    are not finite are left out. Trackio's environment variables apply (`TRACKIO_DIR`,
    `TRACKIO_SPACE_ID`, `TRACKIO_SERVER_URL`, ...). Trackio sends metrics in a thread of its own,
    and warns once of each kind of failure there.

    Args:
        config: the run's config, stored with the run without secrets.
        run_id: identifier of the run; Trackio continues the run with this name.

    Raises:
        UserError: Trackio refuses the project, the Space or the server, or no token is set up.
    """

    def __init__(self, config: JobConfig, run_id: str) -> None:
        import trackio
        from huggingface_hub.errors import LocalTokenNotFoundError

        settings = config.metrics.required_writer("trackio")
        # Trackio has no ids: the name must be unique for `resume` to find this run only.
        prefix = f"{settings.run_name}-" if settings.run_name else ""
        try:
            with _messages_on_stderr():
                self._run = trackio.init(
                    settings.project,
                    name=f"{prefix}{run_id}",
                    space_id=settings.location,
                    config=_settings(config),
                    resume="allow",
                    embed=False,
                    auto_log_gpu=False,  # the run has its own metrics of devices
                    auto_log_cpu=False,
                )
        except (ValueError, LocalTokenNotFoundError) as error:
            raise UserError(f"trackio in metrics.writers: Trackio refuses: {error}") from error

    def write(self, step: int, metrics: Metrics) -> None:
        """Pass metrics to the thread of Trackio."""
        self._run.log(finite_numbers(metrics), step=step)

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Log samples as a table."""
        import trackio

        self._run.log({"samples": trackio.Table(columns=_COLUMNS, data=_rows(samples))}, step=step)

    def close(self, exit_code: int) -> None:
        """Write all metrics, within half a minute; Trackio stores no exit state."""
        with _messages_on_stderr():
            self._run.finish()


@contextlib.contextmanager
def _messages_on_stderr() -> Iterator[None]:
    """Print messages of Trackio to standard error: standard output has the lines of metrics."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
