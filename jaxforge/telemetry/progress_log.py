"""`progress.txt`: jobs, checkpoints and their throughput, in the format of Megatron.

Process 0 appends a line for each event, with fields separated by tabs:

    2026-08-22 12:00:00  Job ID: 4711  # GPUs: 8  Starting job
    2026-08-22 12:10:00  Job ID: 4711  # GPUs: 8  Saved checkpoint  Iteration: 100
        Job throughput: 51.2 MODEL_TFLOP/s/GPU  Cumulative throughput: 49.8 MODEL_TFLOP/s/GPU
        Floating-point operations: 2.46e+17  Tokens (in billions): 0.01
    2026-08-22 12:20:00  Job ID: 4711  # GPUs: 8  Saving async checkpoint  Iteration: 200  …
    2026-08-22 12:20:30  Job ID: 4711  # GPUs: 8  Saved async checkpoint  Iteration: 200

Throughput is model FLOPs (with causal attention) per second of wall-clock time and device. Setup,
evaluation and checkpoints count as time. The throughput of the job is measured since this process
started. The cumulative throughput is measured since the first job on the same number of devices,
including the time between restarts.
Source: Megatron-LM and Megatron-Bridge, `compute_throughputs_and_append_to_progress_log`.
"""

import datetime
import logging
import os
import time
from pathlib import Path

from jaxforge.storage.line_file import LineFile

log = logging.getLogger(__name__)

NAME = "progress.txt"
_TIME = "%Y-%m-%d %H:%M:%S"


class ProgressLog:
    """Appends lines to the file. Lines that cannot be written are retried with the next line.

    Args:
        path: the file.
        n_devices: number of devices of the job.
        flops: model FLOPs of the run before this job.
    """

    def __init__(self, path: Path, n_devices: int, flops: float) -> None:
        self._path, self._n_devices, self._flops = path, n_devices, flops
        self._lines = LineFile(path)
        # The clock of the job must not jump; starts of other jobs are only known as wall-clock
        # times.
        self._started = time.monotonic()
        # Before the search below, which then finds this job if there is no earlier one.
        self.append("Starting job")
        self._first_start, self._first_flops = self._first_job(flops)

    def append(self, *fields: str) -> None:
        """Append a line with an event and its fields."""
        now = datetime.datetime.now().strftime(_TIME)
        job = f"Job ID: {os.environ.get('SLURM_JOB_ID', '')}"
        line = "\t".join((now, job, f"# GPUs: {self._n_devices}", *fields))
        try:
            self._lines.append(line)
        except OSError as error:
            log.warning("cannot write to %s: %s. The run continues", self._path, error.strerror)

    def close(self) -> None:
        """Make all lines durable.

        Raises:
            StorageError: lines are lost.
        """
        self._lines.close()

    def append_checkpoint(self, event: str, step: int, flops: float, tokens: int) -> None:
        """Append a line about a checkpoint.

        Args:
            event: "Saved checkpoint" or "Saving async checkpoint".
            step: step of the checkpoint.
            flops: model FLOPs of the run up to the checkpoint.
            tokens: tokens of the run up to the checkpoint.
        """
        job = self._rate(flops - self._flops, time.monotonic() - self._started)
        since_first = datetime.datetime.now() - self._first_start
        cumulative = self._rate(flops - self._first_flops, since_first.total_seconds())
        self.append(
            event,
            f"Iteration: {step}",
            f"Job throughput: {job:.1f} MODEL_TFLOP/s/GPU",
            f"Cumulative throughput: {cumulative:.1f} MODEL_TFLOP/s/GPU",
            f"Floating-point operations: {flops:.2e}",
            f"Tokens (in billions): {tokens / 1e9:.2f}",
        )

    def _first_job(self, flops: float) -> tuple[datetime.datetime, float]:
        """Return start and previous FLOPs of the first job on the same number of devices."""
        # Times in the file are whole seconds.
        now = datetime.datetime.now().replace(microsecond=0)
        try:
            start, done = start_time_and_flops(self._path, self._n_devices)
        except (OSError, ValueError) as error:
            log.warning("cumulative throughput starts with this job: %s", error)
            return now, flops
        # FLOPs in the file are rounded to three digits; the error may exceed those of this job.
        return (start, done) if start < now else (start, flops)

    def _rate(self, flops: float, seconds: float) -> float:
        """Return TFLOP/s per device; 0 if no time has passed or the clock was set back."""
        return flops / (seconds * 1e12 * self._n_devices) if seconds > 0 else 0.0


def start_time_and_flops(path: Path, n_devices: int) -> tuple[datetime.datetime, float]:
    """Return the start of the first job on a number of devices, and the FLOPs before it.

    A job on another number of devices restarts the search. FLOPs are those of the last saved
    checkpoint; an asynchronous checkpoint counts when it is saved. Invalid lines are ignored with a
    warning.

    Args:
        path: a `progress.txt` of Megatron or of jaxforge.
        n_devices: number of devices of the job.

    Raises:
        ValueError: there is no such job.
        OSError: the file cannot be read.
    """
    start: tuple[datetime.datetime, float] | None = None
    flops, being_saved = 0.0, dict[int, float]()
    text = path.read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(text.splitlines(), 1):
        try:
            when, devices, event, fields = _parse(line)
            if event in ("Saved checkpoint", "Saving async checkpoint"):
                being_saved[int(fields["Iteration"])] = float(fields["Floating-point operations"])
            if event in ("Saved checkpoint", "Saved async checkpoint"):
                # "Saved async checkpoint" has no FLOPs: they are in the line of its beginning.
                flops = being_saved.pop(int(fields["Iteration"]), flops)
        except (ValueError, KeyError):
            log.warning("%s:%d is not a line of a progress log: ignored", path, number)
            continue
        # As in Megatron: throughputs of jobs of different sizes are not comparable.
        if devices != n_devices:
            start = None
        elif event == "Starting job" and start is None:
            start = when, flops
    if start is None:
        raise ValueError(f'{path} has no "Starting job" on {n_devices} devices')
    return start


def _parse(line: str) -> tuple[datetime.datetime, int, str, dict[str, str]]:
    """Return time, devices, event and the other fields by name.

    Raises:
        ValueError: the line has another format.
    """
    when, _, devices, event, *pairs = line.split("\t")
    fields = dict(field.split(": ", 1) for field in pairs)
    return (
        datetime.datetime.strptime(when, _TIME),
        int(devices.removeprefix("# GPUs: ")),
        event,
        fields,
    )
