"""Slow steps, so that faults from outside hit a short run in its steps."""

import time

from jaxforge.training.callbacks.callback import Callback, StepContext


class Pace(Callback):
    """Callback that sleeps after each step."""

    def on_step_end(self, context: StepContext) -> None:
        """Sleep."""
        time.sleep(0.1)
