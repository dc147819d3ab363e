"""`[early_stop]`: ends of a run before train.max_steps."""

from collections.abc import Iterator

from pydantic import NonNegativeFloat, PositiveFloat

from jaxforge.config.duration import PositiveSteps
from jaxforge.config.section import Section


class EarlyStopConfig(Section):
    """When to end before train.max_steps, checked in the order of the keys."""

    active: bool = False
    """True if any of it applies."""
    metric: str = "eval/loss"
    """Metric that has to improve; lower is better for losses, their terms and all of eval/."""
    patience_steps: PositiveSteps | None = None
    """Ends after so many updates without improvement, seen whenever the metric is logged."""
    min_delta: NonNegativeFloat = 0.0
    """An improvement is more than that."""
    max_steps: PositiveSteps | None = None
    """Ends after so many updates; the schedule remains that of train.max_steps."""
    max_loss: PositiveFloat | None = None
    """Ends when train/loss exceeds that."""
    min_lr: PositiveFloat | None = None
    """Ends when train/lr falls below that."""
    max_grad_norm: PositiveFloat | None = None
    """Ends when train/grad_norm, before clipping, exceeds that."""

    def problems(self) -> Iterator[str]:
        """Yields the broken rules between the keys of this section."""
        limits = ("patience_steps", "max_steps", "max_loss", "min_lr", "max_grad_norm")
        if self.active and all(getattr(self, limit) is None for limit in limits):
            yield f"active = true needs one of {', '.join(limits)}"
