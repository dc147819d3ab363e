"""Common base of all config sections."""

import ctypes
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Generic, NoReturn, Self, TypeVar, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PlainSerializer,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from jaxforge.config.facts import Flag, Location, Requires, facts

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
        _check_rounded(parsed, read)
        return parsed


def _read_leniently(value: object, annotation: object) -> object:
    kinds = (annotation, *get_args(annotation))
    if isinstance(value, bool) and bool not in kinds:  # pydantic reads True as 1
        raise PydanticCustomError("no_bool", "true and false are not values of this key")
    if _is_list(annotation) and not isinstance(value, list | tuple):
        return (value,)
    return value


def _check_on_devices(value: object, is_for_host: bool = False) -> None:
    """Check that devices, which compute in 32 bits, can represent the numbers of a key."""
    match value:
        case int() if not (is_for_host or value in _INT32):
            bound = f"most {_INT32[-1]:,}" if value > 0 else f"least {_INT32[0]:,}"
            _refuse(f"devices compute with integers of 32 bits: use at {bound}")
        case float() if 0 < abs(value) < _SMALLEST:
            _refuse(f"rounds to 0 in float32: use at least {_SMALLEST * 1.01:.3g}")
        case float() if abs(value) > _LARGEST:
            _refuse(f"rounds to infinity in float32: use at most {_LARGEST * 0.999:.3g}")
        case tuple() | Mapping():
            for item in value.values() if isinstance(value, Mapping) else value:
                _check_on_devices(item, is_for_host)


def _check_rounded(value: object, read: Callable[[object], object]) -> None:
    """Check that numbers are in the range of their key when they are rounded to float32."""
    numbers = value if isinstance(value, tuple) else (value,)
    if not numbers or not all(isinstance(number, float) for number in numbers):
        return
    rounded = tuple(ctypes.c_float(number).value for number in numbers)  # the nearest float32
    try:
        read(rounded if isinstance(value, tuple) else rounded[0])
    except ValidationError:
        text = ", ".join(f"{number:g}" for number in rounded)
        _refuse(f"rounds to {text} in float32, which is out of range: use a smaller number")


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
