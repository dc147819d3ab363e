"""Schedule of checkpoints as a function of the step.

Within `[checkpoint.dyn_ckpt_window]`, checkpoints are due at the steps of the window, elsewhere at
every multiple of `checkpoint.interval`, and before the batch grows (`train.batch_ramp`).
"""

import heapq
import itertools
from collections.abc import Iterator

from jaxforge.config.checkpoint import DynCkptWindow
from jaxforge.config.job import JobConfig


class SavePolicy:
    """Steps after which a run saves.

    Args:
        config: resolved config.
    """

    def __init__(self, config: JobConfig) -> None:
        self._interval, self._window = config.checkpoint.interval, config.checkpoint.dyn_ckpt_window
        self._milestones = frozenset(milestones(self._window))
        self._growth = {stage.start for stage in config.train.stages()} - {0}

    def __call__(self, step: int) -> bool:
        """Return whether a checkpoint is due after `step` updates; 0 means the initial weights."""
        if self.is_milestone(step) or step in self._growth:
            return True
        window = self._window
        if step == 0 or (window and window.start <= step <= window.stop):
            return False
        return step % self._interval == 0

    def is_milestone(self, step: int) -> bool:
        """Return whether `step` is a permanent checkpoint of the dense window."""
        return step in self._milestones

    def steps(self, last: int) -> Iterator[int]:
        """Iterate lazily over the due steps up to `last`, in order."""
        merged = heapq.merge(sorted(self._milestones | self._growth), self._regular(last))
        return (step for step, _ in itertools.groupby(merged) if step <= last and self(step))

    def count(self, last: int) -> int:
        """Return the number of due steps up to `last`."""
        window, regular = self._window, self._regular(last)
        within = regular[:0]
        if window:
            first = -(-window.start // self._interval) * self._interval
            within = range(max(first, self._interval), min(window.stop, last) + 1, self._interval)
        special = {step for step in self._milestones | self._growth if step <= last}
        return (
            len(regular)
            - len(within)
            + sum(step not in regular or step in within for step in special)
        )

    def _regular(self, last: int) -> range:
        return range(self._interval, last + 1, self._interval)


def milestones(window: DynCkptWindow | None) -> Iterator[int]:
    """Yield the saved steps of a window: start, and start + 1, 2, 4, 8 ... up to stop."""
    if window is None:
        return
    yield window.start
    step = window.start + 1
    while step <= window.stop:
        yield step
        step += step - window.start
