"""The training loop: `Trainer.train`. Everything periodic goes by the number of steps attempted."""

import collections
import contextlib
import dataclasses
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxforge.config.job import JobConfig
from jaxforge.errors import StorageError
from jaxforge.exit_codes import AGREED
from jaxforge.state.progress import Progress
from jaxforge.state.train_state import TrainState
from jaxforge.step.train_step import Batch, CompiledSteps, Controls, Metrics
from jaxforge.telemetry.profiler import Profiler
from jaxforge.telemetry.tracker import Tracker
from jaxforge.training.activations import ActivationCapture
from jaxforge.training.early_stop import EarlyStop
from jaxforge.training.exit_report import check_learned, exit_code, log_already_complete, tell_end
from jaxforge.training.health.actions import PeriodicActions, collecting_garbage
from jaxforge.training.health.attribution import Attribution
from jaxforge.training.health.watchdog import Watchdog
from jaxforge.training.hooks import HookRunner, StepContext
from jaxforge.training.preemption import Exit, Exits, Interrupted, Signals
from jaxforge.training.resumable_evaluation import ResumableEvaluation
from jaxforge.training.rollback import Rollback
from jaxforge.training.sampling import Sampler
from jaxforge.training.saving import Saver
from jaxforge.training.training_data import TrainingData

log = logging.getLogger(__name__)


