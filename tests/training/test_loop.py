"""The order of events in the loop, recorded by fakes."""

import contextlib
import dataclasses
import logging
import re

import jax
import numpy as np
import pytest

from jaxforge.errors import StorageError, UserError
from jaxforge.exit_codes import Exit
from jaxforge.state.progress import Progress
from jaxforge.step.train_step import CompiledSteps
from jaxforge.telemetry.measures import StepCost
from jaxforge.telemetry.metric_writers import MetricWriter
from jaxforge.telemetry.tracker import Tracker
from jaxforge.training.callbacks.callback import Callback
from jaxforge.training.callbacks.runner import Callbacks
from jaxforge.training.updates import Updates
from tests.conftest import tiny_config
from tests.helpers import random_batches, setup
from tests.training.observers import (
    Recorder,
    Signals,
    Sink,
    data,
    instruments,
    restarted,
    run,
    saver,
    trainer_of,
)


def test_metrics_are_read_one_step_late_if_due():
    events, _, _ = run(steps=7, log=3, hooks=False)
    assert events[:11] == [
        "launch 1", "launch 2", "read 1", "log 1 train", "launch 3", "launch 4", "read 2",
        "read 3", "log 3 train", "launch 5", "launch 6",
    ]  # fmt: skip
    assert events[events.index("launch 7") :][:5] == [
        "launch 7", "read 4", "read 5", "read 6", "log 6 train",
    ]  # fmt: skip


def test_silent_steps_read_nothing_from_device():
    events, _, _ = run(steps=50, log=1000, hooks=True)
    until_the_end = events[: events.index("launch 50")]
    assert [e for e in until_the_end if e.startswith("read")] == ["read 1"]


def test_step_has_fixed_order_of_events():
    events, reason, _ = run(steps=4, log=2, evaluate=2, save=2)
    second = events[events.index("launch 2") : events.index("launch 3")]
    assert [e for e in second if not e.startswith("read")] == [
        "launch 2", "log 2 train", "hook 2", "save 2", "log 2 checkpoint", "save hook 2",
        "eval begins 2", "evaluate from 0", "log 2 eval", "eval hook 2",
    ]  # fmt: skip
    assert reason is Exit.COMPLETED
    assert events[0] == "begin"
    third = events[events.index("launch 3") : events.index("launch 4")]
    assert third[-2:] == ["hook 3", "log 3 checkpoint"]  # the save after step 2 is durable
    assert events[-6:] == [
        "wait", "amend 4", "log 4 checkpoint", "close", "end 4 1024 Exit.COMPLETED",
        "sink closed, code 0",
    ]  # fmt: skip


def test_last_step_is_saved_once():
    events, _, _ = run(steps=5, save=2)
    assert [e for e in events if e.startswith("save ") and "hook" not in e] == [
        "save 2", "save 4", "save 5",
    ]  # fmt: skip
    events, _, _ = run(steps=4, save=2)
    assert events.count("save 4") == 1


class Epochs(Callback):
    def __init__(self, events):
        self.events = events

    def on_epoch_begin(self, epoch):
        self.events.append(f"epoch {epoch} begins")

    def on_epoch_end(self, epoch, context):
        self.events.append(f"epoch {epoch} ends, {context.step}")
        if epoch == 3:
            context.control.request_save()


@pytest.mark.parametrize(
    ("epoch", "expected"),
    [
        (20, ["1 begins", "1 ends, 3", "2 begins", "2 ends, 5", "3 begins"]),
        (5, ["1 begins", "1 ends, 1", "2 begins", "2 ends, 2", "3 begins", "3 ends, 2"]),
        (None, []),
    ],
)
def test_callbacks_learn_of_epochs_of_the_data(epoch, expected):
    steps = 2 if epoch == 5 else 6  # of 8 sequences
    events, *_ = run(steps=steps, callbacks=[Epochs], hooks=False, epoch=epoch)
    assert [e.removeprefix("epoch ") for e in events if e.startswith("epoch")] == expected


