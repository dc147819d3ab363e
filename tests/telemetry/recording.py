"""Sinks that record, and metrics of a step."""

import numpy as np

from jaxforge.state.progress import Progress
from jaxforge.state.train_state import Counts


class RecordingSink:
    """A sink that records metrics."""

    def __init__(self, fails=()):
        self.lines, self.fails, self.closed = {}, set(fails), False

    def write(self, step, metrics):
        if step in self.fails:
            raise OSError(28, "No space left on device")
        self.lines[step] = metrics

    def close(self, exit_code):
        self.closed = True


def scalars(step, loss=1.0, skipped=0, tokens=0):
    values = {
        "step": step,
        "loss": loss,
        "grad_norm": 2.0,
        "lr": 0.5,
        "skipped": skipped,
        "consecutive": 0,
        "nonfinite": 0,
        "spikes": 0,
    }
    counts = Counts.of(Progress(samples=step, tokens=tokens))
    return {name: np.float32(value) for name, value in values.items()} | {"counts": counts}
