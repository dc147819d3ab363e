"""`[scheduler]`: the learning rate over the run."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat

from jaxforge.config.section import Section
from jaxforge.registry import Registry

SCHEDULERS = Registry("scheduler.name", "cosine", "linear", "wsd", "constant", "rex", "none")
"""Schedules: `optim.schedule`."""


class SchedulerConfig(Section):
    """Learning-rate factor of each update, multiplied with optimizer.lr."""

    name: Annotated[str, SCHEDULERS] = "cosine"
    """Shape after the warm-up; none is 1 throughout, without warm-up."""
    warmup_steps: NonNegativeInt = 2000
    """Updates over which the factor rises from 0 to 1."""
    decay_steps: NonNegativeInt | None = None
    """Updates from the end of the plateau to min_lr_ratio; 0 or not set means all that are left."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Factor at the end of the decay."""
    stable_steps: NonNegativeInt | None = None
    """Updates at factor 1 between warm-up and decay (wsd)."""
    wsd_decay_type: Literal["cosine", "linear", "sqrt"] = "cosine"
    """Shape of the decay (wsd)."""
    rex_alpha: PositiveFloat = 1.0
    """Exponent of the decay (rex)."""
