"""`progress.txt`: jobs, checkpoints and their throughput, in Megatron's grammar.

A line per event, appended by process 0, fields parted by tabs:

    2026-08-22 12:00:00  Job ID: 4711  # GPUs: 8  Starting job
    2026-08-22 12:10:00  Job ID: 4711  # GPUs: 8  Saved checkpoint  Iteration: 100
        Job throughput: 51.2 MODEL_TFLOP/s/GPU  Cumulative throughput: 49.8 MODEL_TFLOP/s/GPU
        Floating-point operations: 2.46e+17  Tokens (in billions): 0.01
    2026-08-22 12:20:00  Job ID: 4711  # GPUs: 8  Saving async checkpoint  Iteration: 200  …
    2026-08-22 12:20:30  Job ID: 4711  # GPUs: 8  Saved async checkpoint  Iteration: 200

Throughput is model FLOPs (attention looks back only) per second of wall-clock time and device:
set-up, evaluation and checkpoints count. That of the job is since this process started, the
cumulative one since the first job on as many devices, the time between its restarts included.
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
    """Appends to the file; a line that cannot be written waits for the next one, and stops nothing.

    Args:
        path: the file.
        n_devices: of the whole job.
        flops: model FLOPs done before this job.
    """

    def __init__(self, path: Path, n_devices: int, flops: float) -> None:
        self._path, self._n_devices, self._flops = path, n_devices, flops
        self._lines = LineFile(path)
        self._started = time.monotonic()
        self.append("Starting job")
        self._first_start, self._first_flops = self._first_job(flops)

    def append(self, *fields: str) -> None:
        """Writes a line: the event, and what belongs to it."""
        now = datetime.datetime.now().strftime(_TIME)
        job = f"Job ID: {os.environ.get('SLURM_JOB_ID', '')}"
        line = "\t".join((now, job, f"# GPUs: {self._n_devices}", *fields))
        try:
            self._lines.append(line)
        except OSError as error:
            log.warning("%s takes no lines: %s; the run continues", self._path, error.strerror)

    def close(self) -> None:
        """Make all lines durable.

        Raises:
            StorageError: lines are lost.
        """
        self._lines.close()

    def append_checkpoint(self, event: str, step: int, flops: float, tokens: int) -> None:
        """Writes "Saved checkpoint" or "Saving async checkpoint".

        Args:
            event: which of them.
            step: of the checkpoint.
            flops: model FLOPs of the whole run up to it.
            tokens: of the whole run up to it.
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
        """Start of the first job on as many devices as this one, and FLOPs done before it."""
        now = datetime.datetime.now().replace(microsecond=0)
        try:
            start, done = start_time_and_flops(self._path, self._n_devices)
        except (OSError, ValueError) as error:
            log.warning("cumulative throughput begins with this job: %s", error)
            return now, flops
        # The file has three digits, which may be more than this job will ever do.
        return (start, done) if start < now else (start, flops)

    def _rate(self, flops: float, seconds: float) -> float:
        """TFLOP/s per device; 0 where no time has passed, or a clock was set back."""
        return flops / (seconds * 1e12 * self._n_devices) if seconds > 0 else 0.0


def start_time_and_flops(path: Path, n_devices: int) -> tuple[datetime.datetime, float]:
    """When the first job on this many devices started, and the FLOPs of checkpoints before it.

    Jobs on other numbers of devices begin the search anew. An asynchronous checkpoint counts once
    it is saved. Lines that do not follow the grammar are passed over with a warning.

    Args:
        path: a `progress.txt`, Megatron's own or ours.
        n_devices: devices of the job.

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
                flops = being_saved.pop(int(fields["Iteration"]), flops)
        except (ValueError, KeyError):
            log.warning("%s:%d is not a line of a progress log: passed over", path, number)
            continue
        if devices != n_devices:
            start = None
        elif event == "Starting job" and start is None:
            start = when, flops
    if start is None:
        raise ValueError(f'{path} has no "Starting job" on {n_devices} devices')
    return start


def _parse(line: str) -> tuple[datetime.datetime, int, str, dict[str, str]]:
    """Time, devices, event and the other fields by name.

    Raises:
        ValueError: it is not such a line.
    """
    when, _, devices, event, *pairs = line.split("\t")
    fields = dict(field.split(": ", 1) for field in pairs)
    return (
        datetime.datetime.strptime(when, _TIME),
        int(devices.removeprefix("# GPUs: ")),
        event,
        fields,
    )
