"""Judges each step inside the step: what it finds bad changes nothing, unless it is told to warn.

Two rules, each with its own reaction (`train.on_nonfinite`, `train.on_spike`):

    not finite   the loss or the gradient norm is NaN or infinite
    spike        loss > median + spike_threshold * spread, of the last 128 good losses, once there
                 have been spike_warmup of them. The spread is 1.4826 * the median absolute
                 deviation (a normal distribution's standard deviation), but at least 1 % of the
                 median. Bad steps never enter the statistics, so neither a NaN nor a spike can
                 move what is judged normal.

    skip       the update is not applied; nan_consecutive_max such steps in a row end the run
    rollback   the same, but then the run goes back to the last good checkpoint
    stop       the run ends before the update
    warn       the update is applied, and counted

With `mixed_precision = "fp16"` the loss is multiplied by a scale, or small gradients would be 0 in
that format; gradients are divided by it before anybody looks at them. What torch's `GradScaler`
does is a part of the judgement here:

    overflow   the loss is finite, and the gradient norm is not: the update is not applied, and the
               scale is multiplied by loss_scale_backoff_factor. That is no bad step and ends no
               run, unless the scale is at min_loss_scale already: then the step is "not finite"

loss_scale_window steps in a row without one, and the scale grows by loss_scale_growth_factor.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxforge.config.train import TrainConfig
from jaxforge.state.guard_state import WINDOW, GuardState

T = TypeVar("T")

_NORMAL = 1.4826  # standard deviations of a normal distribution in its median absolute deviation
_LEAST_SPREAD = 0.01  # of the median


class Guard:
    """The rules of `[train]`, for use inside the step."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config

    def judge(
        self,
        state: GuardState,
        loss: Float[Array, ""],
        grad_norm: Float[Array, ""],
        apply: Bool[Array, ""] | bool = True,
    ) -> tuple[Bool[Array, ""], GuardState]:
        """Return whether to apply the update of this step, and the guard's next state.

        Args:
            state: before the step.
            loss: of the step.
            grad_norm: of the step, before clipping.
            apply: False leaves the update out without judging it.
        """
        if state.loss_scale is not None:
            return self._judge_scaled(state, loss, grad_norm, apply)
        config, judged = self._config, jnp.asarray(apply)
        nonfinite = judged & ~(jnp.isfinite(loss) & jnp.isfinite(grad_norm))
        spike = judged & ~nonfinite & self._is_spike(state, loss)
        bad = _refused(nonfinite, config.on_nonfinite) | _refused(spike, config.on_spike)
        stops = _ends(nonfinite, config.on_nonfinite) | _ends(spike, config.on_spike)
        in_a_row = jnp.where(stops, config.nan_consecutive_max, state.consecutive + bad)
        good = judged & ~nonfinite & ~spike
        slot = state.good % WINDOW
        return judged & ~bad, GuardState(
            consecutive=jnp.where(judged & ~bad, 0, in_a_row),
            total=state.total + (bad | ~judged),
            nonfinite=state.nonfinite + nonfinite,
            spikes=state.spikes + spike,
            good=state.good + good,
            losses=state.losses.at[slot].set(jnp.where(good, loss, state.losses[slot])),
        )

    def loss_scale(self, state: GuardState) -> Float[Array, ""] | None:
        """Return the loss scale, or None if the loss is not scaled."""
        if state.loss_scale is None:
            return None
        return jnp.where(state.loss_scale > 0, state.loss_scale, self._config.initial_loss_scale)

    def _judge_scaled(
        self,
        state: GuardState,
        loss: Float[Array, ""],
        grad_norm: Float[Array, ""],
        apply: Bool[Array, ""] | bool,
    ) -> tuple[Bool[Array, ""], GuardState]:
        """`judge`, which does not judge a step that the scale was too large for."""
        config, scale = self._config, self.loss_scale(state)
        assert scale is not None
        assert state.loss_scale_tracker is not None
        overflow = jnp.asarray(apply) & jnp.isfinite(loss) & ~jnp.isfinite(grad_norm)
        smaller = jnp.maximum(scale * config.loss_scale_backoff_factor, config.min_loss_scale)
        lowered = overflow & (smaller < scale)
        unscaled = state._replace(loss_scale=None, loss_scale_tracker=None)
        good, verdict = self.judge(unscaled, loss, grad_norm, apply & ~lowered)
        tracker = state.loss_scale_tracker + jnp.asarray(apply).astype(jnp.int32)
        larger = scale * config.loss_scale_growth_factor
        grows = (tracker >= config.loss_scale_window) & ~overflow & jnp.isfinite(larger)
        return good, verdict._replace(
            loss_scale=jnp.where(lowered, smaller, jnp.where(grows, larger, scale)),
            loss_scale_tracker=jnp.where(overflow | grows, 0, tracker),
        )

    def is_halted(self, state: GuardState) -> Bool[Array, ""]:
        """True once the run is to end or to go back: from then on the state stands still.

        So the host, which looks only at steps that are logged, finds it where that was decided.
        """
        return state.consecutive >= self._config.nan_consecutive_max

    def _is_spike(self, state: GuardState, loss: Float[Array, ""]) -> Bool[Array, ""]:
        if self._config.on_spike == "off":
            return jnp.zeros((), bool)
        median = jnp.nanmedian(state.losses)
        deviation = jnp.nanmedian(jnp.abs(state.losses - median))
        spread = jnp.maximum(_NORMAL * deviation, _LEAST_SPREAD * jnp.abs(median))
        warm = state.good >= self._config.spike_warmup
        return warm & (loss > median + self._config.spike_threshold * spread)


def select(
    good: Bool[Array, ""], new: T, old: T, settled: Callable[[Array], bool] | None = None
) -> T:
    """`new` where the step was good, `old` bit for bit where it was not.

    Args:
        good: whether it was.
        new: after the step.
        old: before it.
        settled: which arrays of `new` are `old` already where it was not: to look at `old` again
            would keep both in memory.
    """
    if settled is None:
        return jax.tree.map(lambda n, o: jnp.where(good, n, o), new, old)
    return jax.tree.map(lambda n, o: n if settled(n) else jnp.where(good, n, o), new, old)


def _refused(bad: Bool[Array, ""], reaction: str) -> Bool[Array, ""]:
    return bad & (reaction not in ("warn", "off"))


def _ends(bad: Bool[Array, ""], reaction: str) -> Bool[Array, ""]:
    return bad & (reaction == "stop")
