"""What reaches the terminal besides our own messages."""

import sys
import threading

import pytest
from rich.console import Console

from jaxforge.telemetry.console import setup_logging


@pytest.fixture
def reported(monkeypatch):
    """Exceptions that are reported as uncaught."""
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, place: seen.append(str(error)))
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
