"""What is done every so many steps, beside training; `health.actions` has them all."""

from jaxforge.exit_codes import Exit
from jaxforge.state.train_state import TrainState


class PeriodicAction:
    """Something to do every so many steps.

    Args:
        interval: steps from one time to the next.
    """

    waits = True
    """Whether to run only once every launched step has ended, and off the clock."""

    def __init__(self, interval: int) -> None:
        self.interval = interval

    def run(self, step: int, state: TrainState) -> Exit | None:
        """Acts after `step`; returns why the run must end, if it must."""
        raise NotImplementedError

    def close(self) -> None:
        """At the end of the run."""
