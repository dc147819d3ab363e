"""Metrics as TensorBoard's event files."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from jaxforge.errors import UserError
from jaxforge.telemetry.sinks import Metrics, Sample


class TensorBoardSink:
    """A new event file per start, written as metrics come.

    Not through tensorboardX's `SummaryWriter`: its queue blocks for ever once its thread has died
    of a full disk. This writes in the caller's thread, where a failure can be seen.

    Args:
        directory: of the event files.
        resumed_step: the step that the run goes on from; TensorBoard forgets what earlier files
            say of later steps.

    Raises:
        UserError: the directory cannot be written.
    """

    def __init__(self, directory: Path, resumed_step: int) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.summary import text

        self._event, self._summary, self._text = Event, Summary, text
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

    def write(self, step: int, metrics: Metrics) -> None:
        """One event with a scalar per metric, on its way to the disk when this returns."""
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in metrics.items()
            if not isinstance(value, list)
        ]
        summary = self._summary(value=values)
        self._file.write_event(self._event(wall_time=time.time(), step=step, summary=summary))
        self._file.flush()

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """A text for each prompt, by its number."""
        for number, sample in enumerate(samples):
            self._write_text(f"samples/{number}", f"{sample.prompt}{sample.text}", step)

    def _write_text(self, name: str, text: str, step: int) -> None:
        """As it is: TensorBoard takes it for Markdown, where lines so indented are code."""
        indented = "".join(f"    {line}\n" for line in text.splitlines())
        summary = self._text(name, indented)
        self._file.write_event(self._event(wall_time=time.time(), step=step, summary=summary))
        self._file.flush()

    def rewind(self, step: int) -> None:
        """Has TensorBoard forget what was written of later steps."""
        event = self._event(wall_time=time.time(), step=step + 1, session_log=self._start)
        self._file.write_event(event)
        self._file.flush()

    def close(self, exit_code: int) -> None:
        """Closes the file."""
        self._file.close()
