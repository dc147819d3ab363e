"""The training loop: `Trainer.train`. Everything periodic goes by the number of steps attempted."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator

import jax

from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.config.job import JobConfig
from jaxforge.telemetry.profiler import Profiler
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
        profiler: traces some of the steps.
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
    profiler: Profiler
    hooks: HookRunner

    def train(self, signals: Signals) -> Exit:
        """Steps until `max_steps`, a signal, or too many bad steps in a row."""
        self.hooks.on_train_begin(self.config)
        self.tracker.start_clock()
        reason = None if self.progress.step < self.config.train.max_steps else Exit.COMPLETED
        while reason is None:
            with self.profiler.around(self.progress.step + 1, self.tracker.paused):
                metrics = self._step()
            self._run_hooks(metrics)
            evaluation = self._evaluate_if_due()
            self._save_if_due(evaluation)
            reason = self._reason_to_stop(signals)
        return self._finish(reason)

    def _step(self) -> Metrics:
        """Launches one step; the metrics of the one before it are logged where they are due."""
        with self.tracker.waiting_for_data():
            batch = next(self.batches)
        self.state, metrics = self.train_step(self.state, batch, Controls())
        self.progress.advance(self.samples_per_step, self.tokens_per_step)
        self.tracker.end_step(self.progress.step, metrics)
        return metrics

    @property
    def tokens_per_step(self) -> int:
        """Tokens in a batch, padding and masked ones included."""
        return self.samples_per_step * self.config.train.seq_len

    def _run_hooks(self, metrics: Metrics) -> None:
        if not self.hooks.watches_steps:
            return
        self.tracker.flush()  # metrics first, then hooks
        step, tokens = self.progress.step, self.progress.tokens
        self.hooks.on_step_end(StepContext(step, tokens, self.state, metrics))

    def _evaluate_if_due(self) -> dict[str, float]:
        """Metrics of an evaluation of this step; empty where none is due."""
        step = self.progress.step
        if self.evaluate is None or step % self.config.eval.interval:
            return {}
        with self.tracker.paused():
            metrics = self.evaluate(self.state)
        self.tracker.log(step, metrics)
        self.hooks.on_eval_end(metrics, step)
        return metrics

    def _save_if_due(self, evaluation: dict[str, float]) -> None:
        """Saves on the schedule, after the last step, and a new best that is to be kept."""
        keep_best, metric = self.config.checkpoint.keep_best_n, self.config.checkpoint.best_metric
        new_best = bool(evaluation) and self.progress.note_metric(evaluation[metric])
        step = self.progress.step
        is_last = step >= self.config.train.max_steps
        if self.checkpoints.due(step) or is_last or (new_best and keep_best):
            self._save(evaluation)

    def _save(self, evaluation: dict[str, float] | None = None) -> None:
        with self.tracker.paused():
            self._reconcile()
            if self._gave_up:
                return  # its parameters are those of the last good step, and its end is near
            path = self.checkpoints.save(self.progress, self.state, evaluation)
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
        self.checkpoints.wait()
        self._report(reason)
        return reason

    def close(self, reason: Exit | None) -> None:
        """Ends the run, however it went: waits for saves, tells the hooks, closes the sinks.

        Args:
            reason: what `train` returned; None if it failed.
        """
        step, tokens = self.progress.step, self.progress.tokens
        with contextlib.ExitStack() as last_to_first:  # each runs, whatever the others do
            last_to_first.callback(self.tracker.close)
            last_to_first.callback(self.hooks.on_train_end, step, tokens, reason)
            last_to_first.callback(self.checkpoints.close)
            last_to_first.callback(self.profiler.close)

    def _reconcile(self) -> None:
        """Takes the device's word on how many steps were attempted and how many were bad."""
        self.tracker.flush()
        step, guard = jax.device_get((self.state.step, self.state.guard))
        self.progress.reconcile(
            int(step), int(guard.total), self.samples_per_step, self.tokens_per_step
        )
        self.tracker.consecutive_bad = int(guard.consecutive)

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
