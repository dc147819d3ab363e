"""Metrics in Weights & Biases."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxforge.cli.redaction import redacted_command, redacted_value
from jaxforge.config.job import JobConfig
from jaxforge.errors import UserError
from jaxforge.telemetry.sinks import Metrics, Sample

if TYPE_CHECKING:
    from wandb import Run

_UPLOAD_SECONDS = 60.0  # at the end of a run; `wandb sync` sends what remains


class WandbSink:
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
                config=redacted_value(config.model_dump(mode="json")),
                allow_val_change=True,
                # W&B must not capture the console, nor delay the end of a run without a network.
                settings=wandb.Settings(console="off", finish_timeout=_UPLOAD_SECONDS),
            )
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise UserError(
                f"wandb in metrics.writers: {error} Offline, set WANDB_MODE=offline"
            ) from error
        finally:
            sys.argv = arguments

    def write(self, step: int, metrics: Metrics) -> None:
        """Pass metrics to the process of W&B."""
        self._run.log(metrics, step=step)

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Log samples as a table."""
        import wandb

        rows = [list(sample) for sample in samples]
        self._run.log({"samples": wandb.Table(columns=list(Sample._fields), data=rows)}, step=step)

    def rewind(self, step: int) -> None:
        """Do nothing: W&B accepts metrics again once the run passes its latest step."""

    def close(self, exit_code: int) -> None:
        """End the run in W&B, after waiting at most a minute for uploads.

        Args:
            exit_code: 0 marks the run as finished, any other code as failed.
        """
        self._run.finish(exit_code)
