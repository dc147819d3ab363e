"""Learning-rate schedules: the factor f(n) on the base rate, n = updates made before this one.

So update n (counted from 1) uses f(n - 1), and the first update of a warm-up has rate 0. With
W = warmup_steps, r = min_lr_ratio and p = min(1, (n - W) / decay_steps):

    warm-up    (n + warmup_offset) / W       for n < W
    cosine     r + (1 - r) (1 + cos πp) / 2
    linear     1 - (1 - r) p
    wsd        1 for stable_steps, then cosine, linear or sqrt: r + (1 - r) √(1 - p)
    constant   1
    rex        max(r, (1 - p)^rex_alpha)     (arXiv:2107.04197, with a floor)
    none       1, without warm-up

decay_steps defaults to what is left of the run after warm-up and stable steps.

With `unit = "samples"` and a batch that grows, n and the boundaries between the parts are measured
in samples: a warm-up of W updates is half over when half of what they read has been read.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxforge.config.batch_ramp import Stage
from jaxforge.config.scheduler import SchedulerConfig

Schedule = Callable[[Int[Array, ""]], Float[Array, ""]]
"""Updates made so far -> factor on the learning rate, float32."""

_Decay = Callable[[Array, float], Array]  # (progress p in [0, 1], floor r) -> factor

_Clock = Callable[[Array | int], Array | float]

_DECAYS: dict[str, _Decay] = {
    "cosine": lambda p, r: r + 0.5 * (1 - r) * (1 + jnp.cos(jnp.pi * p)),
    "linear": lambda p, r: 1 - (1 - r) * p,
    "sqrt": lambda p, r: r + (1 - r) * jnp.sqrt(1 - p),
    "constant": lambda p, r: jnp.ones_like(p),
}


def build_schedule(
    config: SchedulerConfig, max_steps: int, stages: Sequence[Stage] = ()
) -> Schedule:
    """The schedule that `[scheduler]` asks for.

    Args:
        config: the section.
        max_steps: updates of the run.
        stages: the batch over the run, where it grows.
    """
    if config.name == "none":
        return lambda n: jnp.ones((), jnp.float32)
    read = _samples_read(stages if config.unit == "samples" else ())
    warmed, begin, end = config.boundaries(max_steps)
    decay = _decay_function(config)

    def schedule(n: Int[Array, ""]) -> Float[Array, ""]:
        n = jnp.asarray(n, jnp.float32)
        since, length = read(n) - read(begin), read(end) - read(begin)
        # A decay of no length never starts (but rex's, which ends at once).
        p = jnp.clip(since / length, 0.0, 1.0) if end > begin else jnp.zeros(())
        factor = decay(p, config.min_lr_ratio)
        warmup = read(n + config.warmup_offset) / read(warmed) if warmed else factor
        return jnp.where(n < warmed, warmup, factor).astype(jnp.float32)

    return schedule


def _samples_read(stages: Sequence[Stage]) -> _Clock:
    """Samples of the first n updates, in those of an update at the end of the ramp."""
    whole = stages[-1].accum if stages else 1
    gains = [(b.start, (b.accum - a.accum) / whole) for a, b in pairwise(stages)]
    first = stages[0].accum / whole if stages else 1
    return lambda n: first * n + sum(gain * jnp.maximum(n - start, 0) for start, gain in gains)


def _decay_function(config: SchedulerConfig) -> _Decay:
    if config.name == "wsd":
        return _DECAYS[config.wsd_decay_type]
    if config.name == "rex":
        return lambda p, r: jnp.maximum(r, (1 - p) ** config.rex_alpha)
    return _DECAYS[config.name]
