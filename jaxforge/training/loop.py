"""The training loop: `Trainer.train`.

All intervals count attempted steps. A turn of the loop, with the host ahead of the device:

    host     batch n | launch n | read metrics n-1 | callbacks due | save | reasons to stop
    device             ... step n-1 ...|  step n ................................

The host waits for step n only if an action after it needs the result: a callback that `waits`, or a
save. Metrics of step n-1 are read only if a writer is due.
"""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxforge.config.job import JobConfig
from jaxforge.state.progress import Progress
from jaxforge.state.train_state import TrainState
from jaxforge.step.train_step import Batch, Controls, Metrics, TrainStep
from jaxforge.training.bad_steps import BadSteps
from jaxforge.training.callbacks.callback import Callback, IntervalContext, StepContext
from jaxforge.training.callbacks.control import Requests
from jaxforge.training.callbacks.runner import Callbacks
from jaxforge.training.closing import close_run
from jaxforge.training.early_stop import EarlyStop
from jaxforge.training.exit_report import (
    check_learned,
    log_already_complete,
    log_exit_reason,
)
from jaxforge.training.health.repeated_steps import run_twice
from jaxforge.training.instruments import Instruments
from jaxforge.training.preemption import Exit, Exits, Interrupted, Signals
from jaxforge.training.saving import Saver
from jaxforge.training.updates import Updates

log = logging.getLogger(__name__)


