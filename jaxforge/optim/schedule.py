"""Learning-rate schedules: a factor f(n) on the base rate after n updates.

Update n (counted from 1) uses f(n - 1), so the first update of a warm-up has rate 0. With
W = warmup_steps, r = min_lr_ratio and p = min(1, (n - W) / decay_steps):

    warm-up    (n + warmup_offset) / W       for n < W
    cosine     r + (1 - r) (1 + cos πp) / 2
    linear     1 - (1 - r) p
    wsd        1 for stable_steps, then cosine, linear or sqrt: r + (1 - r) √(1 - p)
    constant   1
    rex        max(r, (1 - p)^rex_alpha)     (arXiv:2107.04197, with a floor)
    none       1, without warm-up

decay_steps defaults to the updates that remain after warm-up and stable steps.

With `unit = "samples"` and a growing batch, n and the boundaries between phases are measured in
samples: a warm-up of W updates is half over after half of the samples of these updates.

Schedules use the array library of n: JAX inside a step, NumPy elsewhere, so that nothing is
compiled for a few numbers.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np

from jaxforge.config.batch_ramp import Stage
from jaxforge.config.job import JobConfig
from jaxforge.config.optimizer import SCHEDULERS, SchedulerConfig

Number = Any
"""A scalar of JAX or NumPy."""

Schedule = Callable[[Number], Number]
"""Updates made so far (integer) -> factor on the learning rate, float32."""


class Rate:
    """Learning rate of the next update, by the number of updates made.

    Attributes:
        factor: the schedule, which multiplies the peak.
        peak: highest learning rate.
    """

    def __init__(self, factor: Schedule, peak: float) -> None:
        self.factor, self.peak = factor, peak

    def __call__(self, n: Number) -> Number:
        """Return the learning rate after `n` updates."""
        return self.peak * self.factor(n)

    def fixed_at(self, n: Number) -> "Rate":
        """Return the learning rate after `n` updates as a schedule that ignores its argument."""
        factor = self.factor(n)
        return Rate(lambda _: factor, self.peak)


ScheduleBuilder = Callable[[SchedulerConfig, int, Sequence[Stage]], Schedule]
"""(the `[scheduler]` section, `train.max_steps`, stages of the batch) -> schedule."""

Decay = Callable[[Number, float], Number]
"""(progress p in [0, 1], minimum r) -> factor."""

_SampleCounter = Callable[[Number, ModuleType], Number]

_DECAYS: dict[str, Decay] = {
    "cosine": lambda p, r: r + 0.5 * (1 - r) * (1 + _library(p).cos(np.pi * p)),
    "linear": lambda p, r: 1 - (1 - r) * p,
    "sqrt": lambda p, r: r + (1 - r) * _library(p).sqrt(1 - p),
    "constant": lambda p, r: _library(p).ones_like(p),
}


def learning_rate(config: JobConfig) -> Rate:
    """Return the learning rate by the number of updates made."""
    if config.optimizer.name == "schedule_free_adamw":  # its scheduler is "none"
        factor = schedule_free_warmup(config.optimizer.schedule_free_adamw.warmup_steps)
    else:
        stages = config.train.stages()
        factor = build_schedule(config.scheduler, config.train.max_steps, stages)
    return Rate(factor, config.optimizer.lr)


def learning_rate_after(config: JobConfig, updates: int) -> float:
    """Return the learning rate of the next update without compiling anything.

    Args:
        config: the run's config.
        updates: number of updates made.
    """
    # int32 like the counter of a step; numbers beyond its range become floats.
    dtype = np.int32 if updates < 2**31 else np.float32
    return float(learning_rate(config)(np.asarray(updates, dtype)))


def schedule_free_warmup(steps: int) -> Schedule:
    """Return the schedule min(1, (n + 1) / steps); constant 1 for 0 steps."""

    def schedule(n: Number) -> Number:
        xp = _library(n)
        return xp.minimum(1.0, (xp.asarray(n, xp.float32) + 1) / max(steps, 1))

    return schedule


def build_schedule(
    config: SchedulerConfig, max_steps: int, stages: Sequence[Stage] = ()
) -> Schedule:
    """Return the schedule of `[scheduler]`.

    Args:
        config: the section.
        max_steps: number of updates of the run.
        stages: stages of a growing batch; empty for a constant batch.
    """
    return SCHEDULERS[config.name](config, max_steps, stages)


def register_scheduler(name: str) -> Callable[[ScheduleBuilder], ScheduleBuilder]:
    """Return a decorator that registers the builder of a schedule for `scheduler.name`.

    A registered schedule includes its warm-up; `warmup_then` adds the standard one.
    """
    return SCHEDULERS.register(name)


def warmup_then(
    decay: Decay, config: SchedulerConfig, max_steps: int, stages: Sequence[Stage] = ()
) -> Schedule:
    """Return a schedule of warm-up, plateau and decay, measured in updates or samples."""
    samples = _sample_counter(stages if config.unit == "samples" else ())
    # Floats, because JAX's integers end at 2^31.
    warmup_end, begin, end = map(float, config.boundaries(max_steps))

    def schedule(n: Number) -> Number:
        xp = _library(n)
        n = xp.asarray(n, xp.float32)
        since = samples(n, xp) - samples(begin, xp)
        length = samples(end, xp) - samples(begin, xp)
        p = xp.clip(since / length, 0.0, 1.0) if end > begin else xp.zeros(())
        factor = warmup = decay(p, config.min_lr_ratio)
        if warmup_end:
            warmup = samples(n + config.warmup_offset, xp) / samples(warmup_end, xp)
        return xp.where(n < warmup_end, warmup, factor).astype(xp.float32)

    return schedule


def _sample_counter(stages: Sequence[Stage]) -> _SampleCounter:
    """Return the function from n to the samples of n updates, relative to the final batch."""
    final = stages[-1].accum if stages else 1
    gains = [(b.start, (b.accum - a.accum) / final) for a, b in pairwise(stages)]
    first = stages[0].accum / final if stages else 1

    def samples(n: Number, xp: ModuleType) -> Number:
        return first * n + sum(gain * xp.maximum(n - start, 0) for start, gain in gains)

    return samples


def _library(n: Number) -> ModuleType:
    """Return the array's library, `jax.numpy` or NumPy, by the array API standard."""
    return n.__array_namespace__() if hasattr(n, "__array_namespace__") else np


@register_scheduler("cosine")
@register_scheduler("linear")
@register_scheduler("constant")
@register_scheduler("wsd")
def _by_name(config: SchedulerConfig, max_steps: int, stages: Sequence[Stage]) -> Schedule:
    name = config.wsd_decay_type if config.name == "wsd" else config.name
    return warmup_then(_DECAYS[name], config, max_steps, stages)


@register_scheduler("rex")
def _rex(config: SchedulerConfig, max_steps: int, stages: Sequence[Stage]) -> Schedule:
    def decay(p: Number, minimum: float) -> Number:
        return _library(p).maximum(minimum, (1 - p) ** config.rex_alpha)

    return warmup_then(decay, config, max_steps, stages)


@register_scheduler("none")
def _none(config: SchedulerConfig, max_steps: int, stages: Sequence[Stage]) -> Schedule:
    return lambda n: _library(n).ones((), "float32")
