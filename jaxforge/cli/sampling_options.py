"""Ranges of the options with which text is generated, on the command line and in `Run.generate`."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxforge.errors import UserError

_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda x: x >= 0, "0 or more"),
    "top_k": (lambda x: x >= 0, "0 or more"),
    "top_p": (lambda x: 0 < x <= 1, "above 0, at most 1"),
    "max_tokens": (lambda x: x > 0, "1 or more"),
    "batch_size": (lambda x: x > 0, "1 or more"),
    "seed": (lambda x: -(2**63) <= x < 2**63, f"{-(2**63)} to {2**63 - 1}"),
}


def check(values: Mapping[str, Any], spelt: Callable[[str], str]) -> None:
    """Check that the options of sampling are in their ranges.

    Args:
        values: some of the options above, by name.
        spelt: returns the name of an option as its user writes it.

    Raises:
        UserError: an option is out of its range.
    """
    for name, (is_good, allowed) in _RANGES.items():
        if name in values and not is_good(values[name]):
            raise UserError(f"{spelt(name)}: expected {allowed}")
