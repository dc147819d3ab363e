"""Sink of metrics for TensorBoard: event files."""

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


_DIRECTORY = "tb_logs"


class TensorBoardSink:
    """A new event file for each start, written in the calling thread.

    The `SummaryWriter` of tensorboardX is not used: after a full disk has ended its thread, its
    queue blocks forever. In the calling thread, failures are visible.

    Args:
        directory: directory of the event files.
        resumed_step: the step from which the run continues; TensorBoard drops later steps of
            earlier files.
        config: the config of the run, written as text and as hyperparameters; None writes neither.

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
            compared = dict.fromkeys(_COMPARED_BY, 0.0)
            experiment, started, self._ended = hparams(hyperparameters(config), compared)
            self._write_summary(experiment, resumed_step)
            self._write_summary(started, resumed_step)

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
        event = self._event(wall_time=time.time(), step=step + 1, session_log=self._start)
        self._file.write_event(event)
        self._file.flush()

    def close(self, exit_code: int) -> None:
        """Close the file, and mark a successful run as a finished session."""
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
"""Hyperparameters in sections of which only some keys are compared."""


def hyperparameters(config: JobConfig) -> dict[str, bool | float | str]:
    """Return the hyperparameters by which runs are compared, without keys that are not set."""
    keys = {
        **_HYPERPARAMETERS,
        **{name: tuple(type(getattr(config, name)).model_fields) for name in _WHOLE_SECTIONS},
    }
    values = {
        f"{section}.{key}": getattr(getattr(config, section), key)
        for section, names in keys.items()
        for key in names
    }
    return {
        name: value if isinstance(value, bool | int | float) else redacted(str(value))
        for name, value in values.items()
        if value is not None
    }
