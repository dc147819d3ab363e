"""Handling of bad steps in a row: end of the run, attribution, and rollback.

A rollback returns to the last good checkpoint; the data continue after the bad span:

    position of the data   0 ----- a ===== b ----------->
    step at first          0 ----- 10 xxxx 14               steps 11 to 14 are bad
    step after rollback                    10 -- 11 --->    continues with the data after b

The data from a to b are skipped: the same data would lead to the same bad steps, bit for bit. Later
checkpoints are removed, so that new saves can use their step numbers. If the run was rolled back to
the newest good checkpoint before and has saved none since, the previous good checkpoint is used.
"""

import collections
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
from jaxtyping import Array, Int

from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.checkpoint.replica.replicas import Replicas
from jaxforge.checkpoint.restore import Saved, start_from
from jaxforge.data import loader
from jaxforge.data.dataset import Dataset, Mixture, Streaming
from jaxforge.data.segments import Segment
from jaxforge.exit_codes import Exit
from jaxforge.program import Program
from jaxforge.state.progress import Progress
from jaxforge.state.train_state import TrainState, with_counts
from jaxforge.step.train_step import Batch, Controls, Metrics, TrainStep
from jaxforge.training.foreign import open_foreign
from jaxforge.training.health.attribution import Attribution, make_row_losses, run_twice
from jaxforge.training.saving import Position, Saver

log = logging.getLogger(__name__)


class Rollback:
    """Rolls a run back to an earlier checkpoint.

    Args:
        checkpoints: permanent checkpoints, the targets of rollbacks.
        local: non-persistent checkpoints; those after the target are removed too.
        replicas: copies in memory; those after the target are removed too.
        restore: returns state and progress of the checkpoint of a step.
        limit: `train.max_rollbacks`.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        local: Checkpoints | None,
        replicas: Replicas | None,
        restore: Callable[[int], tuple[TrainState, Progress]],
        limit: int,
    ) -> None:
        self._checkpoints, self._local, self._replicas = checkpoints, local, replicas
        self._restore, self._limit = restore, limit

    def target(self, progress: Progress) -> int | None:
        """Return the step to roll back to; None without one, or if the limit is reached."""
        if len(progress.rollbacks) >= self._limit:
            log.error("no further rollback: train.max_rollbacks = %d is reached", self._limit)
            return None
        # A save in the background may become the newest good checkpoint.
        self._checkpoints.wait()
        good = [
            step
            for step in self._checkpoints.steps()
            if self._checkpoints.progress(step).consecutive_bad == 0
        ]
        # Twice the same target: its state may be the cause, so an earlier one is used.
        is_repeated = progress.rollbacks and good and progress.rollbacks[-1]["to"] == good[-1]
        return good[-2 if is_repeated and len(good) > 1 else -1] if good else None

    def go(self, state: TrainState, progress: Progress, target: int) -> TrainState:
        """Restore a checkpoint in place of the current state.

        Args:
            state: the current state; its arrays are deleted.
            progress: the counters of the run; they are rolled back, except for data positions.
            target: the step to restore.

        Returns:
            The state to continue with.
        """
        jax.tree.map(lambda array: array.delete(), state)  # two states would not fit
        state, earlier = self._restore(target)
        # Later checkpoints hold the bad steps, and their numbers will be used again.
        for checkpoints in filter(None, (self._checkpoints, self._local)):
            checkpoints.discard_after(target)
        if self._replicas:
            self._replicas.discard_after(target)
        log.warning(
            "rolled back from step %d to step %d; the %d samples drawn since then are skipped",
            progress.step, target, progress.samples - earlier.samples,
        )  # fmt: skip
        # Positions in the data do not roll back: the bad span is skipped.
        progress.roll_back_to(earlier)
        return with_counts(state, progress)


class BadSteps:
    """Tracks the bad steps of a run.

    Args:
        limit: `train.nan_consecutive_max`.
        rollback: returns to an earlier checkpoint; None if rollback is disabled.
        attribution: distinguishes hardware faults from bad data; None if it is disabled.
        verify_interval: `train.verify_interval`; 0 never verifies a step.
        read: reads metrics from the devices (`Program.read_metrics`).

    Attributes:
        fault: the reason to end the run that attribution or verification determined.
    """

    def __init__(
        self,
        limit: int,
        rollback: Rollback | None = None,
        attribution: Attribution | None = None,
        verify_interval: int = 0,
        read: Callable[[Any], Any] = jax.device_get,
    ) -> None:
        self._read = read
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
        """Return the tracker with the reactions and checks that `[train]` enables."""
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
        return cls(
            train.nan_consecutive_max, rollback, attribution, train.verify_interval,
            program.read_metrics,
        )  # fmt: skip

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
        """Execute the next step twice; different results are a `fault`."""
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
        """
        # After a halt, steps change nothing: there is no new step to examine.
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
        # Element 0 is the previous step, which the device has finished or soon will.
        if len(self._consecutive) == 2:
            before = int(self._read({"consecutive": self._consecutive[0]})["consecutive"])
            if before >= self._limit:
                progress.consecutive_bad = before
        return self.has_halted(progress)

    def has_halted(self, progress: Progress) -> bool:
        """Return whether the state no longer changes, after too many bad steps in a row."""
        return progress.consecutive_bad >= self._limit

    def clear(self) -> None:
        """Forget the steps before a rollback."""
        self._consecutive.clear()


log = logging.getLogger(__name__)
