"""Detection of bad steps inside the step, on the device.

There are two rules, each with its own reaction (`train.on_nonfinite`, `train.on_spike`):

    not finite   the loss or the gradient norm is NaN or infinite
    spike        loss > median + spike_threshold * spread, over the last 128 good losses, after at
                 least spike_warmup good losses. The spread is 1.4826 * the median absolute
                 deviation (for a normal distribution, the standard deviation), but at least 1 % of
                 the median. Bad steps never enter the statistics, so neither NaNs nor spikes
                 change later decisions.

    skip       the update is not applied; nan_consecutive_max such steps in a row end the run
    rollback   as skip, but instead of ending, the run returns to the last good checkpoint
    stop       the run ends before the update
    warn       the update is applied, and the step is counted

With `mixed_precision = "fp16"` the loss is multiplied by a scale, because small gradients would
underflow in fp16. Gradients are divided by the scale before all other uses. The guard also does
the work of PyTorch's `GradScaler`:

    overflow   the loss is finite, but the gradient norm is not: the update is not applied, and the
               scale is halved. An overflow is not a bad step, unless the scale is 1 already: then
               the step is "not finite"

After loss_scale_window steps in a row without overflow, the scale doubles.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxforge.config.train import TrainConfig
from jaxforge.state.train_state import WINDOW, GuardState

T = TypeVar("T")

_MAD_TO_STD = 1.4826  # standard deviation / median absolute deviation of a normal distribution
_MIN_SPREAD = 0.01  # relative to the median
_BACKOFF, _GROWTH = 0.5, 2.0  # factors on the loss scale, as in torch's `GradScaler`
_MIN_LOSS_SCALE = 1.0  # the smallest scale that still helps against underflow, as in Megatron-LM


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
            state: state before the step.
            loss: loss of the step.
            grad_norm: gradient norm of the step, before clipping.
            apply: False skips the update without counting a bad step.
        """
        if state.loss_scale is not None:
            return self._judge_scaled(state, loss, grad_norm, apply)
        config, judged = self._config, jnp.asarray(apply)
        nonfinite = judged & ~(jnp.isfinite(loss) & jnp.isfinite(grad_norm))
        spike = judged & ~nonfinite & self._is_spike(state, loss)
        bad = _is_skipped(nonfinite, config.on_nonfinite) | _is_skipped(spike, config.on_spike)
        stops = _stops(nonfinite, config.on_nonfinite) | _stops(spike, config.on_spike)
        # "stop" counts as the maximum of consecutive bad steps, which `is_halted` looks at.
        consecutive = jnp.where(stops, config.nan_consecutive_max, state.consecutive + bad)
        good = judged & ~nonfinite & ~spike
        slot = state.good % WINDOW  # ring buffer: the oldest good loss is overwritten
        return judged & ~bad, GuardState(
            consecutive=jnp.where(judged & ~bad, 0, consecutive),
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
        """Return the results of `judge` with loss scaling: overflows only lower the scale."""
        config, scale = self._config, self.loss_scale(state)
        assert scale is not None
        assert state.loss_scale_tracker is not None
        overflow = jnp.asarray(apply) & jnp.isfinite(loss) & ~jnp.isfinite(grad_norm)
        smaller = jnp.maximum(scale * _BACKOFF, _MIN_LOSS_SCALE)
        lowered = overflow & (smaller < scale)
        unscaled = state._replace(loss_scale=None, loss_scale_tracker=None)
        good, verdict = self.judge(unscaled, loss, grad_norm, apply & ~lowered)
        tracker = state.loss_scale_tracker + jnp.asarray(apply).astype(jnp.int32)
        larger = scale * _GROWTH
        grows = (tracker >= config.loss_scale_window) & ~overflow & jnp.isfinite(larger)
        return good, verdict._replace(
            loss_scale=jnp.where(lowered, smaller, jnp.where(grows, larger, scale)),
            loss_scale_tracker=jnp.where(overflow | grows, 0, tracker),
        )

    def is_halted(self, state: GuardState) -> Bool[Array, ""]:
        """Return whether the run must end or roll back; the state then no longer changes.

        The host reads only logged steps. When it notices, the state is still that of the decisive
        step.
        """
        return state.consecutive >= self._config.nan_consecutive_max

    def _is_spike(self, state: GuardState, loss: Float[Array, ""]) -> Bool[Array, ""]:
        if self._config.on_spike == "off":
            return jnp.zeros((), bool)
        median = jnp.nanmedian(state.losses)
        deviation = jnp.nanmedian(jnp.abs(state.losses - median))
        spread = jnp.maximum(_MAD_TO_STD * deviation, _MIN_SPREAD * jnp.abs(median))
        warm = state.good >= self._config.spike_warmup
        return warm & (loss > median + self._config.spike_threshold * spread)


def select(
    good: Bool[Array, ""], new: T, old: T, is_selected: Callable[[Array], bool] | None = None
) -> T:
    """Return `new` after a good step, else `old`, bit for bit.

    Args:
        good: whether the step was good.
        new: values after the step.
        old: values before the step.
        is_selected: true for arrays of `new` that already are `old` after a bad step. Using `old`
            again would keep both in memory.
    """

    def select_leaf(n: Array, o: Array) -> Array:
        return n if is_selected is not None and is_selected(n) else jnp.where(good, n, o)

    return jax.tree.map(select_leaf, new, old)


def _is_skipped(bad: Bool[Array, ""], reaction: str) -> Bool[Array, ""]:
    return bad & (reaction not in ("warn", "off"))


def _stops(bad: Bool[Array, ""], reaction: str) -> Bool[Array, ""]:
    return bad & (reaction == "stop")
