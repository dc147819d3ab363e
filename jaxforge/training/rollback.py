"""Takes a run back to its last good checkpoint, and its data past the bad span.

The data are not read again: what was drawn since that checkpoint led to where the run could not go
on, and would lead there again, bit for bit. Later checkpoints are removed, so that later saves
find their place free. Where the newest good checkpoint was gone back to before, and nothing was
saved since, the one before it takes its turn.
"""

import logging
from collections.abc import Callable

import jax

from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.state.progress import Progress
from jaxforge.state.train_state import TrainState, with_counts

log = logging.getLogger(__name__)


class Rollback:
    """Rollback to an earlier checkpoint.

    Args:
        checkpoints: the run's; it goes back to one of them.
        local: those that need not last; later ones of them go, too.
        restore: state and progress of a step.
        limit: `train.max_rollbacks`.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        local: Checkpoints | None,
        restore: Callable[[int], tuple[TrainState, Progress]],
        limit: int,
    ) -> None:
        self._checkpoints, self._local = checkpoints, local
        self._restore, self._limit = restore, limit

    def target(self, progress: Progress) -> int | None:
        """The step to go back to; None if there is none, or the limit is reached."""
        if len(progress.rollbacks) >= self._limit:
            log.error("train.max_rollbacks = %d rollbacks did not help", self._limit)
            return None
        self._checkpoints.wait()
        good = [step for step in self._checkpoints.steps() if self._is_good(step)]
        again = progress.rollbacks and good and progress.rollbacks[-1]["to"] == good[-1]
        return good[-2 if again and len(good) > 1 else -1] if good else None

    def go(self, state: TrainState, progress: Progress, target: int) -> TrainState:
        """The state to go on from; `state` is given up, and `progress` goes back."""
        jax.tree.map(lambda array: array.delete(), state)  # two would not fit
        state, earlier = self._restore(target)
        for checkpoints in filter(None, (self._checkpoints, self._local)):
            checkpoints.discard_after(target)
        log.warning(
            "went back from step %d to step %d; %d samples drawn since are left out",
            progress.step, target, progress.samples - earlier.samples,
        )  # fmt: skip
        progress.roll_back_to(earlier)
        return with_counts(state, progress)

    def _is_good(self, step: int) -> bool:
        return self._checkpoints.progress(step).consecutive_bad == 0
