"""Learning-rate schedules: the factor f(n) on the base rate, n = updates made before this one.

So update n (counted from 1) uses f(n - 1), and the first update of a warm-up has rate 0. With
W = warmup_steps, r = min_lr_ratio and p = min(1, (n - W) / decay_steps):

    warm-up    n / W                         for n < W
    cosine     r + (1 - r) (1 + cos πp) / 2
    linear     1 - (1 - r) p
    wsd        1 for stable_steps, then cosine, linear or sqrt: r + (1 - r) √(1 - p)
    constant   1
    rex        max(r, (1 - p)^rex_alpha)     (arXiv:2107.04197, with a floor)
    none       1, without warm-up

decay_steps defaults to what is left of the run after warm-up and stable steps.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxforge.config.scheduler import SCHEDULERS, SchedulerConfig

Schedule = Callable[[Int[Array, ""]], Float[Array, ""]]
"""Updates made so far -> factor on the learning rate, float32."""

ScheduleBuilder = Callable[[SchedulerConfig, int], Schedule]
"""(the `[scheduler]` section, `train.max_steps`) -> schedule."""

Decay = Callable[[Array, float], Array]
"""(progress p in [0, 1], floor r) -> factor."""

_DECAYS: dict[str, Decay] = {
    "cosine": lambda p, r: r + 0.5 * (1 - r) * (1 + jnp.cos(jnp.pi * p)),
    "linear": lambda p, r: 1 - (1 - r) * p,
    "sqrt": lambda p, r: r + (1 - r) * jnp.sqrt(1 - p),
    "constant": lambda p, r: jnp.ones_like(p),
}


def build_schedule(config: SchedulerConfig, max_steps: int) -> Schedule:
    """The schedule that `[scheduler]` asks for, in a run of `max_steps` updates."""
    return SCHEDULERS[config.name](config, max_steps)


def register_scheduler(name: str) -> Callable[[ScheduleBuilder], ScheduleBuilder]:
    """Decorates what builds the schedule that `scheduler.name` calls `name`.

    Its warm-up is its own business; `warmup_then` has that of the others.
    """
    return SCHEDULERS.register(name)


def warmup_then(
    decay: Decay, config: SchedulerConfig, max_steps: int, stable_steps: int = 0
) -> Schedule:
    """Warm-up, `stable_steps` at 1, then the decay."""
    before = config.warmup_steps + stable_steps
    decay_steps = config.decay_steps or max_steps - before

    def schedule(n: Int[Array, ""]) -> Float[Array, ""]:
        n = jnp.asarray(n, jnp.float32)
        # A decay of no length never starts.
        p = jnp.clip((n - before) / decay_steps, 0.0, 1.0) if decay_steps > 0 else jnp.zeros(())
        factor = decay(p, config.min_lr_ratio)
        warmup = n / max(config.warmup_steps, 1)
        return jnp.where(n < config.warmup_steps, warmup, factor).astype(jnp.float32)

    return schedule


@register_scheduler("cosine")
@register_scheduler("linear")
@register_scheduler("constant")
def _by_name(config: SchedulerConfig, max_steps: int) -> Schedule:
    return warmup_then(_DECAYS[config.name], config, max_steps)


@register_scheduler("wsd")
def _wsd(config: SchedulerConfig, max_steps: int) -> Schedule:
    return warmup_then(_DECAYS[config.wsd_decay_type], config, max_steps, config.stable_steps or 0)


@register_scheduler("rex")
def _rex(config: SchedulerConfig, max_steps: int) -> Schedule:
    def decay(p: Array, floor: float) -> Array:
        return jnp.maximum(floor, (1 - p) ** config.rex_alpha)

    left = config.decay_steps or max_steps - config.warmup_steps
    at_least_one = config.model_copy(update={"decay_steps": max(left, 1)})  # it ends at once
    return warmup_then(decay, at_least_one, max_steps)


@register_scheduler("none")
def _none(config: SchedulerConfig, max_steps: int) -> Schedule:
    return lambda n: jnp.ones((), jnp.float32)
