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

from jaxforge.config.scheduler import SchedulerConfig

Schedule = Callable[[Int[Array, ""]], Float[Array, ""]]
"""Updates made so far -> factor on the learning rate, float32."""

_Decay = Callable[[Array, float], Array]  # (progress p in [0, 1], floor r) -> factor

_DECAYS: dict[str, _Decay] = {
    "cosine": lambda p, r: r + 0.5 * (1 - r) * (1 + jnp.cos(jnp.pi * p)),
    "linear": lambda p, r: 1 - (1 - r) * p,
    "sqrt": lambda p, r: r + (1 - r) * jnp.sqrt(1 - p),
    "constant": lambda p, r: jnp.ones_like(p),
}


def build_schedule(config: SchedulerConfig, max_steps: int) -> Schedule:
    """The schedule that `[scheduler]` asks for, in a run of `max_steps` updates."""
    if config.name == "none":
        return lambda n: jnp.ones((), jnp.float32)
    stable = (config.stable_steps or 0) if config.name == "wsd" else 0
    decay_steps = config.decay_steps or max_steps - config.warmup_steps - stable
    if config.name == "rex":
        decay_steps = max(decay_steps, 1)
    decay = _decay_function(config)

    def schedule(n: Int[Array, ""]) -> Float[Array, ""]:
        n = jnp.asarray(n, jnp.float32)
        since = n - config.warmup_steps - stable
        # A decay of no length never starts (but rex's, which ends at once).
        p = jnp.clip(since / decay_steps, 0.0, 1.0) if decay_steps > 0 else jnp.zeros(())
        factor = decay(p, config.min_lr_ratio)
        warmup = n / max(config.warmup_steps, 1)
        return jnp.where(n < config.warmup_steps, warmup, factor).astype(jnp.float32)

    return schedule


def _decay_function(config: SchedulerConfig) -> _Decay:
    if config.name == "wsd":
        return _DECAYS[config.wsd_decay_type]
    if config.name == "rex":
        return lambda p, r: jnp.maximum(r, (1 - p) ** config.rex_alpha)
    return _DECAYS[config.name]
