"""Console output of other libraries."""

import contextlib
import os
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console

from jaxforge.commands import train
from jaxforge.exit_codes import Exit
from jaxforge.telemetry.console import setup_logging
from tests.conftest import tiny_config
from tests.helpers import devices_here


@pytest.fixture
def reported(monkeypatch):
    """Exceptions that are reported as uncaught."""
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, location: seen.append(str(error)))
    setup_logging(Console())
    return seen


def report(text):
    error = RuntimeError(text)
    sys.excepthook(type(error), error, None)


def test_threads_with_nobody_left_to_report_to_are_silent(reported):
    """TensorStore's, once a save has failed; whatever else fails is reported."""
    for text in ("Event loop is closed", "something else"):
        thread = threading.Thread(target=report, args=(text,))
        thread.start()
        thread.join()
    report("Event loop is closed")  # in the main thread it is somebody's mistake
    assert reported == ["something else", "Event loop is closed"]


def test_setting_up_twice_changes_nothing(reported):
    hook = sys.excepthook
    setup_logging(Console())
    assert sys.excepthook is hook


def test_run_goes_on_without_a_reader_of_its_output(tmp_path, monkeypatch):
    """Readers disappear as in `train ... 2>&1 | head`, or the log's disk is full."""
    read, write = os.pipe()
    os.close(read)
    config = tiny_config(train={"max_steps": 3, "batch_size": 1}, checkpoint={"dir": str(tmp_path)},
                         metrics={"log_interval": 1})  # fmt: skip
    unflushed = contextlib.suppress(OSError)
    with devices_here(1), open(write, "w") as pipe, unflushed, Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", pipe)
        monkeypatch.setattr(sys, "stderr", full)
        reason = train.run(config)
    assert reason is Exit.COMPLETED
    assert (tmp_path / "checkpoints" / "step_3").is_dir()
    log = (tmp_path / "logs" / "process_0.log").read_text()
    assert log.count("standard output cannot be written (Broken pipe). The process continues") == 1
    assert "Training complete: 3 steps" in log
