"""Selection of the document in a record."""

import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jaxforge.cli.suggestions import listed
from jaxforge.errors import UserError

_LONGEST_SOURCE = 200  # characters
_CHATS = ("messages", "conversations", "conversation")
_ANSWERS = (("prompt", "completion"), ("instruction", "output"))
_TEXT_FIELDS = ("text", "content", "body", "document", "raw_content", "article", "code", "story")

UNCHANGED, CHANGED, DROPPED = range(3)
"""Outcomes of a map for a record."""

Outcomes = tuple[int, ...]
"""Outcome of each map for a record, up to the map that dropped it."""


class TableRow(dict[str, Any]):
    """Row of a table, whose objects have all keys of their type: None may be a missing key."""


class Content(Protocol):
    """Selection of the document in a record."""

    @property
    def identity(self) -> tuple[str, ...]:
        """Strings that change whenever the same records may give other documents."""
        ...

    def columns(self, there: Sequence[str] | None, where: str) -> list[str]:
        """Return the columns of a table to read, [] for all; raise UserError if one is missing.

        `there` is None if the columns are not known before reading.
        """
        ...

    def document(self, record: Mapping[str, Any]) -> str:
        """Return the document; raise ValueError if the record has none."""
        ...

    def source(self, record: Mapping[str, Any]) -> str:
        """Return the name of the record's source in statistics, or ""."""
        ...


class MappingContent(ABC):
    """Content that maps records before it selects their documents (a `Content`)."""

    @property
    @abstractmethod
    def identity(self) -> tuple[str, ...]:
        """See `Content`."""

    @abstractmethod
    def columns(self, there: Sequence[str] | None, where: str) -> list[str]:
        """See `Content`."""

    @abstractmethod
    def document(self, record: Mapping[str, Any]) -> str:
        """See `Content`; the record is a result of `apply`."""

    @abstractmethod
    def source(self, record: Mapping[str, Any]) -> str:
        """See `Content`."""

    @property
    @abstractmethod
    def text_field(self) -> str:
        """Field of the record that is made of plain text."""

    @abstractmethod
    def apply(
        self, number: int, record: Mapping[str, Any], where: str
    ) -> tuple[Mapping[str, Any] | None, Outcomes]:
        """Return the mapped record, or None if it was dropped, and the outcome of each map.

        Args:
            number: number of the record in its input.
            record: the record.
            where: the record in messages.

        Raises:
            UserError: a map raises, or returns no record.
            ValueError: the record has no document.
        """


@dataclass(frozen=True)
class TextField:
    """Text in a field of the record.

    Attributes:
        field: key or column of the text.
        source_field: key or column of the record's source in statistics; "" if there is none.
    """

    field: str = "text"
    source_field: str = ""

    @property
    def identity(self) -> tuple[str, ...]:
        """The fields."""
        return tuple(filter(None, (self.field, self.source_field)))

    def source(self, record: Mapping[str, Any]) -> str:
        """Return the text in `source_field`, of bounded length, or ""."""
        value = record.get(self.source_field) if self.source_field else None
        return value[:_LONGEST_SOURCE] if isinstance(value, str) else ""

    def columns(self, there: Sequence[str] | None, where: str) -> list[str]:
        """Return the field.

        Raises:
            UserError: the column does not exist.
        """
        if there is not None and self.field not in there:
            message = f'{where} has no column "{self.field}"; it has {listed(there)}'
            raise UserError("; ".join(filter(None, [message, _option_for(there)])))
        has_source = self.source_field and (there is None or self.source_field in there)
        return list(dict.fromkeys([self.field, *([self.source_field] if has_source else [])]))

    def document(self, record: Mapping[str, Any]) -> str:
        """Return the text.

        Raises:
            RecordError: the record has no such text.
        """
        text = record.get(self.field)
        if isinstance(text, str):
            return text
        has = f"{text!r:.40}" if self.field in record else f"it has: {listed(record)}"
        advice = "" if self.field in record else _option_for(record)
        texts = [name for name, value in record.items() if isinstance(value, str)]
        if not advice and self.field not in record and len(texts) == 1:
            advice = _text_field(texts[0])
        raise RecordError(f'no text in "{self.field}" ({has})', advice)


DEFAULT_FIELD = TextField()
"""Default selection of the document: the field "text"."""


class RecordError(ValueError):
    """Error for a record without a document.

    Attributes:
        advice: advice to the user, or "" for the default.
    """

    def __init__(self, problem: str, advice: str) -> None:
        super().__init__(problem)
        self.advice = advice


def _option_for(names: Iterable[str]) -> str:
    """Return the advice to read one of these keys or columns, if a name is a likely candidate."""
    there = [str(name) for name in names]
    if key := next((name for name in _CHATS if name in there), ""):
        return f'"{key}" are conversations: give --conversations'
    for pair in _ANSWERS:
        if set(pair) <= set(there):
            return f'"{pair[0]}" and "{pair[1]}" are conversations: give --conversations'
    if {"chosen", "rejected"} <= set(there):
        return '"chosen" and "rejected" are pairs of answers: give --preferences'
    key = next((name for name in _TEXT_FIELDS if name in there), "")
    return _text_field(key) if key else ""


def _text_field(name: str) -> str:
    return f"give --text-field {shlex.quote(name)}"


def text_field(content: Content) -> str:
    """Return the field of a record that plain text becomes."""
    if isinstance(content, MappingContent):
        return content.text_field
    return content.field if isinstance(content, TextField) else "text"
