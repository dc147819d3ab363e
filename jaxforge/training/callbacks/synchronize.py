"""Periodic synchronization with the devices: `train.train_sync_interval`."""

import jax

from jaxforge.training.callbacks.callback import IntervalContext
from jaxforge.training.callbacks.run_callback import RunCallback, RunParts


class Synchronize(RunCallback):
    """Waits for the devices, so that the host is at most one interval ahead.

    Args:
        interval: interval in steps.
    """

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
