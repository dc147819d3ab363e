"""Work of the loop between two steps, and the mistakes of other loops there."""

import dataclasses

import jax
import pytest

from jaxforge.exit_codes import Exit
from jaxforge.state.progress import Progress
from jaxforge.telemetry import tracker
from jaxforge.training.callbacks.runner import Callbacks
from jaxforge.training.hooks import Hook
from tests.training.looking import Looking
from tests.training.observers import Capture, Sampler, Signals, run


def saves(events):
    return [int(event.split()[1]) for event in events if event.startswith("save ") and
            "hook" not in event]  # fmt: skip


def test_order_of_what_is_due():
    events, *_ = run(
        steps=3, log=2, evaluate=2, save=2, callbacks=[Looking, Sampler, Capture],
    )  # fmt: skip
    second = events[events.index("launch 2") : events.index("launch 3")]
    assert [event for event in second if not event.startswith("read")] == [
        "launch 2", "log 2 train", "hook 2", "eval begins 2", "evaluate from 0", "log 2 eval",
        "eval hook 2", "sample 2", "log 2 samples", "capture 2", "look 2", "save 2",
        "log 2 checkpoint", "save hook 2",
    ]  # fmt: skip


def test_step_whose_evaluation_was_stopped_is_sampled_when_that_goes_on():
    """A resumed run would write its samples again, and capture its activations."""
    events, reason, _ = run(steps=9, evaluate=2, stop_at=2, callbacks=[Sampler, Capture])
    assert reason is Exit.SIGNAL
    assert "evaluate from 0" in events
    assert not {"sample 2", "capture 2"} & set(events)


@pytest.mark.parametrize(("reason", "saved"), [(Exit.UNHEALTHY, []), (Exit.STRAGGLER, [2])])
def test_state_that_is_not_to_be_trusted_is_not_saved(reason, saved):
    events, ended, _ = run(steps=9, save=2, callbacks=[lambda e: Looking(e, reason)])
    assert ended is reason
    assert saves(events) == saved


def test_bad_step_is_evaluated_and_saved_where_that_is_due():
    """Its parameters are those of the last good step. KempnerForge leaves all of it out."""
    events, _, trainer = run(steps=3, evaluate=2, save=2, bad={2})
    assert {"hook 2", "eval hook 2", "save 2", "save hook 2"} <= set(events)
    assert trainer.progress.skipped == 1


@pytest.mark.parametrize("log", [1, 2, 4, 10, 100])
@pytest.mark.parametrize("due", [{}, {"evaluate": 1}, {"save": 4}, {"hooks": True}], ids=str)
def test_nothing_follows_the_step_that_ends_a_run(log, due):
    """Step 5 is the third bad one in a row; later steps are launched, and do not take place."""
    due = {"hooks": False, **due}
    events, reason, trainer = run(steps=20, log=log, bad={3, 4, 5}, callbacks=[Sampler], **due)
    effects = [e for e in events if not e.startswith(("read", "launch", "sink", "evaluate from"))]
    numbered = [int(part) for e in effects for part in e.split() if part.isdigit()]
    assert max(n for n in numbered if n != trainer.progress.tokens) <= 5
    assert reason is Exit.NON_FINITE
    assert trainer.progress.step == 5
    assert effects.count("log 5 train") == 1
    if due["hooks"]:
        assert [e for e in effects if e.startswith("hook")] == [f"hook {n}" for n in range(1, 6)]


def test_callbacks_that_wait_ignore_steps_that_did_not_take_place():
    """Step 5 ends the run; step 6, whose interval it is, is launched before that is known."""
    events, *_ = run(steps=20, log=100, hooks=False, bad={3, 4, 5}, callbacks=[Looking])
    assert "launch 6" in events
    assert [event for event in events if "look" in event] == ["look 2", "look 4"]


def test_run_that_has_ended_is_noticed_however_seldom_it_logs(monkeypatch):
    monkeypatch.setattr(tracker, "_MOST", 8)
    events, reason, _ = run(steps=100, log=10**6, hooks=False, bad={3, 4, 5})
    assert reason is Exit.NON_FINITE
    assert "launch 10" not in events
    assert "log 5 train" in events


def test_initial_weights_are_saved_where_the_window_says_so():
    window = {"checkpoint": {"dyn_ckpt_window": {"start": 0, "stop": 1}}}
    events, *_ = run(steps=3, sections=window)
    assert saves(events) == [0, 1, 3]
    assert events.index("save 0") < events.index("launch 1")
    assert 0 not in saves(run(steps=3)[0])


def test_evaluations_begin_where_they_are_told_to():
    events, *_ = run(steps=8, evaluate=2, sections={"eval": {"start_step": 4}})
    assert [event for event in events if "eval begins" in event] == [
        "eval begins 4", "eval begins 6", "eval begins 8",
    ]  # fmt: skip


def test_named_steps_draw_their_batch_and_are_left_out():
    """Counted from 1, as in Megatron."""
    events, _, trainer = run(steps=3, iterations_to_skip=(1, 3))
    launched = [event for event in events if event.startswith("launch")]
    assert launched == ["launch 1 left out", "launch 2", "launch 3 left out"]
    assert trainer.progress.samples == 3 * 8


def test_early_end_leaves_a_checkpoint():
    events, reason, _ = run(steps=9, log=1, sections={"early_stop": {"active": True,
                                                                     "max_steps": 4}})  # fmt: skip
    assert (reason, saves(events)) == (Exit.EARLY_STOPPED, [4])


def test_every_process_takes_part_in_saving_a_new_best(monkeypatch):
    """The textbook's other processes do not know the best, and would wait for one that saves."""
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    events, _, trainer = run(steps=7, evaluate=2, sections={"checkpoint": {"keep_best_n": 1}})
    assert saves(events) == [2, 7]  # steps 4 and 6 are as good, not better
    assert (trainer.progress.best_metric, trainer.progress.best_step) == (1.0, 2)


def test_saves_are_waited_for_when_a_run_fails():
    class Fails(Hook):
        def on_step_end(self, context):
            raise ZeroDivisionError

    events, _, trainer = run(steps=1)
    events.clear()
    failing = dataclasses.replace(trainer, callbacks=Callbacks([Fails()]), progress=Progress())
    with pytest.raises(ZeroDivisionError):
        failing.train(Signals())
    failing.close(None)
    assert events[-1] == "close"
