"""State of the step's guard (`step.guard`) from earlier steps."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

WINDOW = 128
"""Good losses that a spike is judged by."""


class GuardState(NamedTuple):
    """Counts of bad steps, and what normal losses are; part of the checkpoint.

    Attributes:
        consecutive: steps in a row, up to now, whose update was not applied.
        total: such steps of the whole run.
        nonfinite: steps whose loss or gradient norm was not finite, applied or not.
        spikes: steps whose loss was a spike, applied or not.
        good: steps that were neither.
        losses: of the last good steps, a ring; NaN where there was none yet.
        loss_scale: of the next step, where the loss is scaled; 0: the initial one.
        loss_scale_tracker: steps since it changed, all without an overflow.
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
        """Nothing known but how many steps were skipped so far."""
        # An array each: the step is given the state's memory, and no memory can be given twice.
        consecutive, total, nonfinite, spikes, good = (
            jnp.asarray(n, jnp.int32) for n in (0, skipped, 0, 0, 0)
        )
        losses = jnp.full(WINDOW, jnp.nan, jnp.float32)
        scale = (jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)) if scales_loss else ()
        return cls(consecutive, total, nonfinite, spikes, good, losses, *scale)

    def arrays(self) -> dict[str, Any]:
        """Return the arrays by name, without the loss scale if there is none."""
        return {name: leaf for name, leaf in self._asdict().items() if leaf is not None}
