"""Broken rules and changes that fix them.

Each change is tried before a message proposes it.
"""

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping

Value = float | str
"""A value that a message may propose."""

Change = Mapping[str, Value]
"""New values by key, as in {"model.dim": 64}."""

_TRIED = 64  # number of larger, and of smaller, multiples to try


class Problem:
    """A broken rule and its possible fixes.

    Args:
        what: message that states what is wrong.
        fixes: alternatives; each a change, or candidates for it, best first.
    """

    def __init__(self, what: str, *fixes: Change | Iterable[Change]) -> None:
        self.what = what
        self.fixes = [(fix,) if isinstance(fix, Mapping) else tuple(fix) for fix in fixes]

    def message_with_fix(self, is_mended: Callable[[Change], bool]) -> str:
        """Return the message with the first change of each alternative that `is_mended` accepts."""
        proposals = [describe_change(change) for change in self.effective_changes(is_mended)]
        if not proposals:
            proposals = [next(iter(change)) for change in self.effective_changes(lambda _: True)]
        return f"{self.what}: change {' or '.join(proposals)}" if proposals else self.what

    def effective_changes(self, is_mended: Callable[[Change], bool]) -> list[Change]:
        """Return the first change of each alternative that fixes the problem."""
        firsts = (next(filter(is_mended, changes), None) for changes in self.fixes)
        return [change for change in firsts if change is not None]


def describe_change(change: Change) -> str:
    """Return the text after "change": `distributed.tp to 1 and distributed.dp_shard to -1`."""
    return " and ".join(f"{key} to {json.dumps(new)}" for key, new in change.items())


def problems_by_message(problems: Iterable[str | Problem]) -> dict[str, Problem]:
    """Return the problems by message; a string becomes a problem without fixes."""
    every = (p if isinstance(p, Problem) else Problem(p) for p in problems)
    return {problem.what: problem for problem in every}


def multiples(key: str, value: int, unit: int) -> list[Change]:
    """Return multiples of `unit` near a key's value: first those above it, then those below."""
    above = -(-value // unit) * unit
    up = range(above, above + _TRIED * unit, unit)
    down = range(above - unit, max(0, above - (_TRIED + 1) * unit), -unit)
    return [{key: new} for new in (*up, *down)]


def nearest(key: str, value: int, candidates: Iterable[int]) -> list[Change]:
    """Return other values for a key, nearest first."""
    return [{key: new} for new in sorted(candidates, key=lambda new: abs(new - value))]


def not_multiple(
    key: str, value: int, unit_key: str, unit: int, *, keeps_key: bool = False
) -> Problem:
    """Return the problem of a value that is not a multiple of the value of another key.

    With `keeps_key`, the message proposes a value for `unit_key` first.
    """
    fixes = multiples(key, value, unit), nearest(unit_key, unit, divisors(value))
    what = f"{key} = {value} must be a multiple of {unit_key} = {unit}"
    return Problem(what, *(fixes[::-1] if keeps_key else fixes))


@functools.cache
def divisors(n: int) -> tuple[int, ...]:
    """Return the divisors of `n` in ascending order."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return (*small, *(n // d for d in reversed(small) if d * d != n))