@dataclasses.dataclass
class Trainer:
    """A run in motion. Built by `jaxforge.training.build`.

    Attributes:
        config: the validated config.
        state: parameters, optimizer state, counters; replaced by every step.
        progress: the host's counters.
        lower_step: traces the step for such a batch; what it returns compiles it.
        data: the batches.
        evaluation: evaluates on the sets of `[eval]`; None without one.
        saver: saves.
        rollback: takes the run back, where that is asked for.
        attribution: finds out whose fault a bad step is, where that is asked for.
        watchdog: ends the process where it hangs.
        open_actions: what is done every so many steps, given the compiled step.
        tracker: where metrics are logged.
        profiler: traces some of the steps.
        hooks: the user's own code.
        sampler: has the model write samples; None where none are asked for.
        activations: captures them; None where none are asked for.
        since: when the command began, by `time.monotonic`; None: when the loop does.
    """

    config: JobConfig
    state: TrainState
    progress: Progress
    lower_step: Callable[[Batch], Callable[[], CompiledSteps]]
    data: TrainingData
    evaluation: ResumableEvaluation | None
    saver: Saver
    rollback: Rollback | None
    attribution: Attribution | None
    watchdog: Watchdog
    open_actions: Callable[[CompiledSteps], PeriodicActions]
    tracker: Tracker
    profiler: Profiler
    hooks: HookRunner
    sampler: Sampler | None = None
    activations: ActivationCapture | None = None
    since: float | None = None
    _train_step: CompiledSteps = dataclasses.field(init=False)
    _actions: PeriodicActions = dataclasses.field(default_factory=PeriodicActions, init=False)
    _fault: Exit | None = dataclasses.field(default=None, init=False)
    _bad_in_a_row: collections.deque[Any] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=2), init=False
    )  # after the latest two steps, on the device

    def train(self, signals: Signals) -> Exit:
        """Steps until `max_steps`, or until there is another reason to stop."""
        exits = Exits(self.config.train, signals, self.since)
        self.hooks.on_train_begin(self.config)
        try:
            reason = self._begin(signals, exits)
            while reason is None:
                with self.profiler.around(self.progress.step + 1, self.tracker.paused):
                    metrics = self._step(signals)
                if self._is_something_due and self._had_ended():
                    reason = self._go_back()
                    continue
                self._run_hooks(metrics)
                reason = self._between_steps(signals, exits)
        except Interrupted:  # between steps: while compiling, or waiting for data
            reason = exits.requested(self.progress.step)
            assert reason is not None
            self._save()
        return reason if reason is Exit.UNHEALTHY else self._finish(reason)

    def _begin(self, signals: Signals, exits: Exits) -> Exit | None:
        """Gets ready for the first step; a run may resume in an evaluation, or at its end."""
        wanted = self.rollback or (self.progress.step == 0 and self.saver.is_due(0))
        if wanted and self.saver.latest() is None:
            self._save()  # a rollback must have something to go back to
        reason = self._between_steps(signals, exits) if self.progress.validation else None
        if reason is None and self.progress.step < self.config.train.max_steps:
            with signals.interrupting(), self.watchdog.naming("loading data"):
                self.data.open(self.progress)
                batch = self.data.peek()
            with self.watchdog.naming("compiling"):
                with signals.interrupting():
                    compile_step = self.lower_step(batch)
                self._train_step = signals.wait_for(compile_step)
            self._actions = self.open_actions(self._train_step)
        elif reason is None:
            log_already_complete(self.config.train, self.progress)
            reason = Exit.COMPLETED
        self.tracker.start_clock()
        return reason

    def _between_steps(self, signals: Signals, exits: Exits) -> Exit | None:
        if self._fault:
            return self._fault  # unsaved: what these devices made is not to be trusted
        self._check_saves(signals)
        self._note_durable()
        evaluation = self._evaluate_if_due(exits)
        self._sample_if_due()
        self._capture_if_due()
        reason = self._actions.run(self.progress.step, self.state, self.tracker.paused)
        if reason is Exit.UNHEALTHY:
            return reason  # unsaved, for the same reason
        self._save_if_due(evaluation)
        reason = reason or self._early_end(evaluation)
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
        """Launches one step; the metrics of the one before it are logged where they are due."""
        with self.tracker.waiting_for_data(), signals.interrupting():
            batch = next(self.data)
        self.data.note_mixture(self.progress)
        controls, first = self._controls, self.progress.samples
        self.state, metrics = self._train_step(self.state, batch, controls)
        microbatches, rows, length = batch["labels"].shape
        self.progress.advance(microbatches * rows, microbatches * rows * length)
        self.tracker.end_step(self.progress.step, metrics)
        self._bad_in_a_row.append(metrics["consecutive"])
        self.watchdog.tick(self.progress.step)
        if self.attribution and not self._had_ended() and int(metrics["consecutive"]):
            self.state, self._fault = self.attribution.examine(
                self._train_step, self.state, batch, metrics, controls, first
            )
        return metrics

    @property
    def _controls(self) -> Controls:
        """Of the next step."""
        return self.data.controls(self.progress.step, self.config.train.iterations_to_skip)

    @property
    def _is_something_due(self) -> bool:
        """Whether anything is done after the latest step beside launching the next."""
        step, after = self.progress.step, (self.sampler, self.activations)
        return (
            self.hooks.watches_steps
            or (self.evaluation is not None and self.config.eval.is_due(step))
            or any(one is not None and one.is_due(step) for one in after)
            or self.saver.is_due(step)
            or self.saver.is_local_due(step)
        )

    def _had_ended(self) -> bool:
        """Return whether the run had ended before the latest step, which then did not take place.

        The device is asked about the step before the latest, and so has work meanwhile.
        """
        if len(self._bad_in_a_row) == 2:
            before = int(self._bad_in_a_row[0])
            if before >= self.config.train.nan_consecutive_max:
                self.progress.consecutive_bad = before
        return self._halted

    def _run_hooks(self, metrics: Metrics) -> None:
        if not self.hooks.watches_steps:
            return
        self.tracker.flush()  # metrics first, then hooks
        self.hooks.on_step_end(StepContext(self.progress.step, self.state, metrics))

    def _evaluate_if_due(self, exits: Exits) -> dict[str, float]:
        """Metrics of an evaluation of this step; empty where none is due, or it was stopped."""
        step, resumed = self.progress.step, self.progress.validation is not None
        if self.evaluation is None or not (resumed or self.config.eval.is_due(step)):
            return {}
        if not resumed:
            self.hooks.on_eval_begin(step)

        def asked_to_stop() -> Exit | None:
            self.watchdog.tick()
            return exits.requested_in_evaluation()

        with (
            self.tracker.paused(),
            collecting_garbage(self.config),
            self.watchdog.section("evaluation"),
        ):
            metrics = self.evaluation.run(self.state, self.progress, asked_to_stop)
        if metrics is None:
            return {}
        self.tracker.log(step, metrics)
        self.hooks.on_eval_end(metrics, step)
        if resumed:
            self.saver.amend(self.progress)
        return metrics

    def _sample_if_due(self) -> None:
        """Once a step: not where an evaluation was stopped, which goes on after a restart."""
        step = self.progress.step
        if self.sampler is None or self.progress.validation or not self.sampler.is_due(step):
            return
        with self._looking("sampling"):
            samples = self.sampler(self.state.variables, step)
        self.tracker.log_samples(step, samples)

    def _capture_if_due(self) -> None:
        """Once a step, likewise."""
        step = self.progress.step
        if self.activations is None or self.progress.validation:
            return
        if self.activations.is_due(step):
            with self._looking("capturing activations"):
                self.activations(self.state.variables, step, self.watchdog.tick)

    @contextlib.contextmanager
    def _looking(self, doing: str) -> Iterator[None]:
        """While the model is looked at, which is no part of a step."""
        with (
            self.tracker.paused(),
            self.watchdog.section("evaluation"),
            self.watchdog.naming(doing),
        ):
            yield

    def _save_if_due(self, evaluation: dict[str, float]) -> None:
        """Saves on the schedule, after the last step, and a new best that is to be kept."""
        metric, step = self.config.checkpoint.best_metric, self.progress.step
        new_best = bool(evaluation) and self.progress.note_metric(evaluation[metric])
        if self._at_end or self.saver.is_due(step, new_best=new_best):
            self._save(evaluation)
        elif self.saver.is_local_due(step):
            self._save(lasting=False)

    def _save(self, evaluation: dict[str, float] | None = None, *, lasting: bool = True) -> None:
        with self.tracker.paused(), self.watchdog.section("checkpoint"):
            self._follow_device()
            if self._halted:
                return  # its parameters are those of the last good step, and its end is near
            path, metrics = self.saver.save(self.progress, self.state, evaluation, lasting=lasting)
        if path is not None:
            self.tracker.log(self.progress.step, metrics)
            if lasting:
                self.hooks.on_checkpoint_save(self.progress.step, path)

    def _note_durable(self) -> None:
        durable = list(self.saver.newly_durable())
        if durable and self._had_ended():
            self._follow_device()  # for the number of the last step that took place
        for metrics in durable:
            self.tracker.log(self.progress.step, metrics)

    def _early_end(self, evaluation: dict[str, float]) -> Exit | None:
        """Early stopping, by what was logged last and evaluated now: the same on every process."""
        step, metrics = self.progress.step, self.tracker.take_logged() | evaluation
        why = EarlyStop(self.config.early_stop, self.progress.early_stop).reason(step, metrics)
        if why is None:
            return None
        log.info("stopping early at step %d: %s", step, why)
        return Exit.EARLY_STOPPED

    def _reason_to_stop(self, exits: Exits) -> Exit | None:
        if stop := exits.requested(self.progress.step):
            self._save()  # raises where the reason is a save that failed, on any process
            return stop
        if self._halted:
            return self._go_back()
        return Exit.COMPLETED if self._at_end else None

    @property
    def _at_end(self) -> bool:
        return self.progress.step >= self.config.train.max_steps

    @property
    def _halted(self) -> bool:
        return self.progress.consecutive_bad >= self.config.train.nan_consecutive_max

    def _go_back(self) -> Exit | None:
        """Back to the last good checkpoint, where that is asked for and helps."""
        self._follow_device()
        target = self.rollback.target(self.progress) if self.rollback else None
        if self.rollback is None or target is None:
            return Exit.NON_FINITE
        with (
            self.tracker.paused(),
            self.watchdog.section("checkpoint"),
            self.watchdog.naming("going back"),
        ):
            self.state = self.rollback.go(self.state, self.progress, target)
            self.data.open(self.progress)
        self.tracker.rewind()
        self._bad_in_a_row.clear()
        self.tracker.log(target, {"train/rollbacks": float(len(self.progress.rollbacks))})
        return None

    def _finish(self, reason: Exit) -> Exit:
        self._follow_device()
        if self._halted and not self.rollback:
            reason = Exit.NON_FINITE
            self.tracker.log_latest()
        with self.watchdog.section("checkpoint"):
            self.saver.wait()
        self._note_durable()
        if reason in (Exit.COMPLETED, Exit.EARLY_STOPPED):
            check_learned(self.config.train, self.progress)
        tell_end(reason, self.config.train, self.progress, self.saver.latest())
        return reason

    def close(self, reason: Exit | None) -> Exit | None:
        """Ends the run, however it went: waits for saves, tells the hooks, closes the sinks.

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
            if not self.tracker.close(exit_code(reason, failure)):
                losses.append(StorageError("metrics are lost"))

        with contextlib.ExitStack() as last_to_first:  # each runs, whatever the others do
            last_to_first.callback(noting_losses, self.saver.close_mirror)
            last_to_first.push(close_tracker)
            last_to_first.callback(self._actions.close)
            last_to_first.callback(noting_losses, self.hooks.on_train_end, step, tokens, reason)
            last_to_first.callback(self.saver.close, together=reason in AGREED)
            last_to_first.callback(self.profiler.close)
        return Exit.STORAGE if losses else reason

    def _follow_device(self) -> None:
        """Takes the device's word on which steps were attempted and which were bad."""
        self.tracker.flush()
        state = self.state
        self.progress.follow(*jax.device_get((state.step, state.guard, state.counts)))
