"""`[scheduler]` and `[early_stop]`: learning-rate schedule, and conditions that end a run early."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from jaxforge.config.duration import PositiveSteps, Steps
from jaxforge.config.eval import Mode
from jaxforge.config.facts import Interval, Needs
from jaxforge.config.section import Section
from jaxforge.registry import Registry

SCHEDULERS = Registry("scheduler.name", "cosine", "linear", "wsd", "constant", "rex", "none")
"""Registered schedules (`optim.schedule`)."""


class SchedulerConfig(Section):
    """Factor of each update on optimizer.lr."""

    name: Annotated[str, SCHEDULERS] = "cosine"
    """Shape after the warm-up; none is a constant 1 without warm-up."""
    warmup_steps: Steps = 2000
    """Updates in which the factor rises from 0 to 1; by default at most a tenth of the run."""
    warmup_offset: Annotated[int, Field(ge=0, le=1)] = 0
    """1 gives the first update the factor 1/warmup_steps instead of 0."""
    decay_steps: Steps | None = None
    """Updates of the decay to min_lr_ratio; if 0 or not set, all remaining updates."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Factor at the end of the decay."""
    stable_steps: Annotated[Steps | None, Needs("name", "wsd")] = None
    """Updates at factor 1 between warm-up and decay."""
    wsd_decay_type: Annotated[Literal["cosine", "linear", "sqrt"], Needs("name", "wsd")] = "cosine"
    """Shape of the decay."""
    rex_alpha: Annotated[PositiveFloat, Needs("name", "rex")] = 1.0
    """Exponent of the decay."""
    unit: Literal["updates", "samples"] = "updates"
    """Unit in which the factor progresses; it matters only with train.batch_ramp."""

    def boundaries(self, max_steps: int) -> tuple[int, int, int]:
        """Return the updates at the end of the warm-up, at the start of the decay and at its end.

        Returns:
            Three step counts. The last is not the largest if the run is too short for a decay.
        """
        stable = (self.stable_steps or 0) if self.name == "wsd" else 0
        begin = self.warmup_steps + stable
        end = begin + self.decay_steps if self.decay_steps else max_steps
        if self.name == "rex":
            end = max(end, begin + 1)
        return self.warmup_steps, begin, end


CONDITIONS = ("patience_steps", "target", "max_steps", "max_loss")
"""Keys that are conditions."""


class EarlyStopConfig(Section):
    """Conditions that end a run before train.max_steps, checked in the order of the keys.

    Without a condition, a run does not end early.
    """

    metric: str = "eval/loss"
    """Metric that must improve, such as eval/loss, train/loss or eval/tasks/<task>/acc."""
    mode: Mode = "auto"
    """Direction of metric: lower ("min") or higher ("max") is better; by default from its name."""
    patience_steps: Annotated[PositiveSteps | None, Interval()] = None
    """End after this many updates without improvement, checked whenever the metric is logged."""
    min_delta: NonNegativeFloat = 0.0
    """Smallest change of the metric that counts as an improvement."""
    target: float | None = None
    """End once the metric is at least as good as this value: the run measures the time to it."""
    max_steps: PositiveSteps | None = None
    """End after this many updates; the schedule still follows train.max_steps."""
    max_loss: PositiveFloat | None = None
    """End when train/loss exceeds this value."""

    @property
    def uses_metric(self) -> bool:
        """True if a condition depends on `metric`."""
        return self.patience_steps is not None or self.target is not None

    @property
    def conditions(self) -> dict[str, float]:
        """The conditions that are set, by key."""
        values = {key: getattr(self, key) for key in CONDITIONS}
        return {key: value for key, value in values.items() if value is not None}
