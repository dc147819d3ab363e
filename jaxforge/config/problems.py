"""Broken rules and changes that fix them.

Each change is tried before a message proposes it.
"""

import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

Value = float | str
"""A value that a message may propose."""

Change = Mapping[str, Value]
"""New values by key, as in {"model.dim": 64}."""

_TRIED = 64  # number of larger, and of smaller, multiples to try


class Changes(Iterable[Change]):
    """Lazily computed changes of one key, because most problems are never reported.

    Args:
        key: the key.
        values: returns its new values, best first.
    """

    def __init__(self, key: str, values: Callable[[], Iterable[Value]]) -> None:
        self._key, self._values = key, values

    def __iter__(self) -> Iterator[Change]:
        return iter(self._as_changes)

    @functools.cached_property
    def _as_changes(self) -> tuple[Change, ...]:
        return tuple({self._key: new} for new in self._values())


class Problem(NamedTuple):
    """A broken rule and its possible fixes.

    Attributes:
        what: message that states what is wrong.
        fixes: alternatives; each has candidate changes of the same key, best first.
    """

    what: str
    fixes: tuple[Iterable[Change], ...] = ()

    def message_with_fix(self, is_mended: Callable[[Change], bool]) -> str:
        """Return the message with the first effective change of each alternative, if there is one.

        Args:
            is_mended: returns whether a change fixes this problem without causing another.
        """
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


def single_change(key: str, value: Value) -> tuple[Change, ...]:
    """Return the only candidate change of a key."""
    return ({key: value},)


def multiples(key: str, value: int, unit: int) -> Changes:
    """Return multiples of `unit` near a key's value: first those above it, then those below."""
    above = -(-value // unit) * unit
    up = range(above, above + _TRIED * unit, unit)
    down = range(above - unit, max(0, above - (_TRIED + 1) * unit), -unit)
    return Changes(key, lambda: itertools.chain(up, down))


def nearest(key: str, value: int, others: Iterable[int]) -> Changes:
    """Return other values for a key, nearest first."""
    return Changes(key, lambda: sorted(others, key=lambda new: abs(new - value)))


def divisors(n: int) -> Iterator[int]:
    """Yield the divisors of `n` in ascending order."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    yield from small
    yield from (n // d for d in reversed(small) if d * d != n)
