"""Callbacks about the process and its host: garbage, memory, synchronization, locks."""

import contextlib
import gc
import logging
from collections.abc import Iterator

import jax

from jaxforge.config.job import JobConfig
from jaxforge.step.train_step import CompiledSteps
from jaxforge.storage.run_lock import RunLock
from jaxforge.telemetry.measures import describe_memory
from jaxforge.training.callbacks.callback import IntervalContext, RunCallback, RunParts

log = logging.getLogger(__name__)


class CollectGarbage(RunCallback):
    """Collects garbage at the same steps on all hosts, so that no host pauses alone.

    It collects while the devices compute. Objects that are alive at the first collection are frozen
    and not scanned again. Source: Megatron's `manual_gc`, torchtitan's `gc_freq`.
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
        # All hosts collect at the same step: none waits for the pause of another one.
        gc.collect()
        if not self._is_frozen:
            # Model, config and modules live as long as the run; scanning them again costs seconds.
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


class Synchronize(RunCallback):
    """Waits for the devices, so that the host is at most one interval ahead."""

    def __init__(self, interval: int) -> None:
        self.every = interval

    @classmethod
    def of_run(cls, run: RunParts) -> "Synchronize | None":
        """Return the callback if `train.train_sync_interval` is set."""
        interval = run.config.train.train_sync_interval
        return cls(interval) if interval else None

    def on_interval(self, context: IntervalContext) -> None:
        """Wait until the state is computed."""
        jax.block_until_ready(context.state)


class MemoryReport(RunCallback):
    """Logs the memory use of the devices after the first step of this process."""

    every = 1
    waits = False
    _compiled: jax.stages.Compiled | None = None
    _is_logged = False

    @classmethod
    def of_run(cls, run: RunParts) -> "MemoryReport":
        """Return the callback of every run."""
        return cls()

    def on_compiled(self, steps: CompiledSteps) -> None:
        """Store the step of the largest batch for the report."""
        self._compiled = steps.largest

    def on_interval(self, context: IntervalContext) -> None:
        """Wait for the first step and log the report, once."""
        if self._is_logged:
            return
        self._is_logged = True
        jax.block_until_ready(context.state)
        if text := describe_memory(jax.local_devices(), self._compiled):
            log.info("[Rank %d] (after %d iterations) %s", jax.process_index(), context.step, text)


class DirectoryLock(RunCallback):
    """Ends a run whose directory another job has locked, before it overwrites files there."""

    every = 1
    waits = False

    def __init__(self, lock: RunLock) -> None:
        self._lock = lock

    @classmethod
    def of_run(cls, run: RunParts) -> "DirectoryLock":
        """Return the callback of every run."""
        return cls(run.lock)

    def on_interval(self, context: IntervalContext) -> None:
        """Check the lock.

        Raises:
            StorageError: the run directory is gone.
            UserError: another job holds the lock.
        """
        self._lock.check()
