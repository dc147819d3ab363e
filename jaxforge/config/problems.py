"""A broken rule, and values that would mend it: tried, so that no message proposes a bad one."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

Value = int | str
"""What a message may propose."""

Change = Mapping[str, Value]
"""New values by key, as in {"model.dim": 64}."""

_TRIED = 64  # multiples of a number, upwards


class Problem(NamedTuple):
    """A rule that is broken, and what might mend it.

    Attributes:
        what: what is wrong.
        fixes: alternatives: changes that may do, the best first, of the same key.
    """

    what: str
    fixes: tuple[tuple[Change, ...], ...] = ()

    def told(self, is_mended: Callable[[Change], bool]) -> str:
        """The problem, and the first change of each alternative that mends it; if any does.

        Args:
            is_mended: whether what is changed is without this problem, and has no new one.
        """
        proposals = [said(change) for change in self.working(is_mended)]
        if not proposals:
            proposals = [next(iter(changes[0])) for changes in self.fixes if changes]
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
    every = (one if isinstance(one, Problem) else Problem(one) for one in problems)
    return {problem.what: problem for problem in every}


def one(key: str, value: Value) -> tuple[Change, ...]:
    """The one value for a key that may do."""
    return ({key: value},)


def multiples(key: str, value: int, unit: int) -> tuple[Change, ...]:
    """Other values for a key that must be a multiple: those above it, then those below."""
    above = math.ceil(value / unit) * unit
    up = range(above, above + _TRIED * unit, unit)
    return tuple({key: new} for new in (*up, *range(above - unit, 0, -unit)))


def nearest(key: str, value: int, others: Iterable[int]) -> tuple[Change, ...]:
    """Other values for a key, those nearest to it first."""
    return tuple({key: new} for new in sorted(others, key=lambda new: abs(new - value)))


def divisors(n: int) -> Iterator[int]:
    """All of them, ascending."""
    return (d for d in range(1, n + 1) if n % d == 0)
