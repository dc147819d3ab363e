"""Common base of all config sections."""

import functools
import os
from collections.abc import Iterator, Mapping, Set
from typing import Annotated, Generic, Self, TypeVar, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    NonNegativeFloat,
    PlainSerializer,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from jaxforge.config.problems import Change, Problem, problems_by_message


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

    def problems(self) -> Iterator[str | Problem]:
        """Yield each broken rule between keys of this section, with key names relative to it."""
        yield from ()

    @model_validator(mode="after")
    def _obey_the_rules(self) -> Self:
        broken = problems_by_message(self.problems())
        messages = (
            problem.message_with_fix(functools.partial(self._leaves_only, broken.keys() - {what}))
            for what, problem in broken.items()
        )
        if broken:
            raise ValueError("\n".join(messages))
        return self

    def _leaves_only(self, known: Set[str], change: Change) -> bool:
        return problems_by_message(self.model_copy(update=change).problems()).keys() <= known

    @field_validator("*", mode="before")
    @classmethod
    def _read_leniently(cls, value: object, info: ValidationInfo) -> object:
        annotation = cls.model_fields[info.field_name or ""].annotation
        kinds = (annotation, *get_args(annotation))
        if isinstance(value, bool) and bool not in kinds:  # pydantic reads True as 1
            raise PydanticCustomError("no_bool", "true and false are not values of this key")
        if _is_list(annotation) and not isinstance(value, list | tuple):
            return (value,)
        return value


T = TypeVar("T")


class Table(Mapping[str, T], Generic[T]):
    """Immutable, hashable mapping of names to values.

    Args:
        items: The values, which are copied.
    """

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


PathText = Annotated[str, AfterValidator(_expand_home)]
"""Type of a field with a path or URL; a leading ~ is the home directory."""


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
