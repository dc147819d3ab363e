"""`[early_stop]`: conditions that end a run before train.max_steps."""

from typing import Annotated

from pydantic import NonNegativeFloat, PositiveFloat

from jaxforge.config.directions import Mode
from jaxforge.config.duration import PositiveSteps
from jaxforge.config.facts import Interval
from jaxforge.config.section import Section

CONDITIONS = ("patience_steps", "target", "max_steps", "max_loss", "min_lr", "max_grad_norm")
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
    min_lr: PositiveFloat | None = None
    """End when train/lr falls below this value."""
    max_grad_norm: PositiveFloat | None = None
    """End when train/grad_norm, before clipping, exceeds this value."""

    @property
    def uses_metric(self) -> bool:
        """True if a condition depends on `metric`."""
        return self.patience_steps is not None or self.target is not None

    @property
    def conditions(self) -> dict[str, float]:
        """The conditions that are set, by key."""
        values = {key: getattr(self, key) for key in CONDITIONS}
        return {key: value for key, value in values.items() if value is not None}
