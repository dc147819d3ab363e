"""A broken rule, and values that would mend it: tried, so that no message proposes a bad one."""

import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

Value = int | str
"""What a message may propose."""

Change = Mapping[str, Value]
"""New values by key, as in {"model.dim": 64}."""

_TRIED = 64  # multiples of a number, upwards


class Changes(Iterable[Change]):
    """Values of a key, made when they are looked at: most problems are found and never told.

    Args:
        key: the key.
        values: makes its new values, the best first.
    """

    def __init__(self, key: str, values: Callable[[], Iterable[Value]]) -> None:
        self._key, self._values = key, values

    def __iter__(self) -> Iterator[Change]:
        return iter(self._as_changes)

    @functools.cached_property
    def _as_changes(self) -> tuple[Change, ...]:
        return tuple({self._key: new} for new in self._values())


class Problem(NamedTuple):
    """A rule that is broken, and what might mend it.

    Attributes:
        what: what is wrong.
        fixes: alternatives: changes that may do, the best first, of the same key.
    """

    what: str
    fixes: tuple[Iterable[Change], ...] = ()

    def text_with_fix(self, is_mended: Callable[[Change], bool]) -> str:
        """The problem, and the first change of each alternative that mends it; if any does.

        Args:
            is_mended: whether what is changed is without this problem, and has no new one.
        """
        proposals = [said(change) for change in self.working(is_mended)]
        if not proposals:
            proposals = [next(iter(change)) for change in self.working(lambda _: True)]
        return f"{self.what}: change {' or '.join(proposals)}" if proposals else self.what

    def working(self, is_mended: Callable[[Change], bool]) -> list[Change]:
        """The first change of each alternative that mends it."""
        firsts = (next(filter(is_mended, changes), None) for changes in self.fixes)
        return [change for change in firsts if change is not None]


def said(change: Change) -> str:
    """In words that follow "change": `distributed.tp to 1 and distributed.dp_shard to -1`."""
    return " and ".join(f"{key} to {json.dumps(new)}" for key, new in change.items())


def by_what(problems: Iterable[str | Problem]) -> dict[str, Problem]:
    """Problems by what is wrong; sentences are problems that nothing is known to mend."""
    every = (p if isinstance(p, Problem) else Problem(p) for p in problems)
    return {problem.what: problem for problem in every}


def single_change(key: str, value: Value) -> tuple[Change, ...]:
    """The one value for a key that may do."""
    return ({key: value},)


def multiples(key: str, value: int, unit: int) -> Changes:
    """Other values for a key that must be a multiple: those above it, then those below."""
    above = math.ceil(value / unit) * unit
    up, down = range(above, above + _TRIED * unit, unit), range(above - unit, 0, -unit)
    return Changes(key, lambda: itertools.chain(up, down))


def nearest(key: str, value: int, others: Iterable[int]) -> Changes:
    """Other values for a key, those nearest to it first."""
    return Changes(key, lambda: sorted(others, key=lambda new: abs(new - value)))


def divisors(n: int) -> Iterator[int]:
    """All of them, ascending."""
    return (d for d in range(1, n + 1) if n % d == 0)
