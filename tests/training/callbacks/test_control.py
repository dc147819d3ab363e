"""Requests of callbacks: saves, evaluations and stops, agreed among processes."""

import contextlib
import json

import jax
import numpy as np
import pytest

from jaxforge.errors import UserError
from jaxforge.exit_codes import Exit
from jaxforge.training.callbacks import control, runner
from jaxforge.training.callbacks.callback import Callback
from jaxforge.training.callbacks.control import Control, Requests
from jaxforge.training.callbacks.evaluation import Evaluation
from jaxforge.training.callbacks.runner import Callbacks
from tests.training.looking import Looking
from tests.training.observers import run


def requester(event, at, request):
    """Return the maker of a callback that makes a request in an event of step `at`."""

    class Requester(Callback):
        def __init__(self, events):
            self.events = events

        def on_step_end(self, context):
            self._request("on_step_end", context.step, context.control)

        def on_eval_end(self, metrics, step, context):
            assert context.state.step is not None
            self._request("on_eval_end", step, context.control)

        def _request(self, name, step, control):
            if (name, step) == (event, at):
                request(control)

    return Requester


def named(events, *prefixes):
    return [event for event in events if event.startswith(prefixes)]


def test_requested_save_takes_place_after_step():
    make = requester("on_step_end", 3, Control.request_save)
    events, reason, _ = run(steps=5, callbacks=[make])
    assert named(events, "save ") == ["save 3", "save hook 3", "save 5", "save hook 5"]
    assert reason is Exit.COMPLETED


def test_requested_evaluation_takes_place_after_step():
    make = requester("on_step_end", 3, Control.request_evaluation)
    events, *_ = run(steps=5, evaluate=4, callbacks=[make])
    expected = ["eval begins 3", "eval hook 3", "eval begins 4", "eval hook 4"]
    assert named(events, "eval begins", "eval hook") == expected


def test_requested_evaluation_is_not_repeated():
    make = requester("on_step_end", 4, Control.request_evaluation)
    events, *_ = run(steps=5, evaluate=4, callbacks=[make])
    assert named(events, "eval begins") == ["eval begins 4"]


@pytest.mark.parametrize(("event", "at"), [("on_step_end", 3), ("on_eval_end", 4)])
def test_requested_stop_saves_and_ends_with_code(event, at):
    make = requester(event, at, lambda control: control.request_stop(7))
    events, reason, _ = run(steps=9, evaluate=4, callbacks=[make])
    assert (reason.code, reason.is_agreed) == (7, True)
    assert named(events, "save ") == [f"save {at}", f"save hook {at}"]
    assert events[-2].startswith(f"end {at} ")
    assert events[-1] == "sink closed, code 7"


def test_stop_after_requested_evaluation_takes_effect_at_once():
    evaluation = requester("on_step_end", 2, Control.request_evaluation)
    stop = requester("on_eval_end", 2, lambda control: control.request_stop())
    events, reason, _ = run(steps=9, callbacks=[evaluation, stop])
    assert reason is Exit.requested(0)
    assert "launch 3" not in events


@pytest.mark.parametrize(
    ("error", "code"),
    [(SystemExit(), 0), (SystemExit(3), 3), (SystemExit("no"), 1), (SystemExit(256 + 5), 5)],
    ids=["none", "code", "message", "large"],
)
def test_system_exit_of_callback_saves(error, code):
    def leave(control):
        raise error

    events, reason, _ = run(steps=9, callbacks=[requester("on_step_end", 2, leave)])
    assert reason.code == code
    assert named(events, "save ") == ["save 2", "save hook 2"]
    assert "hook 2" in events  # later callbacks still see the event


def test_system_exit_of_interval_saves():
    class Leaves(Looking):
        def on_interval(self, context):
            raise SystemExit(9)

    events, reason, _ = run(steps=9, callbacks=[Leaves])
    assert reason.code == 9
    assert named(events, "save ") == ["save 2", "save hook 2"]


def test_request_before_first_step_takes_effect_before_it():
    class Leaves(Callback):
        def __init__(self, events):
            pass

        def on_compiled(self, steps):
            raise SystemExit(4)

    events, reason, _ = run(steps=9, callbacks=[Leaves])
    assert reason.code == 4
    assert not named(events, "launch")


