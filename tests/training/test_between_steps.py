"""Actions of the loop between two steps, with known mistakes of other loops."""

import jax
import pytest

from jaxforge.exit_codes import Exit
from jaxforge.telemetry import tracker
from jaxforge.training.callbacks.callback import Callback
from tests.training.looking import Looking
from tests.training.observers import Capture, Sampler, Signals, restarted, run


def saves(events):
    return [int(event.split()[1]) for event in events if event.startswith("save ") and
            "hook" not in event]  # fmt: skip


def test_due_actions_follow_order():
    events, *_ = run(
        steps=3, log=2, evaluate=2, save=2, callbacks=[Looking, Sampler, Capture],
    )  # fmt: skip
    second = events[events.index("launch 2") : events.index("launch 3")]
    assert [event for event in second if not event.startswith("read")] == [
        "launch 2", "log 2 train", "hook 2", "eval begins 2", "evaluate from 0", "log 2 eval",
        "eval hook 2", "sample 2", "log 2 samples", "capture 2", "look 2", "save 2",
        "log 2 checkpoint", "save hook 2",
    ]  # fmt: skip


def test_samples_wait_for_stopped_evaluation():
    """Otherwise a resumed run would repeat samples and captures."""
    events, reason, _ = run(steps=9, evaluate=2, stop_at=2, callbacks=[Sampler, Capture])
    assert reason is Exit.SIGNAL
    assert "evaluate from 0" in events
    assert not {"sample 2", "capture 2"} & set(events)


@pytest.mark.parametrize(("reason", "saved"), [(Exit.UNHEALTHY, []), (Exit.STRAGGLER, [2])])
def test_untrusted_state_is_not_saved(reason, saved):
    events, ended, _ = run(steps=9, save=2, callbacks=[lambda e: Looking(e, reason)])
    assert ended is reason
    assert saves(events) == saved


def test_bad_step_is_evaluated_and_saved_if_due():
    """The parameters are those of the last good step. KempnerForge skips these actions."""
    events, _, trainer = run(steps=3, evaluate=2, save=2, bad={2})
    assert {"hook 2", "eval hook 2", "save 2", "save hook 2"} <= set(events)
    assert trainer.position.progress.skipped == 1


@pytest.mark.parametrize("log", [1, 2, 4, 10, 100])
@pytest.mark.parametrize("due", [{}, {"evaluate": 1}, {"save": 4}, {"hooks": True}], ids=str)
def test_no_action_follows_halting_step(log, due):
    """Step 5 is the third bad step in a row; later steps are launched, but change nothing."""
    due = {"hooks": False, **due}
    events, reason, trainer = run(steps=20, log=log, bad={3, 4, 5}, callbacks=[Sampler], **due)
    effects = [e for e in events if not e.startswith(("read", "launch", "sink", "evaluate from"))]
    numbered = [int(part) for e in effects for part in e.split() if part.isdigit()]
    assert max(n for n in numbered if n != trainer.position.progress.tokens) <= 5
    assert reason is Exit.NON_FINITE
    assert trainer.position.progress.step == 5
    assert effects.count("log 5 train") == 1
    if due["hooks"]:
        assert [e for e in effects if e.startswith("hook")] == [f"hook {n}" for n in range(1, 6)]


def test_waiting_callbacks_ignore_steps_after_halt():
    """Step 5 halts the run; step 6, where the callback is due, is launched before that is known."""
    events, *_ = run(steps=20, log=100, hooks=False, bad={3, 4, 5}, callbacks=[Looking])
    assert "launch 6" in events
    assert [event for event in events if "look" in event] == ["look 2", "look 4"]


def test_halt_is_noticed_without_frequent_logging(monkeypatch):
    monkeypatch.setattr(tracker, "MOST", 8)
    events, reason, _ = run(steps=100, log=10**6, hooks=False, bad={3, 4, 5})
    assert reason is Exit.NON_FINITE
    assert "launch 10" not in events
    assert "log 5 train" in events


def test_initial_weights_are_saved_within_window():
    window = {"checkpoint": {"dyn_ckpt_window": {"start": 0, "stop": 1}}}
    events, *_ = run(steps=3, sections=window)
    assert saves(events) == [0, 1, 3]
    assert events.index("save 0") < events.index("launch 1")
    assert 0 not in saves(run(steps=3)[0])


def test_evaluations_start_at_start_step():
    events, *_ = run(steps=8, evaluate=2, sections={"eval": {"start_step": 4}})
    assert [event for event in events if "eval begins" in event] == [
        "eval begins 4", "eval begins 6", "eval begins 8",
    ]  # fmt: skip


def test_skipped_iterations_consume_their_batch():
    """Iterations count from 1, as in Megatron."""
    events, _, trainer = run(steps=3, iterations_to_skip=(1, 3))
    launched = [event for event in events if event.startswith("launch")]
    assert launched == ["launch 1 left out", "launch 2", "launch 3 left out"]
    assert trainer.position.progress.samples == 3 * 8


def test_early_stop_saves_checkpoint():
    events, reason, _ = run(steps=9, log=1, sections={"early_stop": {"max_steps": 4}})
    assert (reason, saves(events)) == (Exit.EARLY_STOPPED, [4])


def test_every_process_saves_a_new_best(monkeypatch):
    """If only process 0 knew the best metric, the others would wait forever in the save."""
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    events, _, trainer = run(steps=7, evaluate=2, sections={"checkpoint": {"keep_best_n": 1}})
    assert saves(events) == [2, 7]  # steps 4 and 6 are equally good
    assert (trainer.position.progress.best_metric, trainer.position.progress.best_step) == (1.0, 2)


def test_failed_run_waits_for_saves():
    class Fails(Callback):
        def on_step_end(self, context):
            raise ZeroDivisionError

    events, _, trainer = run(steps=1)
    events.clear()
    failing = restarted(trainer, [Fails()])
    with pytest.raises(ZeroDivisionError):
        failing.train(Signals())
    failing.close(None)
    assert events[-1] == "close"
