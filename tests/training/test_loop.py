"""The order of things in the loop, seen through fakes that write down what happens to them."""

import contextlib
import dataclasses
import itertools
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxforge.checkpoint.save_policy import SavePolicy
from jaxforge.errors import StorageError, UserError
from jaxforge.exit_codes import Exit
from jaxforge.state.guard_state import GuardState
from jaxforge.state.progress import Progress
from jaxforge.state.train_state import Counts, TrainState
from jaxforge.telemetry.measures import StepCost
from jaxforge.telemetry.metric_writers import MetricWriter
from jaxforge.telemetry.profiler import Profiler
from jaxforge.telemetry.tracker import Tracker
from jaxforge.training.bad_steps import BadSteps
from jaxforge.training.callbacks import activations, evaluation, samples
from jaxforge.training.callbacks.runner import Callbacks
from jaxforge.training.health.watchdog import Limits, Watchdog
from jaxforge.training.hooks import Hook
from jaxforge.training.instruments import Instruments
from jaxforge.training.loop import Trainer
from jaxforge.training.phases import Phases
from jaxforge.training.saving import Saver
from jaxforge.training.training_data import TrainingData
from jaxforge.training.updates import Updates
from tests.conftest import tiny_config
from tests.helpers import random_batches, setup


class OnDevice:
    """A scalar whose copying to the host is written down."""

    def __init__(self, events, name, value):
        self.events, self.name, self.value = events, name, value

    def __array__(self, dtype=None, copy=None):
        if self.name:
            self.events.append(self.name)
        return np.asarray(self.value, dtype)

    def __float__(self):
        return float(np.asarray(self))

    def __int__(self):
        return int(np.asarray(self))


class Recorder(Hook):
    def __init__(self, events):
        self.events = events

    def on_train_begin(self, config):
        self.events.append("begin")

    def on_step_end(self, context):
        self.events.append(f"hook {context.step}")

    def on_eval_begin(self, step):
        self.events.append(f"eval begins {step}")

    def on_eval_end(self, metrics, step):
        self.events.append(f"eval hook {step}")

    def on_checkpoint_save(self, step, path):
        self.events.append(f"save hook {step}")

    def on_train_end(self, step, tokens_seen, reason):
        self.events.append(f"end {step} {tokens_seen} {reason}")


class Checkpoints:
    def __init__(self, events):
        self.events, self.saved, self.in_progress = events, None, {}

    def save(self, progress, state, evaluation):
        if progress.step == self.saved:
            return None
        self.saved = progress.step
        self.in_progress[progress.step] = 1.5
        self.events.append(f"save {progress.step}")
        return "path"

    def latest(self):
        return self.saved

    def check(self):
        pass

    def newly_durable(self):
        durable, self.in_progress = self.in_progress, {}
        return durable

    def wait(self):
        self.events.append("wait")

    def close(self, *, together):
        self.events.append("close")


class Sink:
    def __init__(self, events):
        self.events = events

    def write(self, step, metrics):
        self.events.append(f"log {step} {next(iter(metrics)).split('/')[0]}")

    def write_samples(self, step, samples):
        self.events.append(f"log {step} {samples}")

    def close(self, exit_code):
        self.events.append(f"sink closed, code {exit_code}")


class Signals:
    """Stops where it is asked for the `at`-th time: after that step, without evaluations."""

    name = "SIGTERM"
    interrupting = contextlib.nullcontext

    def __init__(self, at=None):
        self.at, self.asked = at, 0

    def requested(self):
        self.asked += 1
        return Exit.SIGNAL if self.at and self.asked >= self.at else None

    def wait_for(self, task):
        return task()


class Sampler(samples.Sampler):
    """Writes after every second step."""

    def __init__(self, events):
        self.events = events

    def is_due(self, step):
        return step % 2 == 0

    def __call__(self, params, step):
        self.events.append(f"sample {step}")
        return "samples"


class Capture(activations.ActivationCapture):
    """Captures activations, when samples are written."""

    __init__, is_due = Sampler.__init__, Sampler.is_due

    def __call__(self, params, step, moved):
        self.events.append(f"capture {step}")
        moved()


class TwoBatches:
    """Two batches, and a question between them."""

    def __init__(self, events):
        self.events = events

    def run(self, state, progress, stop):
        validation = progress.begin_validation(["a"])
        self.events.append(f"evaluate from {len(validation.sums)}")
        if not validation.sums and stop():
            validation.sums["a"] = {}
            return None
        progress.validation = None
        return {"eval/loss": 1.0}


def data(config, batches):
    return TrainingData(lambda progress: batches(), Phases.of(config.data))


def saver(config, events):
    return Saver(config.checkpoint, SavePolicy(config), Checkpoints(events))


def instruments(config, tracker):
    return Instruments(tracker, Watchdog(Limits(0, 0, 0)), Profiler(config.profiling, Path()))


