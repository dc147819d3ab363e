"""Metrics as TensorBoard's event files."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxforge.cli.redaction import redacted
from jaxforge.config.job import JobConfig
from jaxforge.errors import UserError
from jaxforge.telemetry.sinks import Metrics, Sample

if TYPE_CHECKING:
    from tensorboardX.proto.summary_pb2 import Summary


class TensorBoardSink:
    """A new event file per start, written as metrics come.

    Not through tensorboardX's `SummaryWriter`: its queue blocks for ever once its thread has died
    of a full disk. This writes in the caller's thread, where a failure can be seen.

    Args:
        directory: of the event files.
        resumed_step: the step that the run continues from; TensorBoard forgets what earlier files
            say of later steps.
        config: the run's: a text, and hyperparameters to compare runs by; None writes neither.

    Raises:
        UserError: the directory cannot be written.
    """

    def __init__(self, directory: Path, resumed_step: int, config: JobConfig | None = None) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.summary import hparams, text

        self._event, self._summary, self._text = Event, Summary, text
        self._ended: Summary | None = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            # Names have whole seconds; two starts within one second are two processes.
            self._file = EventsWriter(str(directory / "events"), f".{os.getpid()}")
        except OSError as error:
            raise UserError(
                f"metrics.tensorboard_dir: {directory}: {error.strerror}; name a directory that "
                "can be written"
            ) from error
        self._start = SessionLog(status=SessionLog.START)
        self.rewind(resumed_step)
        if config is not None:
            self._write_text("config", redacted(config.to_toml()), resumed_step)
            compared = dict.fromkeys(_COMPARED_BY, 0.0)
            experiment, started, self._ended = hparams(hyperparameters(config), compared)
            self._write_summary(experiment, resumed_step)
            self._write_summary(started, resumed_step)

    def write(self, step: int, metrics: Metrics) -> None:
        """One event with a scalar per metric, on its way to the disk when this returns."""
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in metrics.items()
            if not isinstance(value, list)
        ]
        self._write_summary(self._summary(value=values), step)

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """A text for each prompt, by its number."""
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
        """Has TensorBoard forget what was written of later steps."""
        event = self._event(wall_time=time.time(), step=step + 1, session_log=self._start)
        self._file.write_event(event)
        self._file.flush()

    def close(self, exit_code: int) -> None:
        """Closes the file; a run that ended well is a finished session."""
        if exit_code == 0 and self._ended is not None:
            self._write_summary(self._ended, 0)
        self._file.close()


_COMPARED_BY = ("train/loss", "eval/loss")
_WHOLE_SECTIONS = ("optimizer", "scheduler")
_HYPERPARAMETERS = {
    "model": ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "num_experts"),
    "train": ("seq_len", "max_steps", "batch_size", "global_batch_size", "grad_accum_steps",
              "grad_clip_norm", "mixed_precision", "seed"),
}  # fmt: skip
"""Of other sections, the keys to compare runs by."""


def hyperparameters(config: JobConfig) -> dict[str, bool | float | str]:
    """Return the hyperparameters that runs are compared by; keys that are not set are left out."""
    keys = {
        **_HYPERPARAMETERS,
        **{name: tuple(type(getattr(config, name)).model_fields) for name in _WHOLE_SECTIONS},
    }
    values = {
        f"{section}.{key}": getattr(getattr(config, section), key)
        for section, of_section in keys.items()
        for key in of_section
    }
    return {
        name: value if isinstance(value, bool | int | float) else redacted(str(value))
        for name, value in values.items()
        if value is not None
    }
