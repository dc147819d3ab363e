"""The training loop: `Trainer.train`. Everything periodic goes by the number of steps attempted."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator

import jax

from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.config.job import JobConfig
from jaxforge.telemetry.tracker import Tracker
from jaxforge.training.exits import Exit, Signals
from jaxforge.training.hooks import HookRunner, StepContext
from jaxforge.training.progress import Progress
from jaxforge.training.state import TrainState
from jaxforge.training.step import Batch, Controls, Metrics, TrainStep

log = logging.getLogger(__name__)


@dataclasses.dataclass
class Trainer:
    """A run in motion. Built by `jaxforge.train.run`.

    Attributes:
        config: the validated config.
        state: parameters, optimizer state, counters; replaced by every step.
        progress: the host's counters.
        train_step: `(state, batch, controls) -> (state, metrics)`.
        batches: batches from `progress.samples` on.
        samples_per_step: sequences in a batch.
        evaluate: metrics of a state on the evaluation set; None without one.
        checkpoints: where states are saved.
        tracker: where metrics are logged.
        hooks: the user's own code.
    """

    config: JobConfig
    state: TrainState
    progress: Progress
    train_step: TrainStep
    batches: Iterator[Batch]
    samples_per_step: int
    evaluate: Callable[[TrainState], dict[str, float]] | None
    checkpoints: Checkpoints
    tracker: Tracker
    hooks: HookRunner

    def train(self, signals: Signals) -> Exit:
        """Steps until `max_steps`, a signal, or too many bad steps in a row."""
        self.hooks.on_train_begin(self.config)
        self.tracker.start_clock()
        reason = None if self.progress.step < self.config.train.max_steps else Exit.COMPLETED
        while reason is None:
            self.state, metrics = self.train_step(self.state, next(self.batches), Controls())
            self.progress.advance(self.samples_per_step, self.tokens_per_step)
            self.tracker.end_step(self.progress.step, metrics)
            self._run_hooks(metrics)
            new_best = self._evaluate_if_due()
            if new_best or self.checkpoints.due(self.progress.step):
                self._save()
            reason = self._reason_to_stop(signals)
        return self._finish(reason)

    @property
    def tokens_per_step(self) -> int:
        """Tokens in a batch, padding and masked ones included."""
        return self.samples_per_step * self.config.train.seq_len

    def _run_hooks(self, metrics: Metrics) -> None:
        if not self.hooks:
            return
        self.tracker.flush()  # metrics first, then hooks
        step, tokens = self.progress.step, self.progress.tokens
        self.hooks.on_step_end(StepContext(step, tokens, self.state, metrics))

    def _evaluate_if_due(self) -> bool:
        """Evaluates where due; whether that gave a new best that `keep_best_n` wants saved."""
        step = self.progress.step
        if self.evaluate is None or step % self.config.eval.interval:
            return False
        with self.tracker.paused():
            metrics = self.evaluate(self.state)
        self.tracker.log(step, metrics)
        self.hooks.on_eval_end(metrics, step)
        self.checkpoints.note_metrics(metrics)
        is_best = self.progress.note_metric(metrics[self.config.checkpoint.best_metric])
        return is_best and self.config.checkpoint.keep_best_n > 0

    def _save(self) -> None:
        with self.tracker.paused():
            self._reconcile()
            if self._gave_up:
                return  # its parameters are those of the last good step, and its end is near
            path = self.checkpoints.save(self.progress, self.state)
        if path is not None:
            log.info("saving step %d to %s", self.progress.step, path)
            self.hooks.on_checkpoint_save(self.progress.step, path)

    def _reason_to_stop(self, signals: Signals) -> Exit | None:
        if stop := signals.requested(self.progress.step):
            self._save()
            return stop
        if self._gave_up:
            return Exit.NON_FINITE
        return Exit.COMPLETED if self.progress.step >= self.config.train.max_steps else None

    @property
    def _gave_up(self) -> bool:
        return self.tracker.consecutive_bad >= self.config.train.nan_consecutive_max

    def _finish(self, reason: Exit) -> Exit:
        self._reconcile()
        if self._gave_up:
            reason = Exit.NON_FINITE
            self.tracker.log_latest(self.progress.step)
        if reason is Exit.COMPLETED:
            self._save()
        self.checkpoints.wait()
        self._report(reason)
        return reason

    def close(self, reason: Exit | None) -> None:
        """Ends the run, however it went: waits for saves, tells the hooks, closes the sinks.

        Args:
            reason: what `train` returned; None if it failed.
        """
        with (
            contextlib.ExitStack() as steps
        ):  # last in, first out; each runs whatever the others do
            steps.callback(self.tracker.close)
            steps.callback(
                self.hooks.on_train_end, self.progress.step, self.progress.tokens, reason
            )
            steps.callback(self.checkpoints.close)

    def _reconcile(self) -> None:
        """Takes the device's word on how many steps were attempted and how many were bad."""
        self.tracker.flush()
        guard = jax.device_get((self.state.step, self.state.guard))
        self.progress.reconcile(
            int(guard[0]), int(guard[1].total), self.samples_per_step, self.tokens_per_step
        )
        self.tracker.consecutive_bad = int(guard[1].consecutive)

    def _report(self, reason: Exit) -> None:
        step, tokens = self.progress.step, self.progress.tokens
        if reason is Exit.COMPLETED:
            log.info("Training complete: %d steps, %s tokens", step, f"{tokens:,}")
        elif reason is Exit.NON_FINITE:
            log.error(
                "gave up at step %d: %d steps in a row had a loss or gradient norm that is not "
                "finite; none of them changed the weights. The last checkpoint is step %s. Lower "
                "optimizer.lr, look at the data of these steps, or raise train.nan_consecutive_max",
                step, self.config.train.nan_consecutive_max, self.checkpoints.latest(),
            )  # fmt: skip
        else:
            log.info("stopped at step %d of %d; run the same command to go on",
                     step, self.config.train.max_steps)  # fmt: skip
