"""`Position`: how far a run has come."""

import dataclasses

import jax

from jaxforge.state.progress import Progress
from jaxforge.state.train_state import TrainState
from jaxforge.telemetry.tracker import Tracker


@dataclasses.dataclass
class Position:
    """The state on the devices and the counters of the host.

    Attributes:
        state: parameters, optimizer state and counters; replaced by every step.
        progress: the counters of the host. Those of bad steps are behind the device until
            `follow_device`.
        max_steps: steps of the whole run.
    """

    state: TrainState
    progress: Progress
    max_steps: int

    @property
    def step(self) -> int:
        """Steps attempted."""
        return self.progress.step

    @property
    def is_last(self) -> bool:
        """True after the last step of the run."""
        return self.progress.step >= self.max_steps

    def follow_device(self, tracker: Tracker) -> None:
        """Synchronize the counters from the device state, after the metrics of all its steps."""
        tracker.flush()
        state = self.state
        self.progress.sync_from_device(*jax.device_get((state.step, state.guard, state.counts)))
