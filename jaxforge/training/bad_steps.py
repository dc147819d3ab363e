"""Bad steps in a row: whether they end the run, whose fault they are, and the way back."""

import collections
from collections.abc import Callable

from jax.sharding import Mesh
from jaxtyping import Array, Int

from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.config.job import JobConfig
from jaxforge.data import loader
from jaxforge.data.dataset import Dataset, Mixture, Streaming
from jaxforge.data.mixture import Segment
from jaxforge.exit_codes import Exit
from jaxforge.model.transformer import Model
from jaxforge.state.progress import Progress
from jaxforge.state.train_state import TrainState
from jaxforge.training.health.attribution import Attribution, make_row_losses
from jaxforge.training.rollback import Rollback


class BadSteps:
    """Watches the bad steps of a run.

    Args:
        limit: `train.nan_consecutive_max`.
        rollback: takes the run back, where that is asked for.
        attribution: finds out whose fault a bad step is, where that is asked for.

    Attributes:
        fault: a reason to end the run that attribution found.
    """

    def __init__(
        self,
        limit: int,
        rollback: Rollback | None = None,
        attribution: Attribution | None = None,
    ) -> None:
        self._limit, self.rollback, self.attribution = limit, rollback, attribution
        self.fault: Exit | None = None
        # After the latest two steps, on the device.
        self._consecutive: collections.deque[Int[Array, ""]] = collections.deque(maxlen=2)

    @classmethod
    def of(
        cls,
        config: JobConfig,
        mesh: Mesh,
        model: Model,
        dataset: Dataset | Mixture | Streaming,
        progress: Progress,
        checkpoints: tuple[Checkpoints, Checkpoints | None],
        restore: Callable[[int], tuple[TrainState, Progress]],
    ) -> "BadSteps":
        """Make what the `[train]` section asks for.

        Args:
            config: a resolved config.
            mesh: of the run.
            model: the model.
            dataset: the training data.
            progress: the counters of the run.
            checkpoints: lasting and local ones.
            restore: state and progress of a checkpoint's step.
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
        return cls(train.nan_consecutive_max, rollback, attribution)

    def note(self, consecutive: Int[Array, ""]) -> None:
        """Take the number of bad steps in a row after the latest step, still on the device."""
        self._consecutive.append(consecutive)

    def had_halted(self, progress: Progress) -> bool:
        """Return whether the run had ended before the latest step, which then did not take place.

        The device is asked about the step before the latest, and so has work meanwhile.
        """
        if len(self._consecutive) == 2:
            before = int(self._consecutive[0])
            if before >= self._limit:
                progress.consecutive_bad = before
        return self.has_halted(progress)

    def has_halted(self, progress: Progress) -> bool:
        """Return whether the state stands still after too many bad steps in a row."""
        return progress.consecutive_bad >= self._limit

    def clear(self) -> None:
        """Forget the steps before a rollback."""
        self._consecutive.clear()
