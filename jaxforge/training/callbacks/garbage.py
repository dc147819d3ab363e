"""Manual garbage collection: `train.manual_gc_interval`."""

import contextlib
import gc
from collections.abc import Iterator

from jaxforge.config.job import JobConfig
from jaxforge.step.train_step import CompiledSteps
from jaxforge.training.callbacks.callback import IntervalContext
from jaxforge.training.callbacks.run_callback import RunCallback, RunParts


class CollectGarbage(RunCallback):
    """Collects garbage at the same steps on all hosts, so that no host pauses alone.

    It collects while the devices compute. Objects that are alive at the first collection are frozen
    and not scanned again. Source: Megatron's `manual_gc`, torchtitan's `gc_freq`.

    Args:
        interval: interval in steps.
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
        """Turn automatic collection off."""
        self._was_enabled = gc.isenabled()
        gc.disable()

    def on_interval(self, context: IntervalContext) -> None:
        """Collect garbage; freeze all living objects the first time."""
        gc.collect()
        if not self._is_frozen:
            gc.freeze()
            self._is_frozen = True

    def close(self) -> None:
        """Restore automatic collection."""
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()


@contextlib.contextmanager
def collecting_garbage(config: JobConfig) -> Iterator[None]:
    """Collect before and after an evaluation, if garbage is collected manually."""
    is_manual = config.train.manual_gc_interval > 0
    if is_manual:
        gc.collect()
    yield
    if is_manual:
        gc.collect(0)
