"""Python's garbage, collected by hand: `train.manual_gc_interval`."""

import contextlib
import gc
from collections.abc import Iterator

from jaxforge.config.job import JobConfig
from jaxforge.step.train_step import CompiledSteps
from jaxforge.training.callbacks.callback import IntervalContext
from jaxforge.training.callbacks.run_callback import RunCallback, RunParts


class CollectGarbage(RunCallback):
    """Collects on its interval only, so that no host pauses while the others wait for it.

    It does so while the devices compute. What is alive when it first runs stays for the whole
    run, and is not looked at again. Source: Megatron's `manual_gc`, torchtitan's `gc_freq`.

    Args:
        interval: in steps.
    """

    waits = False

    def __init__(self, interval: int) -> None:
        self.every = interval
        self._is_frozen, self._was_enabled = False, False

    @classmethod
    def of_run(cls, run: RunParts) -> "CollectGarbage | None":
        """Return the callback if `train.manual_gc_interval` is set."""
        interval = run.config.train.manual_gc_interval
        return cls(interval) if interval else None

    def on_compiled(self, steps: CompiledSteps) -> None:
        """Turn Python's own collection off."""
        self._was_enabled = gc.isenabled()
        gc.disable()

    def on_interval(self, context: IntervalContext) -> None:
        """Collect."""
        gc.collect()
        if not self._is_frozen:
            gc.freeze()
            self._is_frozen = True

    def close(self) -> None:
        """Leave the collection to Python again."""
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()


@contextlib.contextmanager
def collecting_garbage(config: JobConfig) -> Iterator[None]:
    """Collect before and after an evaluation, where garbage is collected by hand."""
    by_hand = config.train.manual_gc_interval > 0
    if by_hand:
        gc.collect()
    yield
    if by_hand:
        gc.collect(0)
