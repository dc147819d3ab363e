"""Intervals and order of callbacks, and reasons to end a run."""

import contextlib
import types

from jaxforge.exit_codes import Exit
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
    return callbacks.run(callbacks.due(step), context)


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