def test_epoch_events_surround_steps():
    events, *_ = run(steps=6, callbacks=[Epochs], epoch=16)
    order = [e for e in events if e.startswith(("epoch", "launch", "hook", "save "))]
    assert order[order.index("launch 6") :] == [
        "launch 6", "hook 6", "epoch 3 ends, 6", "save 6", "save hook 6",
    ]  # fmt: skip
    assert order[:2] == ["epoch 1 begins", "launch 1"]


def test_checkpoints_are_due_by_steps_and_by_epochs():
    def saved(**keys):
        events, *_ = run(steps=12, save=5, hooks=False, epoch=20, sections={"checkpoint": keys})
        return [int(e.split()[1]) for e in events if re.fullmatch(r"save \d+", e)]

    assert saved(epoch_interval=1) == [3, 5, 8, 10, 12]  # epochs end at 2.5, 5, 7.5 and 10 steps
    assert saved(epoch_interval=2) == [5, 10, 12]
    assert saved() == [5, 10, 12]


def test_signal_saves_and_stops():
    events, reason, trainer = run(steps=10, stop_at=3)
    assert reason is Exit.SIGNAL
    assert "save 3" in events
    assert "launch 4" not in events
    assert trainer.position.progress.step == 3


def test_bad_steps_count_as_attempted_but_not_as_tokens():
    _, _, trainer = run(steps=6, bad={2, 5})
    assert (trainer.position.progress.step, trainer.position.progress.skipped) == (6, 2)
    assert trainer.position.progress.tokens == 4 * 256
    assert trainer.position.progress.samples == 6 * 8


def test_too_many_bad_steps_end_run_unsaved():
    events, reason, _ = run(steps=20, log=1, save=6, bad={4, 5, 6})
    assert reason is Exit.NON_FINITE
    assert not [e for e in events if e.startswith("save")]


def test_failed_step_calls_on_train_end():
    class Fails(Callback):
        def on_step_end(self, context):
            raise ZeroDivisionError

    events = []
    trainer = run(steps=1)[2]
    trainer = restarted(trainer, [Fails(), Recorder(events)])
    with pytest.raises(ZeroDivisionError):
        trainer.train(Signals())
    trainer.close(None)
    assert events == ["begin", "end 1 256 None"]


def test_sinks_receive_exit_code():
    assert run(steps=10, stop_at=3)[0][-1] == "sink closed, code 75"
    assert run(steps=20, log=1, bad={4, 5, 6})[0][-1] == "sink closed, code 65"


@pytest.mark.parametrize("error", [ZeroDivisionError(), UserError(), StorageError()])
@pytest.mark.parametrize("at_the_end", [False, True])
def test_sinks_receive_exit_code_of_failure(error, at_the_end):
    class Fails(Callback):
        def on_train_end(self, step, tokens_seen, reason):
            if at_the_end:
                raise error

    events, (_, reason, trainer) = [], run(steps=1)
    tracker = Tracker([MetricWriter("it", Sink(events), 100)], StepCost(256, 8), Progress(), 10**9)
    trainer = dataclasses.replace(
        trainer, instruments=instruments(trainer.config, tracker), callbacks=Callbacks([Fails()])
    )
    try:
        if not at_the_end:
            reason = None
            raise error
    except type(error):
        trainer.close(reason)
    else:  # a failed write at the end is an orderly end, since other processes wait for this one
        lost = isinstance(error, StorageError)
        with contextlib.nullcontext() if lost else pytest.raises(type(error)):
            assert trainer.close(reason) is Exit.STORAGE
    code = {ZeroDivisionError: 1, UserError: 2, StorageError: 74}[type(error)]
    assert events == [f"sink closed, code {code}"]


def test_failing_callback_does_not_stop_later_callbacks_at_end():
    class Loses(Callback):
        def on_train_end(self, step, tokens_seen, reason):
            raise StorageError("a line is lost")

    events, (_, reason, trainer) = [], run(steps=1)
    callbacks = Callbacks([Loses(), Recorder(events)])
    assert dataclasses.replace(trainer, callbacks=callbacks).close(reason) is Exit.STORAGE
    assert events == ["end 1 256 Exit.COMPLETED"]


