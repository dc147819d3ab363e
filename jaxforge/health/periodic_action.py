"""The shape of what looks after a run between its steps; `health.actions` has them all."""

from jaxforge.exit_codes import Exit
from jaxforge.state.train_state import TrainState


class Watch:
    """Something to look at every so many steps.

    Args:
        interval: steps between looks.
    """

    waits = True
    """Whether to look only once every launched step has ended, and off the clock."""

    def __init__(self, interval: int) -> None:
        self.interval = interval

    def look(self, step: int, state: TrainState) -> Exit | None:
        """Looks after `step`; returns why the run must end, if it must."""
        raise NotImplementedError

    def close(self) -> None:
        """At the end of the run."""
