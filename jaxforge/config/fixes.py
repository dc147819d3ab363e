"""What would mend a broken rule: values that were tried, so that a message proposes no bad one."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from pydantic import ValidationError

from jaxforge.config.job import JobConfig

Change = Mapping[str, int]
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

    def told(self, config: JobConfig, is_mended: Callable[[JobConfig], bool]) -> str:
        """The problem, and the first change of each alternative that mends it; if any does.

        Args:
            config: the configuration.
            is_mended: whether a changed one is without this problem, and has no new one.
        """
        proposals = []
        for changes in self.fixes:
            tried = ((change, changed(config, change)) for change in changes)
            works = (change for change, new in tried if new is not None and is_mended(new))
            if change := next(works, None):
                proposals.append(" and ".join(f"{key} to {new}" for key, new in change.items()))
        if not proposals:
            proposals = [next(iter(changes[0])) for changes in self.fixes if changes]
        return f"{self.what}: change {' or '.join(proposals)}" if proposals else self.what


def changed(config: JobConfig, change: Change) -> JobConfig | None:
    """The configuration with other values; None where its sections do not allow them."""
    for key, value in change.items():
        name, _, field = key.partition(".")
        section = getattr(config, name)
        given = {key: getattr(section, key) for key in section.model_fields_set}
        try:
            section = type(section).model_validate({**given, field: value})
        except ValidationError:
            return None
        config = config.model_copy(update={name: section})
    return config


def multiples(key: str, value: int, unit: int) -> tuple[Change, ...]:
    """Other values for a key that must be a multiple: those above it, then those below."""
    above = math.ceil(value / unit) * unit
    up = range(above, above + _TRIED * unit, unit)
    return tuple({key: new} for new in (*up, *range(above - unit, 0, -unit)))


def smaller_axis(config: JobConfig, axis: str, size: int) -> tuple[Change, ...]:
    """Smaller sizes of a mesh axis, the largest first; dp_shard takes the devices."""
    is_open = config.distributed.dp_shard == -1
    rest = {} if is_open or axis == "dp_shard" else {"distributed.dp_shard": -1}
    return tuple({f"distributed.{axis}": new, **rest} for new in list(divisors(size))[-2::-1])


def divisors(n: int) -> Iterable[int]:
    """All of them, ascending."""
    return (d for d in range(1, n + 1) if n % d == 0)


def nearest(key: str, value: int, others: Iterator[int]) -> tuple[Change, ...]:
    """Other values for a key, those nearest to it first."""
    return tuple({key: new} for new in sorted(others, key=lambda new: abs(new - value)))
