"""What the schema knows and jaxforge does not do yet: refused, never ignored."""

from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any, NamedTuple

from jaxforge.config.job import JobConfig, shown
from jaxforge.config.problems import Value, said


class NotBuilt(NamedTuple):
    """Values of a key that cannot be used yet."""

    key: str
    """Such as "model.num_experts"."""
    refuses: Callable[[Any], bool]
    """Whether a value of the key needs what is not built."""
    what: str
    """The missing piece, to precede "is not built yet"."""
    instead: Value
    """What to set for now."""


NOT_BUILT: tuple[NotBuilt, ...] = ()
"""The list to shorten: building a feature deletes its line. All is built that the schema knows."""


def not_built_yet(config: JobConfig) -> Iterator[str]:
    """Yields one sentence per key whose value needs something that is not built.

    Args:
        config: A loaded configuration.
    """
    for key, refuses, what, instead in NOT_BUILT:
        value = reduce(getattr, key.split("."), config)
        if refuses(value):
            yield (
                f"{key} = {shown(value)}: {what} is not built yet: change {said({key: instead})}"
            )
