"""Intervals and order of callbacks, and reasons to end a run."""

import contextlib
import types

import jax
import pytest

from jaxforge.errors import UserError
from jaxforge.exit_codes import Exit
from jaxforge.training.callbacks import runner
from jaxforge.training.callbacks.callback import Callback
from jaxforge.training.callbacks.runner import Callbacks
from tests.training.callbacks.contexts import after


class Acts(Callback):
    def __init__(self, name, every, events, reason=None, waits=True):
        self.name, self.every, self.events, self.reason = name, every, events, reason
        self.waits = waits

    def on_interval(self, context):
        self.events.append(f"{self.name} {context.step}")
        return self.reason


def act(callbacks, step, events):
    """Run the callbacks that are due after a step; pauses of the clock are events."""

    @contextlib.contextmanager
    def paused():
        events.append("pause")
        yield
        events.append("continue")

    context = after(step, tracker=types.SimpleNamespace(paused=paused))
    return callbacks.run(callbacks.due(step, paused), context)


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets, in seconds."""
    now = types.SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(runner, "time", types.SimpleNamespace(monotonic=lambda: now.seconds))
    return now


def test_callbacks_act_at_their_interval_in_order():
    events = []
    both = Callbacks([Acts("a", 2, events), Acts("b", 3, events, waits=False)])
    assert [act(both, step, events) for step in range(1, 7)] == [None] * 6
    assert events == [
        "pause", "a 2", "continue", "b 3", "pause", "a 4", "continue",
        "pause", "a 6", "continue", "b 6",
    ]  # fmt: skip


def test_no_callback_acts_after_exit_reason():
    events = []
    first = Acts("a", 1, events, reason=Exit.UNHEALTHY, waits=False)
    assert act(Callbacks([first, Acts("b", 1, events)]), 7, events) is Exit.UNHEALTHY
    assert events == ["a 7"]


def test_callbacks_without_an_interval_never_act():
    events = []
    nothing = Callbacks([Acts("a", None, events), Acts("b", 0, events)])
    assert [act(nothing, step, events) for step in range(5)] == [None] * 5
    assert events == []


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("1.5m", 90), ("2 h", 7200)])
def test_durations_count_from_first_step(clock, text, seconds):
    events = []
    callbacks = Callbacks([Acts("a", text, events, waits=False)])
    clock.seconds += 5 * seconds  # compilation
    callbacks.start_clock()
    for step, later in enumerate([0.5, 0.4, 0.2, 0.8, 0.2, 3.0, 0.9, 0.2], 1):
        clock.seconds += later * seconds  # since the last call: .5, .9, 1.1; .8, 1.; 3.; .9, 1.1
        act(callbacks, step, events)
    assert events == ["a 3", "a 5", "a 6", "a 8"]


def test_processes_follow_clock_of_process_zero(clock, monkeypatch):
    """The clock of this process is ignored; ten seconds are over on the clock of process 0."""
    events, sent = [], []
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def from_first(verdicts):
        sent.append(verdicts.tolist())
        return verdicts * 0 + 1

    monkeypatch.setattr(runner.multihost_utils, "broadcast_one_to_all", from_first)
    callbacks = Callbacks([Acts("a", "10s", events, waits=False)])
    for step in range(1, 21):
        act(callbacks, step, events)
    assert events == ["pause", "continue", "a 10", "pause", "continue", "a 20"]
    assert sent == [[0], [0]]


@pytest.mark.parametrize("text", ["10", "m", "10 min", "-1s", "0m", ""])
def test_invalid_duration_raises(text):
    with pytest.raises(UserError, match=r'Acts.every = ".*" is not a duration. Write a number and'):
        Callbacks([Acts("a", text, [])])