def test_failing_callback_at_end_names_checkpoint(caplog, monkeypatch):
    class Fails(Callback):
        def on_train_end(self, step, tokens_seen):  # as in KempnerForge
            events.append(f"end {step} {tokens_seen}")
            raise ZeroDivisionError

    monkeypatch.setattr(logging.getLogger("jaxforge"), "propagate", True)
    events, (_, reason, trainer) = [], run(steps=1)
    with pytest.raises(ZeroDivisionError):
        dataclasses.replace(trainer, callbacks=Callbacks([Fails()])).close(reason)
    assert events == ["end 1 256"]
    (message,) = {text for text in caplog.messages if text.startswith("Fails.on_train_end")}
    assert " failed after the end of training (finished: max" in message
    assert "; the last checkpoint is complete: step_1. Correct" in message


def test_callback_that_exits_at_end_sets_exit_code():
    class Exits(Callback):
        def on_train_end(self, step, tokens_seen, reason):
            raise SystemExit(self.code)

    _, reason, trainer = run(steps=1)
    for Exits.code in (3, 0):
        ended = dataclasses.replace(trainer, callbacks=Callbacks([Exits()])).close(reason)
        assert ended.code == Exits.code


def test_lost_metrics_end_run_with_storage_code(caplog):
    class Lossy(Sink):
        def close(self, exit_code):
            super().close(exit_code)
            raise StorageError("metrics.jsonl lacks the last 3 lines")

    events, (_, reason, trainer) = [], run(steps=1)
    writers = [
        MetricWriter(name, sink, 100) for name, sink in (("a", Lossy(events)), ("b", Sink(events)))
    ]
    tracker = Tracker(writers, StepCost(256, 8), Progress(), 10**9)
    assert reason is Exit.COMPLETED
    lossy = instruments(trainer.config, tracker)
    assert dataclasses.replace(trainer, instruments=lossy).close(reason) is Exit.STORAGE
    assert events[-2:] == ["sink closed, code 0", "sink closed, code 74"]


def test_hook_reads_scalars_state_and_gradients():
    seen = []

    class Reads(Callback):
        collect = ("grads",)

        def on_step_end(self, context):
            norm = np.sqrt(sum(float((g**2).sum()) for g in jax.tree.leaves(context.gradients)))
            seen.append((context.loss, context.grad_norm, norm, context.lr, context.state))

    callbacks = Callbacks([Reads()])
    assert callbacks.collect == ("grads",)
    ours = setup(tiny_config(train={"max_steps": 2}), collect=callbacks.collect)
    trainer = trainer_of(
        ours.config, ours.state(), Progress(),
        Updates(
            lambda batch: lambda: CompiledSteps({ours.config.train.grad_accum_steps: ours.step}),
            data(ours.config, lambda: map(ours.put, random_batches(ours.config, 2))),
        ),
        saver(ours.config, []), callbacks,
        instruments(ours.config, Tracker([], StepCost(256, 8), Progress(), 2)),
    )  # fmt: skip
    assert trainer.train(Signals()) is Exit.COMPLETED
    loss, grad_norm, norm, lr, _ = seen[0]
    assert 5 < loss < 6
    assert norm == pytest.approx(grad_norm, rel=1e-5)
    assert lr == pytest.approx(3e-3 / 4)


@pytest.mark.skipif(jax.default_backend() == "cpu", reason="the guard sees no transfers on CPU")
def test_transfer_guard_sees_no_transfers():
    ours = setup(tiny_config())
    state, batches = ours.state(), [ours.put(b) for b in random_batches(ours.config, 3)]
    tracker = Tracker([MetricWriter("it", None, 1000)], StepCost(256, 8), Progress(1, 1), 10**9)
    with jax.transfer_guard_device_to_host("disallow"):
        for step, batch in enumerate(batches, 2):
            state, metrics = ours.step(state, batch, None)
            tracker.end_step(step, metrics)
