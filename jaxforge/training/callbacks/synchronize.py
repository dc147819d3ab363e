"""Waiting for the devices now and then: `train.train_sync_interval`."""

import jax

from jaxforge.training.callbacks.callback import Callback, IntervalContext


class Synchronize(Callback):
    """Waits for the devices, so that the host is never further ahead than the interval.

    Args:
        interval: in steps.
    """

    def __init__(self, interval: int) -> None:
        self.every = interval

    def on_interval(self, context: IntervalContext) -> None:
        """Wait until the state is computed."""
        jax.block_until_ready(context.state)
