"""`[early_stop]`: conditions that end a run before train.max_steps."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import NonNegativeFloat, PositiveFloat

from jaxforge.config.directions import Mode
from jaxforge.config.duration import PositiveSteps
from jaxforge.config.facts import Interval
from jaxforge.config.section import Section


class EarlyStopConfig(Section):
    """Conditions that end a run before train.max_steps, checked in the order of the keys."""

    active: bool = False
    """Enable early stopping."""
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
        return self.active and (self.patience_steps is not None or self.target is not None)

    def problems(self) -> Iterator[str]:
        """Yield the broken rules between the keys of this section."""
        limits = ("patience_steps", "target", "max_steps", "max_loss", "min_lr", "max_grad_norm")
        if self.active and all(getattr(self, limit) is None for limit in limits):
            yield f"active = true requires one of {', '.join(limits)}"
