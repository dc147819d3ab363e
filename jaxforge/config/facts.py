"""Facts about config keys, as metadata of their fields.

A fact stands where its key is declared, and checks, messages and pages are derived from it:

    ema_dtype: Annotated[Literal["float32", "bfloat16"], Needs("ema_decay")] = "float32"

A fact of a field that is a table applies to all keys of the table.
"""

import enum
import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast, get_args

from pydantic import BaseModel

_OFF = (None, 0, "", "off", "none", ())
"""Values that disable what a key sets; 0 includes false."""


@dataclass(frozen=True)
class Needs:
    """Setting without which a key has no effect, which is a warning.

    Attributes:
        key: name of a key of the same table, or name with its section, as in "train.objective".
        value: value of that key; None: any that does not disable it.
    """

    key: str
    value: bool | str | None = None

    def is_met(self, value: object) -> bool:
        """Return whether the value of `key` gives the effect."""
        return value not in _OFF if self.value is None else value == self.value

    def absolute(self, key: str) -> str:
        """Return the dotted name of the needed setting of `key`."""
        return self.key if "." in self.key else f"{key.rpartition('.')[0]}.{self.key}"

    def describe(self, key: str) -> str:
        """Return the setting that `key` needs, such as `optimizer.name = "muon"`."""
        value = "" if self.value is None else f" = {json.dumps(self.value)}"
        return self.absolute(key) + value

    def message(self, settings: Sequence[str], needed: str, value: object) -> str:
        """Return the message about settings without effect."""
        verb, them = ("have", "them") if len(settings) > 1 else ("has", "it")
        without = f"without {needed}" if value is None else f"with {needed} = {json.dumps(value)}"
        remedy = needed if self.value is None else f"{needed} to {json.dumps(self.value)}"
        return f"{', '.join(settings)} {verb} no effect {without}: remove {them}, or set {remedy}"


class Requires(Needs):
    """Setting of the same table without which a key is refused."""


@dataclass(frozen=True)
class WithinRun:
    """Number of updates that has no effect in a run of fewer updates, which is a warning.

    Attributes:
        is_reported: the warning for all such keys covers this one; others have a rule of their own
            in `ineffective_settings`, or always an effect.
    """

    is_reported: bool = True


class Interval(WithinRun):
    """Updates between two events, counted in updates of the full batch."""


@dataclass(frozen=True)
class SplitBy:
    """Axes of the mesh that split what a key counts into equal shares.

    Attributes:
        axes: names of the axes, whose product must divide the value.
        resolved: property of the table with the value that applies, if it is not that of the key.
    """

    axes: str
    resolved: str = ""


@dataclass(frozen=True)
class Invisible:
    """Effect on what trained weights compute, of a key that does not change their shapes.

    Attributes:
        resolved: property of the section with the value that applies, if the key may be not set.
    """

    resolved: str = ""


class Structure(Invisible):
    """Effect without which trained weights are useless."""


class Constant(Invisible):
    """Effect that a user may change on purpose."""


@dataclass(frozen=True)
class Location:
    """Kind of location that a path key may name in addition to local files.

    Attributes:
        urls: "bucket": URLs of buckets; "any": also other URLs, which the reader of the key checks;
            "none": no URLs.
        instead: what a message about a URL tells to name, if there are none.
    """

    urls: Literal["bucket", "any", "none"]
    instead: str = ""


class Flag(enum.Enum):
    """Facts that need no value."""

    HOST_INTEGER = "only the host computes with the integer, in any number of bits"
    PER_HOST = "may differ between the processes of a job"
    SIDE_EFFECT = "writes files or loads compiled code, which the config of a stranger must not"
    NO_RESULT = "does not affect the results of a run, so that it may change at a resume"


F = TypeVar("F")


def facts(table: type[BaseModel], kind: type[F]) -> tuple[tuple[str, F], ...]:
    """Return the facts of a kind with the dotted names of their keys, such as "datasets.path"."""
    return _facts(table, cast("Any", kind))  # mypy: a type is hashable


def flagged(table: type[BaseModel], flag: Flag) -> frozenset[str]:
    """Return the dotted names of the keys and tables with a flag."""
    return frozenset(key for key, each in facts(table, Flag) if each is flag)


@functools.cache
def _facts(table: Any, kind: Any) -> tuple[tuple[str, Any], ...]:  # noqa: ANN401  # hashable types
    pairs = []
    for name, field in table.model_fields.items():
        for part in (*field.metadata, *_parts(field.annotation)):
            if isinstance(part, kind):
                pairs.append((name, part))
            elif isinstance(part, type) and issubclass(part, BaseModel):
                pairs += [(f"{name}.{key}", fact) for key, fact in _facts(part, kind)]
    return tuple(pairs)


def _parts(annotation: object) -> Iterator[object]:
    """Yield the members and metadata of a type, as of `Annotated[int, X] | None`."""
    yield annotation
    for part in get_args(annotation):
        yield from _parts(part)