def batch():
    return {"labels": np.zeros((1, 8, 32))}


def run(
    steps=6, log=100, evaluate=100, save=100, hooks=True, stop_at=None, bad=(),
    callbacks=(), sections=None, **train,
):  # fmt: skip
    """Events of a run of `steps` steps; those in `bad` are not finite.

    Callbacks are made of the list of events.
    """
    sections = sections or {}
    events, counts = [], {"step": 0, "consecutive": 0, "total": 0}
    launches = itertools.count(1)

    def train_step(state, batch, controls):
        step = next(launches)
        events.append(f"launch {step}{'' if controls.apply else ' left out'}")
        if counts["consecutive"] < 3:  # else the state stands still
            take_place(step)
        return device_state(), metrics_of(step)

    def take_place(step):
        counts["step"] = step
        counts["consecutive"] = counts["consecutive"] + 1 if step in bad else 0
        counts["total"] += step in bad

    def metrics_of(step):
        scalars = {"loss": 1.0, "grad_norm": 1.0, "lr": 1.0, "skipped": counts["total"],
                   "step": counts["step"], "consecutive": counts["consecutive"],
                   "nonfinite": counts["total"], "spikes": 0}  # fmt: skip
        metrics = {k: OnDevice(events, f"read {step}" * (k == "loss"), v)
                   for k, v in scalars.items()}  # fmt: skip
        metrics["counts"] = device_state().counts
        return metrics

    def device_state():
        guard = GuardState(counts["consecutive"], counts["total"], 0, 0, 0, np.zeros(()))
        applied = counts["step"] - counts["total"]
        seen = Progress(samples=8 * counts["step"], tokens=256 * applied)
        step = OnDevice(events, "read state", counts["step"])
        return TrainState(step, {}, (), guard, Counts.of(seen))

    config = tiny_config(
        train={"max_steps": steps, "nan_consecutive_max": 3, **train},
        eval={
            "enabled": True,
            "dataset_path": "x",
            "interval": evaluate,
            **sections.get("eval", {}),
        },
        checkpoint={"interval": save, **sections.get("checkpoint", {})},
        early_stop=sections.get("early_stop", {}),
    )

    progress, writers = Progress(), [MetricWriter("it", Sink(events), log)]
    trainer = Trainer(
        config=config, state=device_state(), progress=progress,
        updates=Updates(
            lambda batch: lambda: train_step,
            data(config, lambda: itertools.repeat(batch(), steps)),
        ),
        saver=saver(config, events), bad_steps=BadSteps(config.train.nan_consecutive_max),
        callbacks=Callbacks([
            *[make(events) for make in callbacks],
            *([Recorder(events)] if hooks else []),
            evaluation.Evaluation(config, TwoBatches(events), progress),
        ]),
        instruments=instruments(config, Tracker(writers, StepCost(256, 8), progress, 10**9)),
    )  # fmt: skip
    reason = trainer.train(Signals(stop_at))
    trainer.close(reason)
    return events, reason, trainer


def test_metrics_are_read_a_step_late_and_only_where_due():
    events, _, _ = run(steps=7, log=3, hooks=False)
    assert events[:11] == [
        "launch 1", "launch 2", "read 1", "log 1 train", "launch 3", "launch 4", "read 2",
        "read 3", "log 3 train", "launch 5", "launch 6",
    ]  # fmt: skip
    assert events[events.index("launch 7") :][:5] == [
        "launch 7", "read 4", "read 5", "read 6", "log 6 train",
    ]  # fmt: skip


def test_silent_steps_copy_nothing_from_the_device():
    events, _, _ = run(steps=50, log=1000, hooks=True)
    until_the_end = events[: events.index("launch 50")]
    assert [e for e in until_the_end if e.startswith("read")] == ["read 1"]


def test_order_within_a_step():
    events, reason, _ = run(steps=4, log=2, evaluate=2, save=2)
    second = events[events.index("launch 2") : events.index("launch 3")]
    assert [e for e in second if not e.startswith("read")] == [
        "launch 2", "log 2 train", "hook 2", "eval begins 2", "evaluate from 0", "log 2 eval",
        "eval hook 2", "save 2", "log 2 checkpoint", "save hook 2",
    ]  # fmt: skip
    assert reason is Exit.COMPLETED
    assert events[0] == "begin"
    third = events[events.index("launch 3") : events.index("launch 4")]
    assert third[-2:] == ["hook 3", "log 3 checkpoint"]  # what was saved after step 2 is durable
    assert events[-5:] == [
        "wait", "log 4 checkpoint", "close", "end 4 1024 Exit.COMPLETED", "sink closed, code 0",
    ]  # fmt: skip


