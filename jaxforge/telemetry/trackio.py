"""Metrics in Trackio."""

import contextlib
import sys
from collections.abc import Iterator, Sequence

from jaxforge.cli.redaction import redacted_value
from jaxforge.config.job import JobConfig
from jaxforge.errors import UserError
from jaxforge.telemetry.sinks import Metrics, Sample, finite_numbers


class TrackioSink:
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
        prefix = f"{settings.run_name}-" if settings.run_name else ""
        try:
            with _messages_on_stderr():
                self._run = trackio.init(
                    settings.project,
                    name=f"{prefix}{run_id}",
                    space_id=settings.location,
                    config=redacted_value(config.model_dump(mode="json")),
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

        rows = [list(sample) for sample in samples]
        self._run.log(
            {"samples": trackio.Table(columns=list(Sample._fields), data=rows)}, step=step
        )

    def rewind(self, step: int) -> None:
        """Do nothing: Trackio keeps every point, and plots those of a step in the order of time."""

    def close(self, exit_code: int) -> None:
        """Write all metrics, within half a minute; Trackio stores no exit state."""
        with _messages_on_stderr():
            self._run.finish()


@contextlib.contextmanager
def _messages_on_stderr() -> Iterator[None]:
    """Print messages of Trackio to standard error: standard output has the lines of metrics."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
