"""Formatting of numbers as text and in JSON."""

import math
from collections.abc import Mapping
from typing import Any


def finite(values: Any) -> Any:  # noqa: ANN401
    """Return plain values in which numbers that are not finite are None, for JSON."""
    if isinstance(values, Mapping):
        return {key: finite(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [finite(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values


def human(number: float) -> str:
    """Return a large number with its unit: 5,300,000 -> 5.3M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(number) >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def short(value: float) -> str:
    """Return a round number with few digits: 0.05, 3e-4, 20,000."""
    if value and not 1e-3 <= abs(value) < 1e6:
        return _exponent(f"{value:.2e}")
    return f"{value:,.6g}"


def exact(value: float) -> str:
    """Return five digits, or all digits of an integer; `charts.js` formats numbers the same way."""
    if not math.isfinite(value):
        return "not finite"
    if value == round(value) or abs(value) >= 1e4:
        return f"{value:,.0f}"
    return _exponent(f"{value:.3e}") if abs(value) < 1e-3 else f"{value:#.5g}".rstrip(".")


def _exponent(text: str) -> str:
    """Shorten Python's 3.00e-04 to 3e-4."""
    mantissa, _, exponent = text.partition("e")
    if "." in mantissa:
        mantissa = mantissa.rstrip("0").rstrip(".")
    return f"{mantissa}e{int(exponent)}"


def duration(seconds: float) -> str:
    """Return a duration in its two largest units: 3,725 -> "1 h 2 min"."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 60 or seconds >= 1e11:  # more than 3,000 years
        return f"{seconds:.3g} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = ((days, "d"), (hours, "h"), (minutes, "min"), (seconds, "s"))
    return " ".join([f"{n} {unit}" for n, unit in parts if n][:2])
