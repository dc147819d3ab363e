"""Detection of slow hosts, and noise that does not count."""

import logging
import types

import numpy as np
import pytest

from jaxforge.config.metrics import MetricsConfig
from jaxforge.exit_codes import Exit
from jaxforge.telemetry.tracker import HostTimes
from jaxforge.training.callbacks import speed
from jaxforge.training.callbacks.speed import Report, Stragglers, describe
from tests.training.callbacks.contexts import after


def report(data_wait, launch=0.0, step=1.0):
    wait = np.array(data_wait)
    return Report(wait, np.full(len(wait), launch), np.full(len(wait), step))


@pytest.mark.parametrize(
    ("times", "slow"),
    [
        (report([0.2, 0.2, 0.5, 0.2]), [2]),
        (report([0.2, 0.2, 0.27, 0.2]), []),  # 0.74 of the fastest
        (report([0.2, 0.2, 0.29, 0.2]), [2]),  # 0.69
        (report([0.001, 0.001, 0.09, 0.001]), []),  # noise within a step of a second
        (report([0.001, 0.001, 0.09, 0.001], step=0.8), [2]),
        (report([0.3, 0.9], launch=0.1), [1]),
        (report([0.0, 0.0]), []),
        (report([0.5]), []),
    ],
)
def test_slow_hosts_are_detected(times, slow):
    assert np.flatnonzero(times.slow).tolist() == slow


def test_report_names_the_slow_host():
    times = report([0.01, 0.01, 0.41, 0.01], launch=0.02)
    (level, spread), (warning, slow) = describe(times, times.slow, ["a", "b", "c", "d"])
    assert (level, warning) == (logging.INFO, logging.WARNING)
    assert spread == (
        "seconds per step, min/median/max of 4 hosts: data wait 0.0100/0.0100/0.4100, "
        "launch 0.0200/0.0200/0.0200, step 1.0000/1.0000/1.0000"
    )
    assert slow == (
        "host 2 (c) is slow: per step it waits 0.4100 s for data and launches in 0.0200 s; "
        "score 0.07, z-score 1.7"
    )


@pytest.mark.parametrize("stop", [True, False])
def test_slow_host_ends_run_only_if_enabled(monkeypatch, messages, stop):
    messages.set_level(logging.WARNING, "jaxforge")
    clock = iter([HostTimes(100, 50, 9), HostTimes(110, 51, 10), HostTimes(120, 56, 11)])
    fast_host = np.array([1.0, 0.1, 0.1], np.float32)

    def gathered(mine):
        return np.stack([mine, fast_host if mine.dtype == np.float32 else mine])

    monkeypatch.setattr(speed.multihost_utils, "process_allgather", gathered)
    monkeypatch.setattr(speed.socket, "gethostname", lambda: "node17")
    config = MetricsConfig(straggler_report_interval=10, stop_if_detected_straggler=stop)
    check = Stragglers(config)
    check.on_compiled(None)
    tracker = types.SimpleNamespace(host_times=lambda: next(clock))
    assert check.on_interval(after(10, tracker=tracker)) is None  # these steps include the setup
    assert check.on_interval(after(20, tracker=tracker)) is None
    assert not messages.messages
    assert check.on_interval(after(30, tracker=tracker)) is (Exit.STRAGGLER if stop else None)
    assert messages.messages[0].startswith(
        "step 30: host 0 (node17) is slow: per step it waits 0.5"
    )
    assert ("Exiting program due to straggler detection." in messages.messages) == stop
