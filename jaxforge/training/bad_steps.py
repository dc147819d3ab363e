"""Handling of bad steps in a row: end of the run, attribution and rollback."""

import collections
from collections.abc import Callable
from contextlib import AbstractContextManager

from jaxtyping import Array, Int

from jaxforge.checkpoint.restore import Saved, start_from
from jaxforge.data import loader
from jaxforge.data.dataset import Dataset, Mixture, Streaming
from jaxforge.data.segments import Segment
from jaxforge.exit_codes import Exit
from jaxforge.program import Program
from jaxforge.state.progress import Progress
from jaxforge.state.train_state import TrainState
from jaxforge.step.train_step import Batch, Controls, Metrics, TrainStep
from jaxforge.training.foreign import open_foreign
from jaxforge.training.health.attribution import Attribution, make_row_losses
from jaxforge.training.health.repeated_steps import run_twice
from jaxforge.training.position import Position
from jaxforge.training.rollback import Rollback
from jaxforge.training.saving import Saver


class BadSteps:
    """Tracks the bad steps of a run.

    Args:
        limit: `train.nan_consecutive_max`.
        rollback: returns to an earlier checkpoint; None if rollback is disabled.
        attribution: distinguishes hardware faults from bad data; None if it is disabled.
        verify_interval: `train.verify_interval`; 0 never verifies a step.

    Attributes:
        fault: the reason to end the run that attribution or verification determined.
    """

    def __init__(
        self,
        limit: int,
        rollback: Rollback | None = None,
        attribution: Attribution | None = None,
        verify_interval: int = 0,
    ) -> None:
        self._limit, self.rollback = limit, rollback
        self._attribution, self._verify_interval = attribution, verify_interval
        self.fault: Exit | None = None
        # Bad steps in a row after the latest two steps, on the device. The latest of them is not
        # read, so that the host never waits for the step that it has just launched.
        self._consecutive: collections.deque[Int[Array, ""]] = collections.deque(maxlen=2)

    @classmethod
    def of(
        cls,
        program: Program,
        dataset: Dataset | Mixture | Streaming,
        progress: Progress,
        saver: Saver,
    ) -> "BadSteps":
        """Return the tracker with the reactions and checks that `[train]` enables.

        Args:
            program: the program of the run.
            dataset: the training data.
            progress: the counters of the run.
            saver: the checkpoints of the run.
        """
        config, mesh = program.config, program.mesh

        def restore(step: int) -> tuple[TrainState, Progress]:
            source = Saved(saver.permanent, step)
            return start_from(source, program, open_foreign=open_foreign)

        train = config.train
        rollback = attribution = None
        if "rollback" in (train.on_nonfinite, train.on_spike):
            rollback = Rollback(
                saver.permanent, saver.local, saver.replicas, restore, train.max_rollbacks
            )

        def name_of(index: int) -> str:
            drawn = [Segment(*segment) for segment in progress.mixtures]
            return loader.describe_sample(config, mesh, dataset, drawn, index)

        if train.rerun_bad_steps:
            attribution = Attribution(make_row_losses(program.model, train, mesh), name_of)
        return cls(train.nan_consecutive_max, rollback, attribution, train.verify_interval)

    def should_verify(self, number: int) -> bool:
        """Return whether the step with this number is to be executed twice."""
        return self._verify_interval > 0 and number % self._verify_interval == 0

    def execute_twice(
        self,
        step: TrainStep,
        position: Position,
        batch: Batch,
        controls: Controls,
        paused: Callable[[], AbstractContextManager[None]],
    ) -> Metrics:
        """Execute the next step twice; different results are a `fault`.

        Args:
            step: the train step.
            position: its state is replaced.
            batch: the batch of the step.
            controls: the controls of the step.
            paused: excludes the first execution from step times.
        """
        position.state, metrics, self.fault = run_twice(
            step, position.state, batch, controls, paused
        )
        return metrics

    def examine(
        self,
        step: TrainStep,
        position: Position,
        batch: Batch,
        metrics: Metrics,
        controls: Controls,
        first: int,
    ) -> None:
        """Attribute the latest step, if it was bad and `train.rerun_bad_steps` asks for it.

        The host waits for the step, which may end the run with a `fault`.

        Args:
            step: the train step.
            position: its state may be replaced by an equal one.
            batch: the batch of the step.
            metrics: the metrics of the step.
            controls: the controls of the step.
            first: sequences drawn before the step.
        """
        if self._attribution is None or self.fault or self.had_halted(position.progress):
            return
        if int(metrics["consecutive"]):
            position.state, self.fault = self._attribution.examine(
                step, position.state, batch, metrics, controls, first
            )

    def note(self, consecutive: Int[Array, ""]) -> None:
        """Record the number of bad steps in a row after the latest step, still on the device."""
        self._consecutive.append(consecutive)

    def had_halted(self, progress: Progress) -> bool:
        """Return whether the run had halted before the latest step, which then changed nothing.

        This reads the result of the previous step, while the device computes the latest one.
        """
        if len(self._consecutive) == 2:
            before = int(self._consecutive[0])
            if before >= self._limit:
                progress.consecutive_bad = before
        return self.has_halted(progress)

    def has_halted(self, progress: Progress) -> bool:
        """Return whether the state no longer changes, after too many bad steps in a row."""
        return progress.consecutive_bad >= self._limit

    def clear(self) -> None:
        """Forget the steps before a rollback."""
        self._consecutive.clear()
