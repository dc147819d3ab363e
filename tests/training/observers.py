"""Callbacks and signals that record the events of a loop."""

import contextlib
import dataclasses
import itertools
from pathlib import Path

import numpy as np

from jaxforge.checkpoint.save_policy import SavePolicy
from jaxforge.exit_codes import Exit
from jaxforge.state.progress import Progress
from jaxforge.state.train_state import Counts, GuardState, TrainState
from jaxforge.step.train_step import CompiledSteps
from jaxforge.telemetry.measures import StepCost
from jaxforge.telemetry.metric_writers import MetricWriter
from jaxforge.telemetry.profiler import Profiler
from jaxforge.telemetry.tracker import Tracker
from jaxforge.training.bad_steps import BadSteps
from jaxforge.training.callbacks import activations, evaluation, samples
from jaxforge.training.callbacks.callback import Callback
from jaxforge.training.callbacks.runner import Callbacks
from jaxforge.training.early_stop import EarlyStop
from jaxforge.training.health.watchdog import Limits, Watchdog
from jaxforge.training.instruments import Instruments
from jaxforge.training.loop import Trainer
from jaxforge.training.saves import Saves
from jaxforge.training.saving import Position, Saver
from jaxforge.training.training_data import Phases, TrainingData
from jaxforge.training.updates import Updates
from tests.conftest import tiny_config


class OnDevice:
    """A scalar that records when it is copied to the host."""

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


class Recorder(Callback):
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
    is_higher_better = False

    def __init__(self, events):
        self.events, self.saved_step, self.in_progress = events, None, {}

    def save(self, progress, state, evaluation):
        if progress.step == self.saved_step:
            return None
        self.saved_step = progress.step
        self.in_progress[progress.step] = 1.5
        self.events.append(f"save {progress.step}")
        return "path"

    def latest(self):
        return self.saved_step

    def amend(self, progress):
        self.events.append(f"amend {progress.step}")

    def check(self):
        pass

    def path(self, step):
        return Path(f"step_{step}")

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
    """Signals that stop a run at the `at`-th request: after step `at` without evaluations."""

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
    """A sampler that is due after every second step."""

    def __init__(self, events):
        self.events = events

    def is_due(self, step):
        return step % 2 == 0

    def __call__(self, params, step):
        self.events.append(f"sample {step}")
        return "samples"


class Capture(activations.ActivationCapture):
    """A capture that is due when samples are."""

    __init__, is_due = Sampler.__init__, Sampler.is_due

    def __call__(self, params, step, moved):
        self.events.append(f"capture {step}")
        moved()


class TwoBatches:
    """An evaluation of two batches that may stop between them."""

    def __init__(self, events):
        self.events = events

    def run(self, state, progress, stop, note_batch):
        validation = progress.begin_validation(["a"])
        self.events.append(f"evaluate from {len(validation.sums)}")
        note_batch("a", len(validation.sums))
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
    return Instruments(tracker, Watchdog(Limits(0, 0)), Profiler(config.profiling, Path()))


def batch():
    return {"labels": np.zeros((1, 8, 32))}


def trainer_of(config, state, progress, updates, saver, callbacks, instruments):
    """Return a trainer without rollback and attribution."""
    position = Position(state, progress, config.train.max_steps)
    bad_steps = BadSteps(config.train.nan_consecutive_max)
    return Trainer(
        config, position, updates, Saves(position, saver, bad_steps, callbacks, instruments),
        bad_steps, EarlyStop(config.early_stop), callbacks, instruments,
    )  # fmt: skip


def restarted(trainer, callbacks):
    """Return the trainer before its first step, with other callbacks."""
    position = dataclasses.replace(trainer.position, progress=Progress())
    return dataclasses.replace(trainer, callbacks=Callbacks(callbacks), position=position)


def run(
    steps=6, log=100, evaluate=100, save=100, hooks=True, stop_at=None, bad=(),
    callbacks=(), sections=None, epoch=None, **train,
):  # fmt: skip
    """Return events, exit reason and trainer of a run of `steps` steps.

    Steps in `bad` are not finite. Each step draws 8 of the `epoch` sequences of the data. Each of
    `callbacks` is called with the list of events.
    """
    sections = sections or {}
    events, counts = [], {"step": 0, "consecutive": 0, "total": 0}
    launches = itertools.count(1)

    def train_step(state, batch, controls):
        step = next(launches)
        events.append(f"launch {step}{'' if controls.apply else ' left out'}")
        if counts["consecutive"] < 3:  # else the state no longer changes
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
            "datasets": {"dataset_path": "x"},
            "interval": evaluate,
            **sections.get("eval", {}),
        },
        checkpoint={"interval": save, **sections.get("checkpoint", {})},
        early_stop=sections.get("early_stop", {}),
    )

    progress, writers = Progress(sequences_per_epoch=epoch), [MetricWriter("it", Sink(events), log)]
    trainer = trainer_of(
        config, device_state(), progress,
        Updates(
            lambda batch: lambda: CompiledSteps({1: train_step}),
            data(config, lambda: itertools.repeat(batch(), steps)),
            config.train.iterations_to_skip,
        ),
        saver(config, events),
        Callbacks([
            *[make(events) for make in callbacks],
            *([Recorder(events)] if hooks else []),
            evaluation.Evaluation(config, TwoBatches(events), progress),
        ]),
        instruments(config, Tracker(writers, StepCost(256, 8), progress, 10**9)),
    )  # fmt: skip
    reason = trainer.train(Signals(stop_at))
    trainer.close(reason)
    return events, reason, trainer
