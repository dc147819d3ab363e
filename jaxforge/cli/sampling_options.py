"""Ranges of sampling options, on the command line and in `Run.generate`."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxforge.errors import UserError

_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda x: x >= 0, "at least 0"),
    "top_k": (lambda x: x >= 0, "at least 0"),
    "top_p": (lambda x: 0 < x <= 1, "greater than 0 and at most 1"),
    "max_tokens": (lambda x: x > 0, "at least 1"),
    "batch_size": (lambda x: x > 0, "at least 1"),
    "seed": (lambda x: 0 <= x < 2**32, f"from 0 to {2**32 - 1}"),
}


def check(values: Mapping[str, Any], spelt: Callable[[str], str]) -> None:
    """Check that sampling options are in range.

    Args:
        values: sampling options by name.
        spelt: returns the spelling of an option name for the user.

    Raises:
        UserError: an option is out of range.
    """
    for name, (is_good, allowed) in _RANGES.items():
        if name in values and not is_good(values[name]):
            raise UserError(f"{spelt(name)} {values[name]}: must be {allowed}")
