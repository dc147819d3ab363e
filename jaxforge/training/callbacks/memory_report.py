"""A log message about the memory of the devices after the first step."""

import logging

import jax

from jaxforge.step.train_step import CompiledSteps
from jaxforge.telemetry.measures import describe_memory
from jaxforge.training.callbacks.callback import IntervalContext
from jaxforge.training.callbacks.run_callback import RunCallback, RunParts

log = logging.getLogger(__name__)


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