@dataclasses.dataclass
class Trainer:
    """A training run: its state and its loop. `jaxforge.training.build` builds it.

    `training.callbacks.order.ORDER` lists the events of a step.

    Attributes:
        config: the validated config.
        state: parameters, optimizer state and counters; replaced by every step.
        progress: the counters of the host.
        updates: the batches and the compiled step.
        saver: saves checkpoints.
        bad_steps: tracks bad steps in a row, with rollback and attribution if they are enabled.
        callbacks: all other actions between steps.
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
        """Train until `max_steps` or until there is another reason to stop.

        Args:
            signals: signals to this process.
            since: when the command began, by `time.monotonic`; None means now.

        Returns:
            The reason why training ended.
        """
        exits = Exits(self.config.train, signals, since)
        tracker, profiler = self.instruments.tracker, self.instruments.profiler
        self.callbacks.compare_processes()
        self.callbacks.call(Callback.on_train_begin, self.config)
        if self.saver.loaded is not None:
            self._note_load(self.saver.loaded)
        try:
            reason = self._begin(signals, exits)
            while reason is None:
                self.callbacks.begin_step(self.progress)
                with profiler.around(self.progress.step + 1, tracker.paused):
                    batch, controls = self._next_batch(signals)
                    self._measure_attention_logits(batch)
                    step = self.updates.step[batch["labels"].shape[0]]
                    if self.bad_steps.should_verify(self.progress.step + 1):
                        metrics = self._run_twice(step, batch, controls)
                    else:
                        self.state, metrics = step(self.state, batch, controls)
                    self._note_launch(step, batch, controls, metrics)
                due = self.callbacks.due(self.progress.step, tracker.paused)
                if self._depends_on_step(due) and self.bad_steps.had_halted(self.progress):
                    reason = self._roll_back()
                    continue
                self._end_step(metrics)
                reason = self._between_steps(signals, exits, due)
        except Interrupted:  # between steps: while compiling, or waiting for data
            reason = exits.requested(self.progress.step)
            assert reason is not None
            self._save()
        return reason if reason is Exit.UNHEALTHY else self._finish(reason, exits)

    def _begin(self, signals: Signals, exits: Exits) -> Exit | None:
        """Prepare the first step. A run may resume within an evaluation, or at its end."""
        progress, watchdog = self.progress, self.instruments.watchdog
        needs_checkpoint = self.bad_steps.rollback or (progress.step == 0 and self.saver.is_due(0))
        if needs_checkpoint and self.saver.latest() is None:
            self._save()  # a rollback needs a checkpoint to return to
        reason = self._check_health_at_start(exits)
        if reason is None and progress.validation:
            due = self.callbacks.due_on_resume(progress.step)
            reason = self._between_steps(signals, exits, due)
            self.saver.write_amendment()
        if reason is None and progress.step < self.config.train.max_steps:
            with signals.interrupting(), watchdog.naming("loading data"):
                self.updates.data.open(progress)
                batch = self.updates.data.peek()
            with watchdog.naming("compiling"):
                with signals.interrupting():
                    compile_step = self.updates.lower(batch)
                self.updates.step = signals.wait_for(compile_step)
            self.callbacks.call(Callback.on_compiled, self.updates.step)
            reason = self._fulfil_first_requests(exits)
            self.callbacks.start_clock()
        elif reason is None:
            log_already_complete(self.config.train, progress)
            reason = Exit.COMPLETED
        self.instruments.tracker.start_clock()
        return reason

    def _check_health_at_start(self, exits: Exits) -> Exit | None:
        """Check devices and weights before the first evaluation and the first step."""
        if self._at_end and not self.progress.validation:
            return None
        due = [callback for callback in self.callbacks if callback.checks_start]
        if not due:
            return None
        jax.block_until_ready(self.state)  # its collectives would mix with those of the checks
        return self.callbacks.run(due, self._context(exits, due))

    def _between_steps(
        self, signals: Signals, exits: Exits, due: Sequence[Callback]
    ) -> Exit | None:
        if self.bad_steps.fault:
            return self.bad_steps.fault  # unsaved: results of these devices cannot be trusted
        self._check_saves(signals)
        self._note_durable()
        context = self._context(exits, due)
        reason = self.callbacks.run(due, context)
        if reason is Exit.UNHEALTHY:
            return reason  # unsaved, for the same reason
        requests = self._take_requests(context, due, is_forced=self._at_end or reason is not None)
        self._save_if_due(context.evaluation, is_requested=requests.save)
        reason = reason or self._early_end(context.evaluation) or requests.exit
        if reason:
            self._save()
        self._note_evaluation(context)
        return reason or self._reason_to_stop(exits)

    def _context(self, exits: Exits, due: Sequence[Callback]) -> IntervalContext:
        def start_save() -> None:
            waits = self.config.checkpoint.keep_best_n or any(cb.judges_state for cb in due)
            if not waits and (self._at_end or self._is_save_due()):
                self._save()

        return IntervalContext(
            self.progress, self.state, self.instruments.tracker, self.instruments.watchdog,
            self.callbacks, exits.requested_in_evaluation, start_save, self.callbacks.control,
        )  # fmt: skip

    def _note_evaluation(self, context: IntervalContext) -> None:
        """Remember an evaluation that ended, or was stopped, after the save of its step."""
        if context.evaluation or self.progress.validation:
            self.progress.callbacks |= self.callbacks.states()
            self.saver.note_evaluation(self.progress)

    def _take_requests(
        self, context: IntervalContext, due: Sequence[Callback], *, is_forced: bool
    ) -> Requests:
        """Return the agreed requests of callbacks; a requested evaluation takes place here.

        At most one evaluation takes place after a step, and none after a step that changed nothing.
        """
        step, paused = self.progress.step, self.instruments.tracker.paused
        requests = self.callbacks.requests(step, due, paused, is_forced=is_forced)
        has_evaluated = context.evaluation or self.progress.validation
        if requests.evaluation and not (has_evaluated or self.bad_steps.had_halted(self.progress)):
            self.callbacks.evaluate(context)
            later = self.callbacks.requests(step, due, paused, is_forced=True)
            requests = requests.merge(later)
        return requests

    def _fulfil_first_requests(self, exits: Exits) -> Exit | None:
        """Fulfil the requests of callbacks before the first step of this process."""
        context = self._context(exits, ())
        requests = self._take_requests(context, (), is_forced=True)
        self._note_evaluation(context)
        if self.progress.validation:
            return self._reason_to_stop(exits)  # the evaluation was stopped
        if context.evaluation or requests.save:
            self._save_if_due(context.evaluation, is_requested=requests.save)
        if requests.exit:
            self._save()
        return requests.exit

    def _note_load(self, path: Path) -> None:
        """Restore the states of callbacks and report the restored checkpoint to them."""
        self.callbacks.load_states(self.progress.callbacks)
        self.callbacks.call(Callback.on_checkpoint_load, self.progress.step, path)

    def _check_saves(self, signals: Signals) -> None:
        """Raise the failure of a save now, and not at the next save.

        Among several processes the failure is noted instead: all of them stop together, and the
        next save raises it.
        """
        try:
            self.saver.check()
        except Exception:
            if not signals.stop_for_failed_save():
                raise

    def _next_batch(self, signals: Signals) -> tuple[Batch, Controls]:
        data, progress = self.updates.data, self.progress
        instruments = self.instruments
        waiting = instruments.watchdog.naming("waiting for data")
        with instruments.tracker.waiting_for_data(), waiting, signals.interrupting():
            batch = next(data)
        data.note_mixture(progress)
        return batch, data.controls(progress.step, self.config.train.iterations_to_skip)

    def _measure_attention_logits(self, batch: Batch) -> None:
        """Measure the largest attention logit of the next step, which replaces its parameters."""
        logits, number = self.instruments.attention_logits, self.progress.step + 1
        if logits is None or not logits.is_due(number):
            return
        tracker, watchdog = self.instruments.tracker, self.instruments.watchdog
        with (
            tracker.paused(),
            watchdog.section("evaluation"),
            watchdog.naming("measuring attention logits"),
        ):
            tracker.note_attention_logit(number, logits.measure(self.state.variables, batch))

    def _run_twice(self, step: TrainStep, batch: Batch, controls: Controls) -> Metrics:
        """Execute a step twice, and note a fault if the results differ."""
        self.state, metrics, self.bad_steps.fault = run_twice(
            step, self.state, batch, controls, self.instruments.tracker.paused
        )
        return metrics

    def _note_launch(
        self, step: TrainStep, batch: Batch, controls: Controls, metrics: Metrics
    ) -> None:
        """Count the step that was launched; log the metrics of the previous step if due.

        The device is still computing the step, unless it was verified (`train.verify_interval`) or
        bad steps are attributed (`train.rerun_bad_steps`): then the host waits for its metrics.
        """
        progress, bad_steps, first = self.progress, self.bad_steps, self.progress.samples
        microbatches, rows, length = batch["labels"].shape
        sequences = self.config.train.update_sequences(microbatches * rows)
        progress.advance(sequences, sequences * length)
        self.instruments.tracker.end_step(progress.step, metrics)
        bad_steps.note(metrics["consecutive"])
        self.instruments.watchdog.tick(progress.step, metrics["consecutive"])
        attribution = None if bad_steps.fault else bad_steps.attribution
        if attribution and not bad_steps.had_halted(progress) and int(metrics["consecutive"]):
            self.state, bad_steps.fault = attribution.examine(
                step, self.state, batch, metrics, controls, first
            )

    def _depends_on_step(self, due: Sequence[Callback]) -> bool:
        """Return whether an action after the latest step depends on the step having taken place."""
        step = self.progress.step
        return (
            self.callbacks.watches_end_of_step(self.progress)
            or any(callback.waits for callback in due)
            or self._is_save_due()
            or self.saver.is_local_due(step)
            or self.saver.is_replica_due(step)
        )

    def _end_step(self, metrics: Metrics) -> None:
        if not self.callbacks.watches_end_of_step(self.progress):
            return
        self.instruments.tracker.flush()  # callbacks come after the metrics
        context = StepContext(self.progress.step, self.state, metrics, self.callbacks.control)
        self.callbacks.end_step(self.progress, context)

    def _save_if_due(self, evaluation: dict[str, float], *, is_requested: bool = False) -> None:
        """Save on the schedule or a request, after the last step, and after a new best."""
        step, new_best = self.progress.step, self.saver.note_best(self.progress, evaluation)
        if self._at_end or is_requested or self._is_save_due(new_best=new_best):
            self._save(evaluation)
        elif self.saver.is_local_due(step):
            self._save(permanent=False)
        if self.saver.is_replica_due(step) and not self._at_end:
            self._replicate()

    def _is_save_due(self, *, new_best: bool = False) -> bool:
        epochs = self.callbacks.ended_epochs(self.progress)
        return self.saver.is_due(self.progress.step, epochs, new_best=new_best)

    def _save(self, evaluation: dict[str, float] | None = None, *, permanent: bool = True) -> None:
        with self.instruments.tracker.paused(), self.instruments.watchdog.section("checkpoint"):
            self._follow_device()
            if self._has_halted:
                return  # the parameters are those of the last good step, and the run ends soon
            self.progress.callbacks |= self.callbacks.states()
            path, metrics = self.saver.save(
                self.progress, self.state, evaluation, permanent=permanent
            )
        if path is not None:
            self.instruments.tracker.log(self.progress.step, metrics)
            if permanent:
                self.callbacks.call(Callback.on_checkpoint_save, self.progress.step, path)

    def _replicate(self) -> None:
        """Start to copy the state to the memory of this host and of its peer."""
        with self.instruments.tracker.paused(), self.instruments.watchdog.section("checkpoint"):
            self._follow_device()
            if self._has_halted:
                return
            self.progress.callbacks |= self.callbacks.states()
            metrics = self.saver.replicate(self.progress, self.state)
        self.instruments.tracker.log(self.progress.step, metrics)

    def _note_durable(self) -> None:
        durable, replicas = list(self.saver.newly_durable()), list(self.saver.new_replicas())
        if (durable or replicas) and self.bad_steps.had_halted(self.progress):
            self._follow_device()  # to log under the last step that took place
        for save in durable:
            self.instruments.tracker.log(self.progress.step, save.metrics)
            if save.is_permanent:
                self.callbacks.call(Callback.on_checkpoint_durable, save.step, save.path)
        for metrics in replicas:
            self.instruments.tracker.log(self.progress.step, metrics)

    def _early_end(self, evaluation: dict[str, float]) -> Exit | None:
        """Apply `[early_stop]` to the latest logged metrics and evaluation.

        All processes have the same metrics, so they come to the same decision.

        Raises:
            UserError: `early_stop.metric` is never logged.
        """
        step, logged = self.progress.step, self.instruments.tracker.take_logged()
        early_stop = EarlyStop(self.config.early_stop, self.progress.early_stop)
        early_stop.check_metric(logged)
        explanation = early_stop.reason(step, logged | evaluation)
        if explanation is None:
            return None
        log.info("stopping early at step %d: %s", step, explanation)
        return Exit.EARLY_STOPPED

    def _reason_to_stop(self, exits: Exits) -> Exit | None:
        if stop := exits.requested(self.progress.step):
            self._save()  # raises if the reason is a failed save, on any process
            return stop
        if self._has_halted:
            return self._roll_back()
        return Exit.COMPLETED if self._at_end else None

    @property
    def _at_end(self) -> bool:
        return self.progress.step >= self.config.train.max_steps

    @property
    def _has_halted(self) -> bool:
        return self.bad_steps.has_halted(self.progress)

    def _roll_back(self) -> Exit | None:
        """Roll back to the last good checkpoint, if rollback is enabled and has a target."""
        self._follow_device()
        self.saver.write_amendment()  # the rollback may read it
        rollback = self.bad_steps.rollback
        target = rollback.target(self.progress) if rollback else None
        if rollback is None or target is None:
            return Exit.NON_FINITE
        with (
            self.instruments.tracker.paused(),
            self.instruments.watchdog.section("checkpoint"),
            self.instruments.watchdog.naming("rolling back"),
        ):
            self.state = rollback.go(self.state, self.progress, target)
            self.updates.data.open(self.progress)
        self.instruments.tracker.rewind()
        self.bad_steps.clear()
        self._note_load(self.saver.permanent.path(target))
        self.instruments.tracker.log(
            target, {"train/rollbacks": float(len(self.progress.rollbacks))}
        )
        return None

    def _finish(self, reason: Exit, exits: Exits) -> Exit:
        self._follow_device()
        self.instruments.watchdog.clock.end_steps()
        if self._has_halted and not self.bad_steps.rollback and reason is not Exit.MACHINE:
            reason = Exit.NON_FINITE
            self.instruments.tracker.log_latest()
        with self.instruments.watchdog.section("checkpoint"):
            self.saver.wait()
        self._note_durable()
        if reason in (Exit.COMPLETED, Exit.EARLY_STOPPED):
            check_learned(self.config.train, self.progress)
        exits.log_reason(reason, self.progress.step)
        log_exit_reason(reason, self.config, self.progress, self.saver.latest())
        exits.log_total_time()
        return reason

    def close(self, reason: Exit | None) -> Exit | None:
        """End the run, also after a failure: wait for saves, notify callbacks, close the sinks.

        Args:
            reason: the result of `train`; None if it failed.

        Returns:
            Why the process ends: `Exit.STORAGE` if metrics or logs are lost.
        """
        return close_run(reason, self.progress, self.callbacks, self.saver, self.instruments)

    def _follow_device(self) -> None:
        """Synchronize the step counters from the device state."""
        self.instruments.tracker.flush()
        state = self.state
        self.progress.sync_from_device(*jax.device_get((state.step, state.guard, state.counts)))
