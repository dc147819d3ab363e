"""Console output of other libraries."""

import contextlib
import os
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console

from jaxforge.exit_codes import Exit
from jaxforge.telemetry.console import setup_logging
from jaxforge.training import launch
from tests.conftest import tiny_config
from tests.helpers import devices_here


@pytest.fixture
def reported(monkeypatch):
    """List of uncaught exceptions."""
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, location: seen.append(str(error)))
    setup_logging(Console())
    return seen


def report(text):
    error = RuntimeError(text)
    sys.excepthook(type(error), error, None)


def test_threads_with_closed_loop_are_silent(reported):
    """Threads of TensorStore fail so after a failed save; other failures are reported."""
    for text in ("Event loop is closed", "something else"):
        thread = threading.Thread(target=report, args=(text,))
        thread.start()
        thread.join()
    report("Event loop is closed")  # a bug in the main thread
    assert reported == ["something else", "Event loop is closed"]


def test_setup_twice_equals_setup_once(reported):
    hook = sys.excepthook
    setup_logging(Console())
    assert sys.excepthook is hook


def test_run_continues_without_reader_of_output(tmp_path, monkeypatch):
    """The reader may end as in `train ... 2>&1 | head`, or the disk of the log may be full."""
    read, write = os.pipe()
    os.close(read)
    config = tiny_config(train={"max_steps": 3, "batch_size": 1}, checkpoint={"dir": str(tmp_path)},
                         metrics={"log_interval": 1})  # fmt: skip
    unflushed = contextlib.suppress(OSError)
    with devices_here(1), open(write, "w") as pipe, unflushed, Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", pipe)
        monkeypatch.setattr(sys, "stderr", full)
        reason = launch.fit(config)
    assert reason is Exit.COMPLETED
    assert (tmp_path / "checkpoints" / "step_3").is_dir()
    log = (tmp_path / "logs" / "process_0.log").read_text()
    assert log.count("standard output cannot be written (Broken pipe). The process continues") == 1
    assert "Training complete: 3 steps" in log
