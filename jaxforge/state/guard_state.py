"""State of the step's guard (`step.guard`) from earlier steps."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

WINDOW = 128
"""Number of recent good losses that define a spike."""


class GuardState(NamedTuple):
    """Counts of bad steps and a window of recent good losses; part of the checkpoint.

    Attributes:
        consecutive: latest steps in a row whose update was not applied.
        total: steps of the whole run whose update was not applied.
        nonfinite: steps whose loss or gradient norm was not finite, applied or not.
        spikes: steps whose loss was a spike, applied or not.
        good: steps that were neither.
        losses: ring buffer of the losses of the last good steps; unused entries are NaN.
        loss_scale: loss scale of the next step; 0 for the initial scale, None for unscaled losses.
        loss_scale_tracker: steps without overflow since the scale changed.
    """

    consecutive: Int[Array, ""]
    total: Int[Array, ""]
    nonfinite: Int[Array, ""]
    spikes: Int[Array, ""]
    good: Int[Array, ""]
    losses: Float[Array, "128"]
    loss_scale: Float[Array, ""] | None = None
    loss_scale_tracker: Int[Array, ""] | None = None

    @classmethod
    def fresh(cls, skipped: int = 0, *, scales_loss: bool = False) -> "GuardState":
        """Return the state without recorded losses, after a number of skipped steps."""
        # A separate array per count: the step donates the state, and a buffer cannot be donated
        # twice.
        consecutive, total, nonfinite, spikes, good = (
            jnp.asarray(n, jnp.int32) for n in (0, skipped, 0, 0, 0)
        )
        losses = jnp.full(WINDOW, jnp.nan, jnp.float32)
        scale = (jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)) if scales_loss else ()
        return cls(consecutive, total, nonfinite, spikes, good, losses, *scale)

    def arrays(self) -> dict[str, Any]:
        """Return the arrays by name, without the loss scale if there is none."""
        return {name: leaf for name, leaf in self._asdict().items() if leaf is not None}