def test_last_step_is_saved_once():
    events, _, _ = run(steps=5, save=2)
    assert [e for e in events if e.startswith("save ") and "hook" not in e] == [
        "save 2", "save 4", "save 5",
    ]  # fmt: skip
    events, _, _ = run(steps=4, save=2)
    assert events.count("save 4") == 1


def test_signal_saves_and_stops():
    events, reason, trainer = run(steps=10, stop_at=3)
    assert reason is Exit.SIGNAL
    assert "save 3" in events
    assert "launch 4" not in events
    assert trainer.progress.step == 3


def test_bad_steps_count_as_attempted_but_not_as_tokens():
    _, _, trainer = run(steps=6, bad={2, 5})
    assert (trainer.progress.step, trainer.progress.skipped) == (6, 2)
    assert trainer.progress.tokens == 4 * 256
    assert trainer.progress.samples == 6 * 8


def test_too_many_bad_steps_in_a_row_end_the_run_unsaved():
    events, reason, _ = run(steps=20, log=1, save=6, bad={4, 5, 6})
    assert reason is Exit.NON_FINITE
    assert not [e for e in events if e.startswith("save")]


def test_hooks_are_told_of_the_end_when_a_step_fails():
    class Fails(Hook):
        def on_step_end(self, context):
            raise ZeroDivisionError

    events = []
    trainer = run(steps=1)[2]
    trainer = dataclasses.replace(
        trainer, callbacks=Callbacks([Fails(), Recorder(events)]), progress=Progress()
    )
    with pytest.raises(ZeroDivisionError):
        trainer.train(Signals())
    trainer.close(None)
    assert events == ["begin", "end 1 256 None"]


def test_sinks_are_told_the_exit_code():
    assert run(steps=10, stop_at=3)[0][-1] == "sink closed, code 75"
    assert run(steps=20, log=1, bad={4, 5, 6})[0][-1] == "sink closed, code 65"


@pytest.mark.parametrize("error", [ZeroDivisionError(), UserError(), StorageError()])
@pytest.mark.parametrize("at_the_end", [False, True])
def test_sinks_are_told_the_exit_code_of_a_failure(error, at_the_end):
    class Fails(Hook):
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
    else:  # what could not be written at the end is an orderly end of its own: others wait for it
        lost = isinstance(error, StorageError)
        with contextlib.nullcontext() if lost else pytest.raises(type(error)):
            assert trainer.close(reason) is Exit.STORAGE
    code = {ZeroDivisionError: 1, UserError: 2, StorageError: 74}[type(error)]
    assert events == [f"sink closed, code {code}"]


def test_every_callback_learns_of_the_end_though_one_lost_files():
    class Loses(Hook):
        def on_train_end(self, step, tokens_seen, reason):
            raise StorageError("a line is lost")

    events, (_, reason, trainer) = [], run(steps=1)
    callbacks = Callbacks([Loses(), Recorder(events)])
    assert dataclasses.replace(trainer, callbacks=callbacks).close(reason) is Exit.STORAGE
    assert events == ["end 1 256 Exit.COMPLETED"]


def test_lost_metrics_end_a_finished_run_with_the_code_of_storage(caplog):
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

    class Reads(Hook):
        collect = ("grads",)

        def on_step_end(self, context):
            norm = np.sqrt(sum(float((g**2).sum()) for g in jax.tree.leaves(context.gradients)))
            seen.append((context.loss, context.grad_norm, norm, context.lr, context.state))

    callbacks = Callbacks([Reads()])
    assert callbacks.collect == ("grads",)
    ours = setup(tiny_config(train={"max_steps": 2}), collect=callbacks.collect)
    trainer = Trainer(
        config=ours.config, state=ours.state(), progress=Progress(),
        updates=Updates(
            lambda batch: lambda: ours.step,
            data(ours.config, lambda: map(ours.put, random_batches(ours.config, 2))),
        ),
        saver=saver(ours.config, []), bad_steps=BadSteps(3), callbacks=callbacks,
        instruments=instruments(ours.config, Tracker([], StepCost(256, 8), Progress(), 2)),
    )  # fmt: skip
    assert trainer.train(Signals()) is Exit.COMPLETED
    loss, grad_norm, norm, lr, _ = seen[0]
    assert 5 < loss < 6
    assert norm == pytest.approx(grad_norm, rel=1e-5)
    assert lr == pytest.approx(3e-3 / 4)


@pytest.mark.skipif(jax.default_backend() == "cpu", reason="the guard sees no transfers on CPU")
def test_transfer_guard_agrees():
    ours = setup(tiny_config())
    state, batches = ours.state(), [ours.put(b) for b in random_batches(ours.config, 3)]
    tracker = Tracker([MetricWriter("it", None, 1000)], StepCost(256, 8), Progress(1, 1), 10**9)
    with jax.transfer_guard_device_to_host("disallow"):
        for step, batch in enumerate(batches, 2):
            state, metrics = ours.step(state, batch, None)
            tracker.end_step(step, metrics)
