"""Rollback of a run to its last good checkpoint; the data continue after the bad span.

    position of the data   0 ----- a ===== b ----------->
    step at first          0 ----- 10 xxxx 14               steps 11 to 14 are bad
    step after rollback                    10 -- 11 --->    continues with the data after b

The data from a to b are skipped: the same data would lead to the same bad steps, bit for bit. Later
checkpoints are removed, so that new saves can use their step numbers. If the run was rolled back to
the newest good checkpoint before and has saved none since, the previous good checkpoint is used.
"""

import logging
from collections.abc import Callable

import jax

from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.checkpoint.replica.replicas import Replicas
from jaxforge.state.progress import Progress
from jaxforge.state.train_state import TrainState, with_counts

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
        self._checkpoints.wait()
        good = [
            step
            for step in self._checkpoints.steps()
            if self._checkpoints.progress(step).consecutive_bad == 0
        ]
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
        for checkpoints in filter(None, (self._checkpoints, self._local)):
            checkpoints.discard_after(target)
        if self._replicas:
            self._replicas.discard_after(target)
        log.warning(
            "rolled back from step %d to step %d; the %d samples drawn since then are skipped",
            progress.step, target, progress.samples - earlier.samples,
        )  # fmt: skip
        progress.roll_back_to(earlier)
        return with_counts(state, progress)
