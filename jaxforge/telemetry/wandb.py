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

_UPLOAD_SECONDS = 60.0  # at the end of a run; what is left then can be sent with `wandb sync`


class WandbSink:
    """One run in W&B, continued by every restart; the axis is the step.

    W&B takes each step once: those that a resumed run repeats keep what was logged first. Files
    are in `<run>/wandb`. `WANDB_MODE`, `WANDB_ENTITY` and the rest of W&B's environment hold.

    Args:
        run: the run directory.
        config: the run's; W&B keeps it with the run.
        run_id: the id in W&B.

    Raises:
        UserError: W&B is not set up, or knows no such user.
    """

    def __init__(self, run: Path, config: JobConfig, run_id: str) -> None:
        import wandb

        given = sys.argv
        try:
            sys.argv = shlex.split(redacted_command(given))  # W&B keeps the command with the run
            self._run: Run = wandb.init(
                project=config.metrics.wandb_project,
                name=config.metrics.wandb_run_name,
                id=run_id,
                resume="allow",
                dir=run,
                config=redacted_value(config.model_dump(mode="json")),
                allow_val_change=True,
                # The console is ours, and a network that is down must not hold the end of a run.
                settings=wandb.Settings(console="off", finish_timeout=_UPLOAD_SECONDS),
            )
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise UserError(
                f"metrics.enable_wandb = true: {error} Offline, set WANDB_MODE=offline"
            ) from error
        finally:
            sys.argv = given

    def write(self, step: int, metrics: Metrics) -> None:
        """Hands the metrics to W&B's own process."""
        self._run.log(metrics, step=step)

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """A table."""
        import wandb

        rows = [list(sample) for sample in samples]
        self._run.log({"samples": wandb.Table(columns=list(Sample._fields), data=rows)}, step=step)

    def rewind(self, step: int) -> None:
        """Nothing can be done: W&B goes on where the run passes the step that it was at."""

    def close(self, exit_code: int) -> None:
        """Ends the run in W&B, waiting a minute at most for what is still to be sent.

        With 0 its state there is "finished", else "failed".
        """
        self._run.finish(exit_code)
