"""Axes of plots: positions of values, and ticks."""

import dataclasses
import math

import numpy as np
from numpy.typing import ArrayLike

from jaxforge.telemetry.numbers import short

_SUFFIXES = ((1e12, "T"), (1e9, "B"), (1e6, "M"))


@dataclasses.dataclass(frozen=True)
class Scale:
    """Range of values, `low` < `high`, along an axis.

    Attributes:
        low: the value at the start of the axis.
        high: the value at the end of the axis.
        log: whether the axis is logarithmic; then `low` > 0.
        whole: whether ticks are restricted to whole numbers.
    """

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def positions(self, values: ArrayLike) -> np.ndarray:
        """Return fractions of the axis; on a log axis, non-positive values are at its start."""
        if self.log:
            over_low = np.maximum(values, self.low) / self.low
            return np.log(over_low) / math.log(self.high / self.low)
        return (np.asarray(values) - self.low) / (self.high - self.low)

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """Return round values in the range with their labels, usually at most `most`."""
        if self.log and (values := _log_ticks(self.low, self.high, most)):
            return [(value, short(value)) for value in values]
        step = max(_round_step((self.high - self.low) / most), 1.0 if self.whole else 0.0)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        values = [i * step for i in range(first, last + 1)]
        return list(zip(values, _labels(values, step), strict=True))


def scale_of(values: np.ndarray, *, log: bool = False, zero: bool = False) -> Scale:
    """Return the scale that contains all finite values, with a margin at both ends.

    Args:
        values: array of any shape.
        log: use a logarithmic scale and ignore values that are not positive.
        zero: start the scale at 0.
    """
    values = values[np.isfinite(values) & ((values > 0) | (not log))]
    if not values.size:
        return Scale(0.1, 1.0, log)
    low, high = float(values.min()), float(values.max())
    if log:
        air = max((high / low) ** 0.04, 1.02)
        return Scale(low / air, high * air, log)
    air = 0.04 * (high - low) or 0.1 * abs(high) or 1.0
    return Scale(0.0 if zero and low >= 0 else low - air, high + air)


def _round_step(rough: float) -> float:
    """Return the least 1, 2 or 5 times a power of ten that is at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    """Return at least three round values of about equal ratios, or none."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    stride = 1 + len(powers) // (most + 1)
    for mantissas in ((1, 2, 5), (1,), (1, 1.5, 2, 3, 5, 7)):
        values = [m * 10.0**e for e in powers if e % stride == 0 for m in mantissas]
        values = [value for value in values if low <= value <= high]
        if 3 <= len(values) <= most:
            return values
    return []


def _labels(values: list[float], step: float) -> list[str]:
    """Return labels with the same unit and number of decimals."""
    top = max(map(abs, values), default=0.0)
    unit, suffix = next(((u, s) for u, s in _SUFFIXES if top >= u), (1.0, ""))
    if 0 < top < 1e-3:
        return [short(value) for value in values]
    decimals = max(0, -math.floor(math.log10(step / unit) + 1e-9))
    return [f"{value / unit:,.{decimals}f}{suffix}" if value else "0" for value in values]
