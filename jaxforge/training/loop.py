"""The training loop: `Trainer.train`. Everything periodic goes by the number of steps attempted."""

import contextlib
import dataclasses
import itertools
import logging
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.checkpoint.save_policy import Due
from jaxforge.config.job import JobConfig
from jaxforge.health.actions import PeriodicActions, collecting_garbage
from jaxforge.health.attribution import Attribution
from jaxforge.health.watchdog import Watchdog
from jaxforge.mirror import Mirror
from jaxforge.state.progress import Progress
from jaxforge.state.train_state import TrainState
from jaxforge.step.train_step import Batch, CompiledSteps, Controls, Metrics
from jaxforge.telemetry.profiler import Profiler
from jaxforge.telemetry.tracker import Tracker, TrackerState
from jaxforge.training.early_stop import EarlyStop
from jaxforge.training.exit_report import exit_code, tell_end
from jaxforge.training.hooks import HookRunner, StepContext
from jaxforge.training.phases import Phases
from jaxforge.training.preemption import Exit, Exits, Interrupted, Signals
from jaxforge.training.resumable_evaluation import Validations
from jaxforge.training.rollback import Rollback

log = logging.getLogger(__name__)

_LOCAL = "local_checkpoint"  # in metrics


@dataclasses.dataclass
class Trainer:
    """A run in motion. Built by `jaxforge.train.run`.

    Attributes:
        config: the validated config.
        state: parameters, optimizer state, counters; replaced by every step.
        progress: the host's counters.
        lower_step: traces the step for such a state and batch; what it returns compiles it.
        open_batches: the batches from where a progress stands.
        phases: which mixture and learning rate are in force.
        due: after which steps to save.
        early_stop: when there is nothing more to gain.
        validations: evaluates on the sets of `[eval]`; None without one.
        checkpoints: where states are saved.
        local: where states are saved that need not last; None if they are not.
        rollback: takes the run back, where that is asked for.
        attribution: finds out whose fault a bad step is, where that is asked for.
        watchdog: ends the process where it hangs.
        tracker: where metrics are logged.
        open_actions: what is done every so many steps, given the compiled step.
        profiler: traces some of the steps.
        hooks: the user's own code.
        mirror: copies the run's files to the bucket that it is in; None where it is in none.
    """

    config: JobConfig
    state: TrainState
    progress: Progress
    lower_step: Callable[[TrainState, Batch], Callable[[], CompiledSteps]]
    open_batches: Callable[[Progress], Iterator[Batch]]
    phases: Phases
    due: Due
    early_stop: EarlyStop
    validations: Validations | None
    checkpoints: Checkpoints
    local: Checkpoints | None
    rollback: Rollback | None
    attribution: Attribution | None
    watchdog: Watchdog
    tracker: Tracker
    open_actions: Callable[[CompiledSteps], PeriodicActions]
    profiler: Profiler
    hooks: HookRunner
    mirror: Mirror | None = None
    _batches: Iterator[Batch] = dataclasses.field(init=False)
    _train_step: CompiledSteps = dataclasses.field(init=False)
    _fault: Exit | None = dataclasses.field(default=None, init=False)
    _actions: PeriodicActions = dataclasses.field(default_factory=PeriodicActions, init=False)

    def train(self, signals: Signals) -> Exit:
        """Steps until `max_steps`, or until there is another reason to stop."""
        exits = Exits(self.config.train, signals)
        self.hooks.on_train_begin(self.config)
        try:
            reason = self._begin(signals, exits)
            while reason is None:
                with self.profiler.around(self.progress.step + 1, self.tracker.paused):
                    metrics = self._step(signals)
                self._run_hooks(metrics)
                reason = self._between_steps(signals, exits)
        except Interrupted:  # between steps: while compiling, or waiting for data
            reason = exits.requested(self.progress.step)
            assert reason is not None
            self._save()
        return reason if reason is Exit.UNHEALTHY else self._finish(reason)

    def _begin(self, signals: Signals, exits: Exits) -> Exit | None:
        """Gets ready for the first step; a run may resume in an evaluation, or at its end."""
        wanted = self.rollback or (self.progress.step == 0 and self.due(0))
        if wanted and self.checkpoints.latest() is None:
            self._save()  # a rollback must have something to go back to
        reason = self._between_steps(signals, exits) if self.progress.validation else None
        if reason is None and self.progress.step < self.config.train.max_steps:
            with signals.interrupting():
                self._open_data()
                first = next(self._batches)
                compile_step = self.lower_step(self.state, first)
            self._batches = itertools.chain([first], self._batches)
            self._train_step = signals.wait_for(compile_step)
            self._actions = self.open_actions(self._train_step)
        elif reason is None:
            reason = Exit.COMPLETED
        self.tracker.start_clock()
        return reason

    def _between_steps(self, signals: Signals, exits: Exits) -> Exit | None:
        if self._fault:
            return self._fault  # unsaved: what these devices made is not to be trusted
        self.checkpoints.check()  # what could not be written should not go on for an interval
        self._note_durable()
        evaluation = self._evaluate_if_due(signals)
        reason = self._actions.run(self.progress.step, self.state, self.tracker.paused)
        if reason is Exit.UNHEALTHY:
            return reason  # unsaved, for the same reason
        self._save_if_due(evaluation)
        reason = reason or self._early_end(evaluation)
        if reason:
            self._save()
        return reason or self._reason_to_stop(exits)

    def _step(self, signals: Signals) -> Metrics:
        """Launches one step; the metrics of the one before it are logged where they are due."""
        with self.tracker.waiting_for_data(), signals.interrupting():
            batch = next(self._batches)
        self._note_mixture()
        controls, first = self._controls, self.progress.samples
        self.state, metrics = self._train_step(self.state, batch, controls)
        microbatches, rows, length = batch["labels"].shape
        self.progress.advance(microbatches * rows, microbatches * rows * length)
        self.tracker.end_step(self.progress.step, metrics)
        self.watchdog.tick(self.progress.step)
        if self.attribution and int(metrics["consecutive"]):
            self.state, self._fault = self.attribution.examine(
                self._train_step, self.state, batch, metrics, controls, first
            )
        return metrics

    def _note_mixture(self) -> None:
        """Records what the data are drawn from, where that has changed."""
        at = self.progress
        at.mixtures = [list(one) for one in self.phases.recorded(at.mixtures, at.step, at.samples)]

    @property
    def _controls(self) -> Controls:
        """Of the next step."""
        step = self.progress.step
        is_left_out = step + 1 in self.config.train.iterations_to_skip
        return Controls(lr_scale=self.phases.lr_scale(step), apply=not is_left_out)

    def _run_hooks(self, metrics: Metrics) -> None:
        if not self.hooks.watches_steps:
            return
        self.tracker.flush()  # metrics first, then hooks
        step, tokens = self.progress.step, self.progress.tokens
        self.hooks.on_step_end(StepContext(step, tokens, self.state, metrics))

    def _evaluate_if_due(self, signals: Signals) -> dict[str, float]:
        """Metrics of an evaluation of this step; empty where none is due, or it was stopped."""
        step, resumed = self.progress.step, self.progress.validation is not None
        if self.validations is None or not (resumed or self.config.eval.is_due(step)):
            return {}
        if not resumed:
            self.hooks.on_eval_begin(step)

        def asked_to_stop() -> Exit | None:
            self.watchdog.tick()
            return signals.requested()

        with (
            self.tracker.paused(),
            collecting_garbage(self.config),
            self.watchdog.section("evaluation"),
        ):
            metrics = self.validations.run(self.state, self.progress, asked_to_stop)
        if metrics is None:
            return {}
        self.tracker.log(step, metrics)
        self.hooks.on_eval_end(metrics, step)
        if resumed:
            self.checkpoints.amend(self.progress)
        return metrics

    def _save_if_due(self, evaluation: dict[str, float]) -> None:
        """Saves on the schedule, after the last step, and a new best that is to be kept."""
        keep_best, metric = self.config.checkpoint.keep_best_n, self.config.checkpoint.best_metric
        new_best = bool(evaluation) and self.progress.note_metric(evaluation[metric])
        step = self.progress.step
        if self.due(step) or self._at_end or (new_best and keep_best):
            self._save(evaluation)
        elif self.local and step % self.config.checkpoint.non_persistent_interval == 0:
            self._save_to(self.local, _LOCAL)

    def _save(self, evaluation: dict[str, float] | None = None) -> None:
        path = self._save_to(self.checkpoints, "checkpoint", evaluation)
        if path is not None:
            self.hooks.on_checkpoint_save(self.progress.step, path)

    def _save_to(
        self, checkpoints: Checkpoints, name: str, evaluation: dict[str, float] | None = None
    ) -> Path | None:
        with self.tracker.paused(), self.watchdog.section("checkpoint"):
            self._reconcile()
            if self._halted:
                return None  # its parameters are those of the last good step, and its end is near
            start = time.perf_counter()
            if self.mirror:
                self.mirror.publish()  # a checkpoint has its history beside it, whatever comes then
            path = checkpoints.save(self.progress, self.state, evaluation)
            seconds = time.perf_counter() - start
        if path is not None:
            step = self.progress.step
            log.info("saving step %d to %s; training waited %.2f s", step, path, seconds)
            self.tracker.log(step, {f"{name}/blocking_sec": seconds})
        return path

    def _note_durable(self) -> None:
        for name, checkpoints in (("checkpoint", self.checkpoints), (_LOCAL, self.local)):
            for step, seconds in checkpoints.newly_durable().items() if checkpoints else ():
                log.info("step %d is saved, in %.2f s", step, seconds)
                self.tracker.log(self.progress.step, {f"{name}/save_sec": seconds})

    def _early_end(self, evaluation: dict[str, float]) -> Exit | None:
        """Early stopping, by what was logged last and evaluated now: the same on every process."""
        step, metrics = self.progress.step, self.tracker.take_logged() | evaluation
        why = self.early_stop.reason(step, metrics)
        self.progress.early_stop = self.early_stop.to_json()
        if why is None:
            return None
        log.info("stopping early at step %d: %s", step, why)
        return Exit.EARLY_STOPPED

    def _reason_to_stop(self, exits: Exits) -> Exit | None:
        if stop := exits.requested(self.progress.step):
            self._save()
            return stop
        if self._halted:
            return self._go_back()
        return Exit.COMPLETED if self._at_end else None

    @property
    def _at_end(self) -> bool:
        return self.progress.step >= self.config.train.max_steps

    @property
    def _halted(self) -> bool:
        return self.tracker.consecutive_bad >= self.config.train.nan_consecutive_max

    def _go_back(self) -> Exit | None:
        """Back to the last good checkpoint, where that is asked for and helps."""
        self._reconcile()
        target = self.rollback.target(self.progress) if self.rollback else None
        if self.rollback is None or target is None:
            return Exit.NON_FINITE
        with self.tracker.paused(), self.watchdog.section("checkpoint"):
            self.state = self.rollback.go(self.state, self.progress, target)
            self._open_data()
        self.tracker.rewind(tracker_state(self.progress))
        self.tracker.log(target, {"train/rollbacks": float(len(self.progress.rollbacks))})
        return None

    def _open_data(self) -> None:
        self._batches = self.open_batches(self.progress)

    def _finish(self, reason: Exit) -> Exit:
        self._reconcile()
        if self._halted and not self.rollback:
            reason = Exit.NON_FINITE
            self.tracker.log_latest()
        with self.watchdog.section("checkpoint"):
            self.checkpoints.wait()
        self._note_durable()
        tell_end(reason, self.config.train, self.progress, self.checkpoints.latest())
        return reason

    def close(self, reason: Exit | None) -> None:
        """Ends the run, however it went: waits for saves, tells the hooks, closes the sinks.

        Args:
            reason: what `train` returned; None if it failed.
        """
        step, tokens = self.progress.step, self.progress.tokens

        def close_tracker(_: object, failure: BaseException | None, __: object) -> None:
            self.tracker.close(exit_code(reason, failure or sys.exception()))

        with contextlib.ExitStack() as last_to_first:  # each runs, whatever the others do
            if self.mirror:
                last_to_first.callback(self.mirror.close)
            last_to_first.push(close_tracker)
            last_to_first.callback(self._actions.close)
            last_to_first.callback(self.hooks.on_train_end, step, tokens, reason)
            last_to_first.callback(self.checkpoints.close)
            if self.local:
                last_to_first.callback(self.local.close)
            last_to_first.callback(self.profiler.close)

    def _reconcile(self) -> None:
        """Takes the device's word on which steps were attempted and which were bad."""
        self.tracker.flush()
        state = self.state
        step, guard, counts = jax.device_get((state.step, state.guard, state.counts))
        progress = self.progress
        progress.step, progress.samples = int(step), int(counts.samples)
        progress.tokens, progress.valid_tokens = int(counts.tokens), int(counts.valid_tokens)
        progress.skipped, progress.consecutive_bad = int(guard.total), int(guard.consecutive)
        progress.nonfinite, progress.spikes = int(guard.nonfinite), int(guard.spikes)
        self.tracker.consecutive_bad = progress.consecutive_bad


def tracker_state(progress: Progress) -> TrackerState:
    """Where a tracker goes on."""
    return TrackerState(**{name: getattr(progress, name) for name in TrackerState._fields})
