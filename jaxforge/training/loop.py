"""The training loop: `Trainer.train`. Everything periodic goes by the number of steps attempted."""

import contextlib
import dataclasses
import logging
import sys
from collections.abc import Callable, Sequence

import jax

from jaxforge.config.job import JobConfig
from jaxforge.errors import StorageError
from jaxforge.exit_codes import AGREED
from jaxforge.state.progress import Progress
from jaxforge.state.train_state import TrainState
from jaxforge.step.train_step import Metrics
from jaxforge.training.bad_steps import BadSteps
from jaxforge.training.callbacks.callback import Callback, IntervalContext, StepContext
from jaxforge.training.callbacks.runner import Callbacks
from jaxforge.training.early_stop import EarlyStop
from jaxforge.training.exit_report import (
    check_learned,
    exit_code,
    log_already_complete,
    log_exit_reason,
)
from jaxforge.training.instruments import Instruments
from jaxforge.training.preemption import Exit, Exits, Interrupted, Signals
from jaxforge.training.saving import Saver
from jaxforge.training.updates import Updates

log = logging.getLogger(__name__)


@dataclasses.dataclass
class Trainer:
    """A run in motion. Built by `jaxforge.training.build`.

    `training.callbacks.order.ORDER` lists the events of a step.

    Attributes:
        config: the validated config.
        state: parameters, optimizer state, counters; replaced by every step.
        progress: the host's counters.
        updates: the batches, and the step on them.
        saver: saves.
        bad_steps: watches bad steps, and takes the run back where that is asked for.
        callbacks: everything else that acts between steps.
        instruments: metrics, watchdog and profiler.
    """

    config: JobConfig
    state: TrainState
    progress: Progress
    updates: Updates
    saver: Saver
    bad_steps: BadSteps
    callbacks: Callbacks
    instruments: Instruments

    def train(self, signals: Signals, since: float | None = None) -> Exit:
        """Step until `max_steps`, or until there is another reason to stop.

        Args:
            signals: of this process.
            since: when the command began, by `time.monotonic`; None: now.
        """
        exits = Exits(self.config.train, signals, since)
        tracker, profiler = self.instruments.tracker, self.instruments.profiler
        for callback in self.callbacks:
            callback.on_train_begin(self.config)
        try:
            reason = self._begin(signals, exits)
            while reason is None:
                with profiler.around(self.progress.step + 1, tracker.paused):
                    metrics = self._step(signals)
                due = self.callbacks.due(self.progress.step, tracker.paused)
                if self._is_something_due(due) and self.bad_steps.had_halted(self.progress):
                    reason = self._go_back()
                    continue
                self._end_step(metrics)
                reason = self._between_steps(signals, exits, due)
        except Interrupted:  # between steps: while compiling, or waiting for data
            reason = exits.requested(self.progress.step)
            assert reason is not None
            self._save()
        return reason if reason is Exit.UNHEALTHY else self._finish(reason)

    def _begin(self, signals: Signals, exits: Exits) -> Exit | None:
        """Get ready for the first step; a run may resume in an evaluation, or at its end."""
        progress, watchdog = self.progress, self.instruments.watchdog
        wanted = self.bad_steps.rollback or (progress.step == 0 and self.saver.is_due(0))
        if wanted and self.saver.latest() is None:
            self._save()  # a rollback must have something to go back to
        reason = None
        if progress.validation:
            due = self.callbacks.due_on_resume(progress.step)
            reason = self._between_steps(signals, exits, due)
        if reason is None and progress.step < self.config.train.max_steps:
            with signals.interrupting(), watchdog.naming("loading data"):
                self.updates.data.open(progress)
                batch = self.updates.data.peek()
            with watchdog.naming("compiling"):
                with signals.interrupting():
                    compile_step = self.updates.lower(batch)
                self.updates.step = signals.wait_for(compile_step)
            for callback in self.callbacks:
                callback.on_compiled(self.updates.step)
            self.callbacks.start_clock()
        elif reason is None:
            log_already_complete(self.config.train, progress)
            reason = Exit.COMPLETED
        self.instruments.tracker.start_clock()
        return reason

    def _between_steps(
        self, signals: Signals, exits: Exits, due: Sequence[Callback]
    ) -> Exit | None:
        if self.bad_steps.fault:
            return self.bad_steps.fault  # unsaved: what these devices made is not to be trusted
        self._check_saves(signals)
        self._note_durable()
        context = IntervalContext(
            self.progress, self.state, self.instruments.tracker, self.instruments.watchdog,
            self.callbacks, exits.requested_in_evaluation, self.saver.amend,
        )  # fmt: skip
        reason = self.callbacks.run(due, context)
        if reason is Exit.UNHEALTHY:
            return reason  # unsaved, for the same reason
        self._save_if_due(context.evaluation)
        reason = reason or self._early_end(context.evaluation)
        if reason:
            self._save()
        return reason or self._reason_to_stop(exits)

    def _check_saves(self, signals: Signals) -> None:
        """Do not train on for an interval after a save that failed; several processes agree."""
        try:
            self.saver.check()
        except Exception:
            if not signals.stop_for_failed_save():
                raise

    def _step(self, signals: Signals) -> Metrics:
        """Launch one step; the metrics of the one before it are logged where they are due."""
        progress, data, tracker = self.progress, self.updates.data, self.instruments.tracker
        with tracker.waiting_for_data(), signals.interrupting():
            batch = next(data)
        data.note_mixture(progress)
        controls = data.controls(progress.step, self.config.train.iterations_to_skip)
        first = progress.samples
        self.state, metrics = self.updates.step(self.state, batch, controls)
        microbatches, rows, length = batch["labels"].shape
        progress.advance(microbatches * rows, microbatches * rows * length)
        tracker.end_step(progress.step, metrics)
        bad = self.bad_steps
        bad.note(metrics["consecutive"])
        self.instruments.watchdog.tick(progress.step)
        if bad.attribution and not bad.had_halted(progress) and int(metrics["consecutive"]):
            self.state, bad.fault = bad.attribution.examine(
                self.updates.step, self.state, batch, metrics, controls, first
            )
        return metrics

    def _is_something_due(self, due: Sequence[Callback]) -> bool:
        """Return whether anything after the latest step depends on that it took place."""
        step = self.progress.step
        return (
            self.callbacks.watches_steps
            or any(callback.waits for callback in due)
            or self.saver.is_due(step)
            or self.saver.is_local_due(step)
        )

    def _end_step(self, metrics: Metrics) -> None:
        if not self.callbacks.watches_steps:
            return
        self.instruments.tracker.flush()  # metrics first, then callbacks
        context = StepContext(self.progress.step, self.state, metrics)
        for callback in self.callbacks:
            callback.on_step_end(context)

    def _save_if_due(self, evaluation: dict[str, float]) -> None:
        """Save on the schedule, after the last step, and a new best that is to be kept."""
        metric, step = self.config.checkpoint.best_metric, self.progress.step
        new_best = bool(evaluation) and self.progress.note_metric(evaluation[metric])
        if self._at_end or self.saver.is_due(step, new_best=new_best):
            self._save(evaluation)
        elif self.saver.is_local_due(step):
            self._save(lasting=False)

    def _save(self, evaluation: dict[str, float] | None = None, *, lasting: bool = True) -> None:
        with self.instruments.tracker.paused(), self.instruments.watchdog.section("checkpoint"):
            self._follow_device()
            if self._has_halted:
                return  # its parameters are those of the last good step, and its end is near
            path, metrics = self.saver.save(self.progress, self.state, evaluation, lasting=lasting)
        if path is not None:
            self.instruments.tracker.log(self.progress.step, metrics)
            if lasting:
                for callback in self.callbacks:
                    callback.on_checkpoint_save(self.progress.step, path)

    def _note_durable(self) -> None:
        durable = list(self.saver.newly_durable())
        if durable and self.bad_steps.had_halted(self.progress):
            self._follow_device()  # for the number of the last step that took place
        for metrics in durable:
            self.instruments.tracker.log(self.progress.step, metrics)

    def _early_end(self, evaluation: dict[str, float]) -> Exit | None:
        """Early stopping, by what was logged last and evaluated now: the same on every process."""
        step, metrics = self.progress.step, self.instruments.tracker.take_logged() | evaluation
        why = EarlyStop(self.config.early_stop, self.progress.early_stop).reason(step, metrics)
        if why is None:
            return None
        log.info("stopping early at step %d: %s", step, why)
        return Exit.EARLY_STOPPED

    def _reason_to_stop(self, exits: Exits) -> Exit | None:
        if stop := exits.requested(self.progress.step):
            self._save()  # raises where the reason is a save that failed, on any process
            return stop
        if self._has_halted:
            return self._go_back()
        return Exit.COMPLETED if self._at_end else None

    @property
    def _at_end(self) -> bool:
        return self.progress.step >= self.config.train.max_steps

    @property
    def _has_halted(self) -> bool:
        return self.bad_steps.has_halted(self.progress)

    def _go_back(self) -> Exit | None:
        """Go back to the last good checkpoint, where that is asked for and helps."""
        self._follow_device()
        rollback = self.bad_steps.rollback
        target = rollback.target(self.progress) if rollback else None
        if rollback is None or target is None:
            return Exit.NON_FINITE
        with (
            self.instruments.tracker.paused(),
            self.instruments.watchdog.section("checkpoint"),
            self.instruments.watchdog.naming("going back"),
        ):
            self.state = rollback.go(self.state, self.progress, target)
            self.updates.data.open(self.progress)
        self.instruments.tracker.rewind()
        self.bad_steps.clear()
        self.instruments.tracker.log(
            target, {"train/rollbacks": float(len(self.progress.rollbacks))}
        )
        return None

    def _finish(self, reason: Exit) -> Exit:
        self._follow_device()
        if self._has_halted and not self.bad_steps.rollback:
            reason = Exit.NON_FINITE
            self.instruments.tracker.log_latest()
        with self.instruments.watchdog.section("checkpoint"):
            self.saver.wait()
        self._note_durable()
        if reason in (Exit.COMPLETED, Exit.EARLY_STOPPED):
            check_learned(self.config.train, self.progress)
        log_exit_reason(reason, self.config.train, self.progress, self.saver.latest())
        return reason

    def close(self, reason: Exit | None) -> Exit | None:
        """End the run, however it went: waits for saves, tells the callbacks, closes the sinks.

        Args:
            reason: what `train` returned; None if it failed.

        Returns:
            Why the process ends: `Exit.STORAGE` where lines of metrics and the like are lost.
        """
        step, tokens = self.progress.step, self.progress.tokens
        losses: list[StorageError] = []

        def noting_losses(end: Callable[..., object], *arguments: object) -> None:
            try:
                end(*arguments)
            except StorageError as error:
                log.error("%s", error)
                losses.append(error)

        def close_tracker(_: object, failure: BaseException | None, __: object) -> None:
            failure = failure or sys.exception() or (losses[0] if losses else None)
            if not self.instruments.tracker.close(exit_code(reason, failure)):
                losses.append(StorageError("metrics are lost"))

        with contextlib.ExitStack() as last_to_first:  # each runs, whatever the others do
            last_to_first.callback(noting_losses, self.saver.close_mirror)
            last_to_first.push(close_tracker)
            callbacks = [*self.callbacks][::-1]
            for callback in callbacks:
                last_to_first.callback(callback.close)
            for callback in callbacks:
                last_to_first.callback(noting_losses, callback.on_train_end, step, tokens, reason)
            last_to_first.callback(self.saver.close, together=reason in AGREED)
            last_to_first.callback(self.instruments.profiler.close)
        return Exit.STORAGE if losses else reason

    def _follow_device(self) -> None:
        """Synchronize the step counters from the device state."""
        self.instruments.tracker.flush()
        state = self.state
        self.progress.sync_from_device(*jax.device_get((state.step, state.guard, state.counts)))
