"""Saves of a run between its steps: when they are due, and whom they notify."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from jaxforge.training.bad_steps import BadSteps
from jaxforge.training.callbacks.callback import Callback
from jaxforge.training.callbacks.runner import Callbacks
from jaxforge.training.instruments import Instruments
from jaxforge.training.preemption import Signals
from jaxforge.training.saving import Position, Saver


@dataclasses.dataclass(frozen=True)
class Saves:
    """Saves permanent checkpoints, non-persistent ones and replicas of a run.

    Attributes:
        position: the state to save.
        saver: writes checkpoints.
        bad_steps: knows whether the latest step changed nothing.
        callbacks: are notified, and have states to save.
        instruments: metrics and watchdog.
    """

    position: Position
    saver: Saver
    bad_steps: BadSteps
    callbacks: Callbacks
    instruments: Instruments

    def begin(self) -> None:
        """Report the checkpoint from which this start continues, if there is one."""
        if self.saver.loaded is not None:
            self.note_load(self.saver.loaded)

    def save_first(self) -> None:
        """Save before the first step, if that is due or if a rollback needs a checkpoint."""
        # A rollback within the first interval needs the initial state.
        is_due = self.position.step == 0 and self.saver.is_due(0)
        if (self.bad_steps.rollback or is_due) and self.saver.latest() is None:
            self.save()

    def save(self, evaluation: dict[str, float] | None = None, *, permanent: bool = True) -> None:
        """Start to save, unless the run has halted: then the last good checkpoint remains."""
        progress = self.position.progress
        with self.instruments.tracker.paused(), self.instruments.watchdog.section("checkpoint"):
            # Counters of the host are behind the device; a checkpoint must hold both of one step.
            self.position.follow_device(self.instruments.tracker)
            if self.bad_steps.has_halted(progress):
                return
            progress.callbacks |= self.callbacks.states()
            path, metrics = self.saver.save(
                progress, self.position.state, evaluation, permanent=permanent
            )
        if path is not None:
            self.instruments.tracker.log(progress.step, metrics)
            if permanent:
                self.callbacks.call(Callback.on_checkpoint_save, progress.step, path)

    def save_if_due(self, evaluation: dict[str, float], *, is_requested: bool = False) -> None:
        """Save on the schedule or a request, after the last step, and after a new best."""
        position = self.position
        # Noted even if no save is due, or a later worse value would count as the best.
        new_best = self.saver.note_best(position.progress, evaluation)
        if position.is_last or is_requested or self._is_due(new_best=new_best):
            self.save(evaluation)
        elif self.saver.is_local_due(position.step):
            self.save(permanent=False)
        # The last step has a durable checkpoint, which a replica would only repeat.
        if self.saver.is_replica_due(position.step) and not position.is_last:
            self._replicate()

    def save_before_evaluation(self) -> None:
        """Start the scheduled save of a step whose evaluation does not decide about it."""
        if self.position.is_last or self._is_due():
            self.save()

    def is_any_due(self) -> bool:
        """Return whether a save of any kind is due after the latest step."""
        step = self.position.step
        return self._is_due() or self.saver.is_local_due(step) or self.saver.is_replica_due(step)

    def check(self, signals: Signals) -> None:
        """Raise the failure of a save now, and not at the next save.

        Among several processes the failure is noted instead: all of them stop together, and the
        next save raises it.
        """
        try:
            self.saver.check()
        except Exception:
            # Raised at once, it would leave the other processes in a collective.
            if not signals.stop_for_failed_save():
                raise

    def note_durable(self) -> None:
        """Log and report saves that became durable since the last call."""
        durable, replicas = list(self.saver.newly_durable()), list(self.saver.new_replicas())
        if (durable or replicas) and self.bad_steps.had_halted(self.position.progress):
            # Log under the last step that took place.
            self.position.follow_device(self.instruments.tracker)
        for save in durable:
            self.instruments.tracker.log(self.position.step, save.metrics)
            if save.is_permanent:
                self.callbacks.call(Callback.on_checkpoint_durable, save.step, save.path)
        for metrics in replicas:
            self.instruments.tracker.log(self.position.step, metrics)

    def note_evaluation(self, evaluation: Mapping[str, float]) -> None:
        """Remember an evaluation that ended, or was stopped, after the save of its step."""
        progress = self.position.progress
        if evaluation or progress.validation:
            progress.callbacks |= self.callbacks.states()
            self.saver.note_evaluation(progress)

    def note_load(self, path: Path) -> None:
        """Restore the states of callbacks and report the restored checkpoint to them."""
        # States first: the event may use them.
        self.callbacks.load_states(self.position.progress.callbacks)
        self.callbacks.call(Callback.on_checkpoint_load, self.position.step, path)

    def _is_due(self, *, new_best: bool = False) -> bool:
        progress = self.position.progress
        epochs = self.callbacks.ended_epochs(progress)
        return self.saver.is_due(progress.step, epochs, new_best=new_best)

    def _replicate(self) -> None:
        """Start to copy the state to the memory of this host and of its peer."""
        progress = self.position.progress
        with self.instruments.tracker.paused(), self.instruments.watchdog.section("checkpoint"):
            self.position.follow_device(self.instruments.tracker)
            if self.bad_steps.has_halted(progress):
                return
            progress.callbacks |= self.callbacks.states()
            metrics = self.saver.replicate(progress, self.position.state)
        self.instruments.tracker.log(progress.step, metrics)
