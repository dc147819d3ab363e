"""Base of all config sections, and the facts about keys that their fields have as metadata.

A fact stands where its key is declared, and checks, messages and pages are derived from it:

    ema_dtype: Annotated[Literal["float32", "bfloat16"], Needs("ema_decay")] = "float32"

A fact of a field that is a table applies to all keys of the table.
"""

import enum
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    NoReturn,
    Self,
    TypeVar,
    cast,
    get_args,
    get_origin,
)

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PlainSerializer,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

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
    TRAINING = "affects how weights are trained, and not what trained weights compute"


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


OUT_OF_RANGE = "out_of_range"
"""Type of the error of a number that devices cannot represent."""

_INT32 = range(-(2**31), 2**31)
_SMALLEST, _LARGEST = 2.0**-126, float(2**128 - 2**104)  # normal numbers of float32


class Section(BaseModel):
    """Immutable, hashable table of the config; unknown keys are errors.

    A section is validated when it is constructed. `model_fields_set` has the keys set by the user.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
    )

    def _problems(self) -> Iterator[str]:
        """Yield each broken rule between keys of this section, with key names relative to it."""
        yield from ()

    def with_values(self, values: Mapping[str, object]) -> Self:
        """Return a copy with other values, which are not validated.

        They do not count as set by the user (`model_fields_set`).

        Args:
            values: values by key. In a `JobConfig`, a key is a section, or a section and a name as
                in "train.batch_size".
        """
        return self.model_construct(self.model_fields_set, **{**dict(self), **values})

    def _unmet(self) -> Iterator[str]:
        """Yield a message for each setting without effect, if its field has `Requires`."""
        for key, needs in facts(type(self), Requires):
            field = type(self).model_fields.get(key)
            if field is None:  # of a table in this one, which checks itself
                continue
            value, needed = getattr(self, key), getattr(self, needs.key)
            if not needs.is_met(needed) and value != field.get_default(call_default_factory=True):
                shown = key if isinstance(value, Section) else f"{key} = {json.dumps(value)}"
                yield needs.message([shown], needs.key, needed)

    @model_validator(mode="after")
    def _obey_the_rules(self) -> Self:
        if problems := dict.fromkeys((*self._unmet(), *self._problems())):
            raise ValueError("\n".join(problems))
        return self

    @field_validator("*", mode="wrap")
    @classmethod
    def _read(cls, value: object, read: Callable[[object], object], info: ValidationInfo) -> object:
        field = cls.model_fields[info.field_name or ""]
        parsed = read(_read_leniently(value, field.annotation))
        _check_on_devices(parsed, Flag.HOST_INTEGER in field.metadata)
        return parsed


def _read_leniently(value: object, annotation: object) -> object:
    kinds = (annotation, *get_args(annotation))
    if isinstance(value, bool) and bool not in kinds:  # pydantic reads True as 1
        raise PydanticCustomError("no_bool", "true and false are not values of this key")
    # `--eval.tasks=piqa` is a list of one item.
    if _is_list(annotation) and not isinstance(value, list | tuple):
        return (value,)
    return value


def _check_on_devices(value: object, is_for_host: bool = False) -> None:
    """Check that devices, which compute in 32 bits, can represent the numbers of a key."""
    match value:
        # A larger integer would wrap, or fail in the middle of a start.
        case int() if not (is_for_host or value in _INT32):
            bound = f"most {_INT32[-1]:,}" if value > 0 else f"least {_INT32[0]:,}"
            _refuse(f"devices compute with integers of 32 bits: use at {bound}")
        # Accelerators flush subnormal numbers to 0.
        case float() if 0 < abs(value) < _SMALLEST:
            _refuse(f"rounds to 0 in float32: use at least {_SMALLEST * 1.01:.3g}")
        case float() if abs(value) > _LARGEST:
            _refuse(f"rounds to infinity in float32: use at most {_LARGEST * 0.999:.3g}")
        case tuple() | Mapping():
            for item in value.values() if isinstance(value, Mapping) else value:
                _check_on_devices(item, is_for_host)


def _refuse(problem: str) -> NoReturn:
    raise PydanticCustomError(OUT_OF_RANGE, "{problem}", {"problem": problem})


T = TypeVar("T")


class Table(Mapping[str, T], Generic[T]):
    """Immutable, hashable mapping of names to values."""

    def __init__(self, items: Mapping[str, T] | None = None) -> None:
        self._items = dict(items or {})

    def __getitem__(self, name: str) -> T:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return f"Table({self._items})"


def _expand_home(path: str) -> str:
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise PydanticCustomError("home", "the home directory of ~ is unknown on this machine")
    return expanded


_Text = Annotated[str, AfterValidator(_expand_home)]  # a leading ~ is the home directory

BucketPath = Annotated[_Text, Location("bucket")]
"""Type of a field with a path, or with the URL of a file or directory in a bucket."""
AnyPath = Annotated[_Text, Location("any")]
"""Type of a field with a path or URL that its reader checks."""
LocalPath = Annotated[_Text, Location("none", "a local file or directory")]
"""Type of a field with a path on this machine."""
DiskPath = Annotated[_Text, Location("none", "a fast disk of the node")]
"""Type of a field with a directory on a disk of each node."""
MemoryPath = Annotated[_Text, Location("none", "a directory in the memory of the host")]
"""Type of a field with a directory of a file system in memory."""
RunPath = Annotated[
    _Text, Location("none", "a directory in the run, which is copied to its bucket")
]
"""Type of a field with a path relative to the run directory."""


Weights = Table[float]
WeightTable = Annotated[
    Mapping[str, NonNegativeFloat], AfterValidator(Table), PlainSerializer(dict)
]
"""Type of a field that maps names to numbers of at least 0."""


def _word(value: object) -> object:
    return str(value).lower() if isinstance(value, bool) else value


Words = Table[str]
WordTable = Annotated[
    Mapping[str, Annotated[str, BeforeValidator(_word)]],
    AfterValidator(Table),
    PlainSerializer(dict),
]
"""Type of a field that maps names to text; true, false and numbers are converted to text."""


Options = Table[bool | int | float | str]
OptionTable = Annotated[
    Mapping[str, bool | int | float | str], AfterValidator(Table), PlainSerializer(dict)
]
"""Type of a field that maps names of arguments to plain values."""


def _is_list(annotation: object) -> bool:
    """Return whether a field is a list, so that a bare item may stand for it."""
    return get_origin(annotation) is tuple and get_args(annotation)[-1] is ...


def not_multiple(key: str, value: int, unit_key: str, unit: int) -> str:
    """Return the message for a value that is not a multiple of the value of another key."""
    return f"{key} = {value} must be a multiple of {unit_key} = {unit}: change {key} or {unit_key}"


MOST_LAYERS = 10_000
"""Largest number of layers of a model."""
MOST_DEVICES = 1 << 20
"""Largest size of a mesh axis."""

AxisSize = Annotated[int, Field(gt=0, le=MOST_DEVICES)]
"""Type of a key with the size of a mesh axis."""
