"""The training loop: `Trainer.train`.

All intervals count attempted steps. A turn of the loop, with the host ahead of the device:

    host     batch n | launch n | read metrics n-1 | callbacks due | save | reasons to stop
    device             ... step n-1 ...|  step n ................................

The host waits for step n only if an action after it needs the result: a callback that `waits`, or a
save. Metrics of step n-1 are read only if a writer is due.
"""

import dataclasses
from collections.abc import Sequence

import jax

from jaxforge.config.job import JobConfig
from jaxforge.step.train_step import Batch, Controls, Metrics, TrainStep
from jaxforge.training.bad_steps import BadSteps
from jaxforge.training.callbacks.callback import Callback, IntervalContext
from jaxforge.training.callbacks.runner import Callbacks
from jaxforge.training.closing import close_run, end_training, log_already_complete
from jaxforge.training.early_stop import EarlyStop
from jaxforge.training.instruments import Instruments
from jaxforge.training.preemption import Exit, Exits, Interrupted, Signals
from jaxforge.training.saves import Saves
from jaxforge.training.saving import Position
from jaxforge.training.updates import Updates


@dataclasses.dataclass
class Trainer:
    """A training run: its position and its loop. `jaxforge.training.build` builds it.

    `training.callbacks.order.ORDER` lists the events of a step.

    Attributes:
        config: the config of the run.
        position: the state on the devices and the counters of the host.
        updates: the batches and the compiled step.
        saves: saves checkpoints.
        bad_steps: tracks bad steps in a row, with rollback and attribution if they are enabled.
        early_stop: the conditions of `[early_stop]`.
        callbacks: all other actions between steps.
        instruments: metrics, watchdog and profiler.
    """

    config: JobConfig
    position: Position
    updates: Updates
    saves: Saves
    bad_steps: BadSteps
    early_stop: EarlyStop
    callbacks: Callbacks
    instruments: Instruments

    def train(self, signals: Signals, since: float | None = None) -> Exit:
        """Train until `max_steps` or until there is another reason to stop.

        Returns:
            The reason why training ended.
        """
        exits = Exits(self.config.train, signals, since)
        position, progress = self.position, self.position.progress
        tracker = self.instruments.tracker
        # Before any other collective: processes with different callbacks must know it.
        self.callbacks.compare_processes()
        self.callbacks.call(Callback.on_train_begin, self.config)
        self.saves.begin()
        try:
            reason = self._begin(signals, exits)
            while reason is None:
                self.callbacks.begin_step(progress)
                with self.instruments.profiler.around(progress.step + 1, tracker.paused):
                    step, batch, controls = self.updates.next_batch(
                        progress, signals, self.instruments
                    )
                    # Before the step, which donates the parameters that the logits belong to.
                    self._measure_logits(batch)
                    # Both executions begin with the same state, which the first must not change.
                    if self.bad_steps.should_verify(progress.step + 1):
                        metrics = self.bad_steps.execute_twice(
                            step, position, batch, controls, tracker.paused
                        )
                    else:
                        position.state, metrics = step(position.state, batch, controls)
                    self._count(step, batch, controls, metrics)
                # A step launched after a halt changed nothing, so no callback may act on it.
                due = self.callbacks.due(progress.step)
                if self._depends_on_step(due) and self._had_halted():
                    reason = self._roll_back()
                    continue
                self.callbacks.end_step(progress, position.state, metrics, tracker)
                reason = self._between_steps(signals, exits, due)
        except Interrupted:  # between steps: while compiling, or waiting for data
            reason = exits.requested(progress.step)
            assert reason is not None
            # All state is that of the last complete step, since no step was in flight.
            self.saves.save()
        if reason is Exit.UNHEALTHY:  # no further call may wait for these devices
            return reason
        return end_training(reason, exits, self.config, self.saves)

    def close(self, reason: Exit | None) -> Exit | None:
        """End the run, also after a failure: wait for saves, notify callbacks, close the sinks.

        Returns:
            Why the process ends: `Exit.STORAGE` if metrics or logs are lost.
        """
        progress = self.position.progress
        return close_run(reason, progress, self.callbacks, self.saves.saver, self.instruments)

    def _begin(self, signals: Signals, exits: Exits) -> Exit | None:
        """Prepare the first step. A run may resume within an evaluation, or at its end."""
        position, progress = self.position, self.position.progress
        self.saves.save_first()
        reason = self._check_health_at_start(exits)
        # The evaluation that a stop interrupted continues before the step is compiled.
        if reason is None and progress.validation:
            due = self.callbacks.due_on_resume(progress.step)
            reason = self._between_steps(signals, exits, due)
            self.saves.saver.write_amendment()
        if reason is None and not position.is_last:
            self.updates.compile(progress, signals, self.instruments.watchdog)
            self.callbacks.call(Callback.on_compiled, self.updates.step)
            reason = self._fulfil_first_requests(exits)
        elif reason is None:
            log_already_complete(self.config.train, progress)
            reason = Exit.COMPLETED
        # Compilation is not step time.
        self.instruments.tracker.start_clock()
        return reason

    def _check_health_at_start(self, exits: Exits) -> Exit | None:
        """Check devices and weights before the first evaluation and the first step."""
        if self.position.is_last and not self.position.progress.validation:
            return None
        due = [callback for callback in self.callbacks if callback.checks_start]
        if not due:
            return None
        # Its collectives would mix with those of the checks.
        # The initial state may still be computed or read.
        jax.block_until_ready(self.position.state)
        return self.callbacks.run(due, self._context(exits, due))

    def _fulfil_first_requests(self, exits: Exits) -> Exit | None:
        """Fulfil the requests of callbacks before the first step of this process."""
        context = self._context(exits, ())
        requests = self.callbacks.take_requests(context, (), self._had_halted, is_forced=True)
        self.saves.note_evaluation(context.evaluation)
        if self.position.progress.validation:
            return self._reason_to_stop(exits)  # the evaluation was stopped
        if context.evaluation or requests.save:
            self.saves.save_if_due(context.evaluation, is_requested=requests.save)
        if requests.exit:
            self.saves.save()
        return requests.exit

    def _measure_logits(self, batch: Batch) -> None:
        """Log the largest attention logit of the next step before it replaces the parameters."""
        position, instruments = self.position, self.instruments
        if instruments.attention_logits is not None:
            instruments.attention_logits.log_if_due(
                position.step + 1, position.state.variables, batch,
                instruments.tracker, instruments.watchdog,
            )  # fmt: skip

    def _count(self, step: TrainStep, batch: Batch, controls: Controls, metrics: Metrics) -> None:
        """Count the step that was launched; log the metrics of the previous step if due."""
        progress, first = self.position.progress, self.position.progress.samples
        microbatches, rows, length = batch["labels"].shape
        sequences = self.config.train.update_sequences(microbatches * rows)
        progress.advance(sequences, sequences * length)
        self.instruments.tracker.end_step(progress.step, metrics)
        # The value stays on the device, so that the host never waits for this step.
        self.bad_steps.note(metrics["consecutive"])
        self.instruments.watchdog.tick(progress.step, metrics["consecutive"])
        self.bad_steps.examine(step, self.position, batch, metrics, controls, first)

    def _depends_on_step(self, due: Sequence[Callback]) -> bool:
        """Return whether an action after the latest step depends on the step having taken place."""
        return (
            self.callbacks.watches_end_of_step(self.position.progress)
            or any(callback.waits for callback in due)
            or self.saves.is_any_due()
        )

    def _between_steps(
        self, signals: Signals, exits: Exits, due: Sequence[Callback]
    ) -> Exit | None:
        if self.bad_steps.fault:
            return self.bad_steps.fault  # unsaved: results of these devices cannot be trusted
        # A failed save stops the run now: later checkpoints would fail as well.
        self.saves.check(signals)
        self.saves.note_durable()
        context = self._context(exits, due)
        reason = self.callbacks.run(due, context)
        if reason is Exit.UNHEALTHY:
            return reason  # unsaved, for the same reason
        # There is no later step at which processes could agree on requests.
        is_forced = self.position.is_last or reason is not None
        # Scheduled actions come before requests, so that a requested evaluation is not done twice.
        requests = self.callbacks.take_requests(context, due, self._had_halted, is_forced=is_forced)
        self.saves.save_if_due(context.evaluation, is_requested=requests.save)
        reason = reason or self._early_end(context.evaluation) or requests.exit
        if reason:
            self.saves.save()
        self.saves.note_evaluation(context.evaluation)
        return reason or self._reason_to_stop(exits)

    def _context(self, exits: Exits, due: Sequence[Callback]) -> IntervalContext:
        def start_save() -> None:
            # The evaluation, or a callback that judges the state, decides about the save.
            waits = self.config.checkpoint.keep_best_n or any(cb.judges_state for cb in due)
            if not waits:
                self.saves.save_before_evaluation()

        return IntervalContext(
            self.position.progress, self.position.state, self.instruments.tracker,
            self.instruments.watchdog, self.callbacks, exits.requested_in_evaluation, start_save,
            self.callbacks.control,
        )  # fmt: skip

    def _early_end(self, evaluation: dict[str, float]) -> Exit | None:
        # Every process logs the same metrics, so all come to the same decision.
        logged = self.instruments.tracker.take_logged()
        return self.early_stop.requested(self.position.progress, logged, evaluation)

    def _reason_to_stop(self, exits: Exits) -> Exit | None:
        if stop := exits.requested(self.position.step):
            self.saves.save()  # raises if the reason is a failed save, on any process
            return stop
        # A signal wins over a rollback: the restart rolls back.
        if self.bad_steps.has_halted(self.position.progress):
            return self._roll_back()
        return Exit.COMPLETED if self.position.is_last else None

    def _had_halted(self) -> bool:
        """Return whether the run had halted before the latest step. Waits for the previous step."""
        return self.bad_steps.had_halted(self.position.progress)

    def _roll_back(self) -> Exit | None:
        """Roll back to the last good checkpoint, if rollback is enabled and has a target."""
        position, tracker = self.position, self.instruments.tracker
        position.follow_device(tracker)
        self.saves.saver.write_amendment()  # the rollback may read it
        rollback = self.bad_steps.rollback
        target = rollback.target(position.progress) if rollback else None
        if rollback is None or target is None:
            return Exit.NON_FINITE
        with (
            tracker.paused(),
            self.instruments.watchdog.section("checkpoint"),
            self.instruments.watchdog.naming("rolling back"),
        ):
            # The old state is deleted first: two states would not fit.
            position.state = rollback.go(position.state, position.progress, target)
            self.updates.data.open(position.progress)
        tracker.rewind()
        self.bad_steps.clear()
        self.saves.note_load(self.saves.saver.permanent.path(target))
        tracker.log(target, {"train/rollbacks": float(len(position.progress.rollbacks))})
        return None
