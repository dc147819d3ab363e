"""Handling of bad steps in a row: end of the run, attribution and rollback."""

import collections
from collections.abc import Callable

from jax.sharding import Mesh
from jaxtyping import Array, Int

from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.checkpoint.replica.replicas import Replicas
from jaxforge.config.job import JobConfig
from jaxforge.data import loader
from jaxforge.data.dataset import Dataset, Mixture, Streaming
from jaxforge.data.segments import Segment
from jaxforge.exit_codes import Exit
from jaxforge.model.transformer import Model
from jaxforge.state.progress import Progress
from jaxforge.state.train_state import TrainState
from jaxforge.training.health.attribution import Attribution, make_row_losses
from jaxforge.training.rollback import Rollback


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
        self.attribution, self._verify_interval = attribution, verify_interval
        self.fault: Exit | None = None
        # Bad steps in a row after the latest two steps, on the device. The latest of them is not
        # read, so that the host never waits for the step that it has just launched.
        self._consecutive: collections.deque[Int[Array, ""]] = collections.deque(maxlen=2)

    @classmethod
    def of(
        cls,
        config: JobConfig,
        mesh: Mesh,
        model: Model,
        dataset: Dataset | Mixture | Streaming,
        progress: Progress,
        checkpoints: tuple[Checkpoints, Checkpoints | None, Replicas | None],
        restore: Callable[[int], tuple[TrainState, Progress]],
    ) -> "BadSteps":
        """Return the tracker with the reactions and checks that `[train]` enables.

        Args:
            config: the resolved config.
            mesh: the mesh of the run.
            model: the model.
            dataset: the training data.
            progress: the counters of the run.
            checkpoints: permanent and non-persistent checkpoints, and replicas.
            restore: returns state and progress of the checkpoint of a step.
        """
        train = config.train
        rollback = attribution = None
        if "rollback" in (train.on_nonfinite, train.on_spike):
            rollback = Rollback(*checkpoints, restore, train.max_rollbacks)

        def name_of(index: int) -> str:
            drawn = [Segment(*segment) for segment in progress.mixtures]
            return loader.describe_sample(config, mesh, dataset, drawn, index)

        if train.rerun_bad_steps:
            attribution = Attribution(make_row_losses(model, train, mesh), name_of)
        return cls(train.nan_consecutive_max, rollback, attribution, train.verify_interval)

    def should_verify(self, number: int) -> bool:
        """Return whether the step with this number is to be executed twice."""
        return self._verify_interval > 0 and number % self._verify_interval == 0

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
