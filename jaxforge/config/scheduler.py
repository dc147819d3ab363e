"""`[scheduler]`: the learning rate over the run."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from jaxforge.config.duration import Steps
from jaxforge.config.section import Section
from jaxforge.registry import Registry

SCHEDULERS = Registry("scheduler.name", "cosine", "linear", "wsd", "constant", "rex", "none")
"""Schedules: `optim.schedule`."""


class SchedulerConfig(Section):
    """Learning-rate factor of each update, multiplied with optimizer.lr."""

    name: Annotated[str, SCHEDULERS] = "cosine"
    """Shape after the warm-up; none is 1 throughout, without warm-up."""
    warmup_steps: Steps = 2000
    """Updates over which the factor rises from 0 to 1; not set: at most a tenth of the run."""
    warmup_offset: Annotated[int, Field(ge=0, le=1)] = 0
    """With 1 the first update has factor 1/warmup_steps, and not 0."""
    decay_steps: Steps | None = None
    """Updates from the end of the plateau to min_lr_ratio; 0 or not set means all that are left."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Factor at the end of the decay."""
    stable_steps: Steps | None = None
    """Updates at factor 1 between warm-up and decay (wsd)."""
    wsd_decay_type: Literal["cosine", "linear", "sqrt"] = "cosine"
    """Shape of the decay (wsd)."""
    rex_alpha: PositiveFloat = 1.0
    """Exponent of the decay (rex)."""
    unit: Literal["updates", "samples"] = "updates"
    """What the factor follows between these updates; it shows where train.batch_ramp is set."""

    def boundaries(self, max_steps: int) -> tuple[int, int, int]:
        """Updates made at the end of the warm-up, the begin of the decay and its end.

        Args:
            max_steps: of the run.

        Returns:
            Three numbers; the last is not the largest where there is no room for a decay.
        """
        stable = (self.stable_steps or 0) if self.name == "wsd" else 0
        begin = self.warmup_steps + stable
        end = begin + self.decay_steps if self.decay_steps else max_steps
        if self.name == "rex":
            end = max(end, begin + 1)
        return self.warmup_steps, begin, end
