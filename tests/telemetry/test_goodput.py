"""Account of a process' time, with a fake clock."""

import contextlib
import types

import pytest

from jaxforge.state.progress import Progress
from jaxforge.telemetry.goodput import (
    CATEGORIES,
    DESCRIPTIONS,
    ActivityClock,
    Attempt,
    account,
    goodput_metrics,
    ratio,
)
from jaxforge.telemetry.measures import StepCost
from jaxforge.telemetry.metric_writers import MetricWriter
from jaxforge.telemetry.tracker import Tracker
from jaxforge.training.health.watchdog import Limits, Watchdog
from tests.telemetry.recording import RecordingSink, scalars


class FakeTime:
    now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def time(monkeypatch):
    time = FakeTime()
    monkeypatch.setattr(
        "jaxforge.telemetry.goodput.time", types.SimpleNamespace(perf_counter=time.perf_counter)
    )
    return time


def nonzero(seconds):
    return {name: value for name, value in seconds.items() if value}


def test_innermost_block_counts_and_outer_block_is_paused(time):
    clock = ActivityClock(since=90.0)
    time.now += 1
    with clock.during("other"):
        time.now += 2
        with clock.during("save"):
            time.now += 4
        time.now += 8
    with contextlib.suppress(KeyError), clock.during("data_wait"):
        time.now += 16
        raise KeyError
    time.now += 32
    expected = {"start": 10 + 1 + 32, "other": 2 + 8, "save": 4, "data_wait": 16}
    assert nonzero(clock.attempt()) == expected
    assert clock.current == "start"


def test_steps_up_to_the_furthest_are_rework(time):
    clock = ActivityClock()
    clock.continue_from({"step": 1000.0, "down": 50.0}, furthest=12)
    clock.begin_steps(10)
    for step in (11, 12, 13, 14):
        time.now += step
        clock.launched(step)
    assert nonzero(clock.attempt()) == {"rework": 11 + 12, "step": 13 + 14}
    assert nonzero(clock.run()) == {"rework": 23, "step": 1027, "down": 50}
    clock.begin_steps(10)  # after a rollback
    time.now += 5
    clock.launched(11)
    time.now += 6
    assert clock.attempt()["rework"] == 23 + 5 + 6
    assert (clock.step, clock.furthest) == (11, 14)


def test_sections_and_pauses_of_a_run_are_attributed_once(time):
    """Watchdog and tracker of a run have the same clock."""
    watchdog, sink = Watchdog(Limits(0, 0), since=time.now), RecordingSink()
    clock = watchdog.clock
    writers = [MetricWriter("a", sink, 1)]
    tracker = Tracker(writers, StepCost(100), Progress(), 10**9, clock=clock)
    time.now += 1
    with watchdog.section("data"):
        time.now += 2
    with watchdog.naming("restoring a checkpoint"):
        time.now += 4
    with watchdog.naming("loading data"):
        time.now += 8
    with watchdog.naming("compiling"):
        time.now += 16
    tracker.start_clock()
    for step in (1, 2):
        with tracker.waiting_for_data():
            time.now += 32
        time.now += 64
        tracker.end_step(step, scalars(step))
        watchdog.tick(step)
    with tracker.paused():
        time.now += 128
        with watchdog.section("checkpoint"):
            time.now += 256
            with watchdog.naming("rolling back"):
                time.now += 512
        with watchdog.section("evaluation"), watchdog.naming("sampling"):
            time.now += 1024
    with watchdog.section("end"):
        time.now += 2048
    seconds = clock.attempt()
    assert nonzero(seconds) == {
        "start": 1 + 2 + 8, "restore": 4, "compile": 16, "data_wait": 64, "step": 128,
        "other": 128 + 2048, "save": 256, "rollback": 512, "evaluation": 1024,
    }  # fmt: skip
    assert sum(seconds.values()) == time.now - 100.0
    line = sink.lines[1]  # written at the launch of step 2
    assert line["goodput/total_sec"] == 1 + 2 + 4 + 8 + 16 + 2 * (32 + 64)
    assert (line["goodput/step_sec"], line["goodput/data_wait_sec"]) == (128, 64)
    assert "goodput/save_sec" not in line


def test_account_has_the_time_between_attempts():
    attempts = [
        Attempt(0.0, 10.0, 4, {"start": 6.0, "step": 4.0}),
        Attempt(25.0, 30.0, 6, {"step": 5.0}, code=75),
        Attempt(31.0, 32.0, 6, {"step": 1.0}, code=0),
        Attempt(132.0, 133.0, 7, {"rework": 1.0}, code=0),
        Attempt(132.5, 134.0, 7, {"step": 1.5}),  # clocks of two hosts differ
    ]
    total = account(attempts)
    assert nonzero(total) == {"start": 6, "step": 11.5, "rework": 1, "down": 16, "idle": 100}
    assert ratio(total) == pytest.approx(11.5 / 34.5)
    assert nonzero(account(attempts[:1], until=12.0)) == {"start": 6, "step": 4, "down": 2}
    assert goodput_metrics(account(attempts[:1])) == {
        "goodput/ratio": 0.4, "goodput/total_sec": 10.0, "goodput/start_sec": 6.0,
        "goodput/step_sec": 4.0,
    }  # fmt: skip
    assert ratio({}) == 0.0


def test_every_category_has_a_description():
    assert tuple(DESCRIPTIONS) == CATEGORIES