def test_requests_after_halt_change_nothing():
    """Step 5 halts the run. Step 6, after which the request is made, did not take place."""
    make = requester("on_interval", 6, Control.request_evaluation)

    class Asks(make):
        every, waits = 6, False

        def on_interval(self, context):
            context.control.request_evaluation()
            context.control.request_save()

    Asks.on_step_end = Callback.on_step_end
    events, reason, _ = run(steps=20, hooks=False, bad={3, 4, 5}, callbacks=[Asks])
    assert reason is Exit.NON_FINITE
    assert not named(events, "save ", "evaluate")


def test_evaluation_without_data_is_refused():
    with pytest.raises(UserError, match=r"requested an evaluation, but eval.enabled = false. Set"):
        Callbacks([]).evaluate(None)


@pytest.mark.parametrize("code", [-1, 256])
def test_invalid_exit_code_is_refused(code):
    with pytest.raises(UserError, match=rf"request_stop\({code}\): an exit code must be an int"):
        Control().request_stop(code)


@pytest.mark.parametrize(
    ("others", "agreed"),
    [
        ([[0, 0, -1]], Requests(save=True)),
        ([[0, 1, -1]], Requests(save=True, evaluation=True)),
        ([[0, 0, 3], [0, 0, 0]], Requests(save=True, exit_code=3)),
    ],
)
def test_requests_of_any_process_count_for_all(monkeypatch, others, agreed):
    monkeypatch.setattr(jax, "process_count", lambda: 1 + len(others))
    gather = lambda own: np.stack([own, *map(np.array, others)])  # noqa: E731
    monkeypatch.setattr(control.multihost_utils, "process_allgather", gather)
    own = Control()
    own.request_save()
    assert own.agree() == agreed
    assert own.take() == Requests()


def test_processes_agree_only_at_common_steps(monkeypatch):
    """A process without requests must call the collective as often as the others."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    asked = []
    monkeypatch.setattr(
        control.multihost_utils, "process_allgather", lambda own: np.stack([own, own])
    )
    users, ours = Callbacks([Looking([])]), Callbacks([])
    paused = contextlib.nullcontext
    for step in range(1, 21):
        due = users.due(step) if step == 4 else []
        users.control.request_save()
        if users.requests(step, due, paused).save:
            asked.append(step)
        ours.control.request_save()
        assert ours.requests(step, [], paused) == Requests()
    assert asked == [4, 10, 20]
    evaluation = object.__new__(Evaluation)
    users.control.request_save()
    assert users.requests(21, [evaluation], paused).save
    users.control.request_save()
    assert users.requests(21, [], paused, is_forced=True).save


def test_callback_of_one_process_causes_no_collective_that_the_other_lacks(monkeypatch):
    """Both processes agree after every tenth step, whichever has the callback."""
    gathered = ['[["Looking", "1"]]', "[]"]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(runner.agreement, "gather", lambda _: gathered)
    monkeypatch.setattr(
        control.multihost_utils, "process_allgather", lambda own: np.stack([own, own])
    )
    collectives = []
    for callbacks in (Callbacks([Looking([])]), Callbacks([])):
        callbacks.compare_processes()
        collectives.append([])
        for step in range(1, 21):
            due = callbacks.due(step)
            callbacks.control.request_save()
            if callbacks.requests(step, due, contextlib.nullcontext).save:
                collectives[-1].append(step)
    assert collectives == [[10, 20], [10, 20]]


def test_events_of_steps_evaluations_and_checkpoints_are_called():
    class Notes(Callback):
        def __init__(self, events):
            self.events = events

        def on_step_begin(self, step):
            self.events.append(f"step begins {step}")

        def on_eval_step(self, name, batch, step):
            self.events.append(f"eval step {name} {batch} {step}")

        def on_checkpoint_durable(self, step, path):
            self.events.append(f"durable {step} {path}")

    events, *_ = run(steps=3, evaluate=2, save=2, callbacks=[Notes])
    noted = named(events, "step begins", "launch", "eval step", "save hook", "durable")
    assert noted == [
        "step begins 1", "launch 1", "step begins 2", "launch 2", "save hook 2", "eval step a 0 2",
        "step begins 3", "launch 3", "durable 2 step_2", "save hook 3", "durable 3 step_3",
    ]  # fmt: skip


def test_two_argument_eval_end_is_still_called():
    class Old(Callback):
        def __init__(self, events):
            self.events = events

        def on_eval_end(self, metrics, step):
            self.events.append(f"old {json.dumps(metrics)} {step}")

    events, *_ = run(steps=2, evaluate=2, callbacks=[Old])
    assert 'old {"eval/loss": 1.0} 2' in events
