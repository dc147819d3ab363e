"""Inputs of `prepare`, their records, and the selection of the document in a record."""

import io
import re
import shlex
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, BinaryIO, ClassVar, NamedTuple

from jaxforge.cli.suggestions import listed
from jaxforge.errors import UserError

MAX_RECORD_BYTES = 16 << 20
"""Default of `--max-record-bytes`. A parsed record takes up to ten times as much memory."""

READ_ERRORS = (OSError, EOFError, zlib.error)
"""Errors of reading an input (no access, damaged data), in addition to UserError."""

UNCHANGED, CHANGED, DROPPED = range(3)
"""Outcomes of a map for a record."""

Outcomes = tuple[int, ...]
"""Outcome of each map for a record, up to the map that dropped it."""

_LONGEST_SOURCE = 200  # characters
_CHATS = ("messages", "conversations", "conversation")
_ANSWERS = (("prompt", "completion"), ("instruction", "output"))
_TEXT_FIELDS = ("text", "content", "body", "document", "raw_content", "article", "code", "story")
_SURROGATE = re.compile("[\ud800-\udfff]")


class TableRow(dict[str, Any]):
    """Row of a table, whose objects have all keys of their type: None may be a missing key."""


class Content(ABC):
    """Selection of the document in a record.

    Attributes:
        has_maps: functions of the user change or drop records before.
        text_field: field of the record that plain text becomes.
    """

    has_maps: ClassVar[bool] = False

    @property
    def text_field(self) -> str:
        """See the class."""
        return "text"

    @property
    @abstractmethod
    def identity(self) -> tuple[str, ...]:
        """Strings that change whenever the same records may give other documents."""

    @abstractmethod
    def columns(self, there: Sequence[str] | None, where: str) -> list[str]:
        """Return the columns of a table to read, [] for all; raise UserError if one is missing.

        `there` is None if the columns are not known before reading.
        """

    @abstractmethod
    def document(self, record: Mapping[str, Any]) -> str:
        """Return the document; raise ValueError if the record has none."""

    def source(self, record: Mapping[str, Any]) -> str:
        """Return the name of the record's source in statistics; "" for that of the input."""
        return ""

    def apply(
        self, record: Mapping[str, Any], where: str
    ) -> tuple[Mapping[str, Any] | None, Outcomes]:
        """Return the mapped record, or None if it was dropped, and the outcome of each map.

        Args:
            record: the record.
            where: the record in messages.

        Raises:
            UserError: a map raises, or returns no record.
            ValueError: the record has no document.
        """
        return record, ()


@dataclass(frozen=True)
class TextField(Content):
    """Text in a field of the record.

    Attributes:
        field: key or column of the text.
        source_field: key or column of the record's source in statistics; "" if there is none.
    """

    field: str = "text"
    source_field: str = ""

    @property
    def text_field(self) -> str:
        """The field."""
        return self.field

    @property
    def identity(self) -> tuple[str, ...]:
        """The fields."""
        return tuple(filter(None, (self.field, self.source_field)))

    def source(self, record: Mapping[str, Any]) -> str:
        """Return the text in `source_field`, of bounded length, or ""."""
        value = record.get(self.source_field) if self.source_field else None
        # Names go into parts and manifest: a whole text in this field must not.
        return value[:_LONGEST_SOURCE] if isinstance(value, str) else ""

    def columns(self, there: Sequence[str] | None, where: str) -> list[str]:
        """Return the fields; raise UserError if the text is missing."""
        if there is not None and self.field not in there:
            message = f'{where} has no column "{self.field}"; it has {listed(there)}'
            raise UserError("; ".join(filter(None, [message, _option_for(there)])))
        # Tables without this column are counted under the name of the input.
        has_source = self.source_field and (there is None or self.source_field in there)
        # Both options may name the same column, and columns are read once.
        return list(dict.fromkeys([self.field, *([self.source_field] if has_source else [])]))

    def document(self, record: Mapping[str, Any]) -> str:
        """Return the text; raise RecordError if the record has no such text."""
        text = record.get(self.field)
        if isinstance(text, str):
            return text
        has = f"{text!r:.40}" if self.field in record else f"it has: {listed(record)}"
        advice = "" if self.field in record else _option_for(record)
        # A record with a single text leaves no doubt about the field.
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


class Record(NamedTuple):
    """Record of an input: a document, a problem, or a record that a map dropped.

    Attributes:
        number: number of the record in its input, from 1.
        content: UTF-8 text, to be read once.
        problem: reason why there is no text, or "".
        advice: advice on `problem`, or "" for the default.
        outcomes: outcomes of maps; empty without maps, and for a problem.
        source: name of the record's source in statistics; "" for that of the input.
        is_utf8: False if characters were replaced, because the text was not UTF-8.
    """

    number: int
    content: BinaryIO
    problem: str = ""
    advice: str = ""
    outcomes: Outcomes = ()
    source: str = ""
    is_utf8: bool = True


class Input(ABC):
    """A file or a dataset.

    Attributes:
        name: path relative to the input argument; determines order and splits.
        content: selects the document of a record.
        is_text: True for plain text, of one or more documents.
    """

    name: str
    content: Content
    is_text: ClassVar[bool] = False

    @property
    @abstractmethod
    def identity(self) -> tuple[str, ...]:
        """Strings that change whenever the documents may have changed."""

    @property
    @abstractmethod
    def where(self) -> str:
        """Name of the input in messages."""

    @property
    def text_size(self) -> int | None:
        """Bytes of text; None where they are not known without reading."""
        return None

    @property
    @abstractmethod
    def weight(self) -> int:
        """Bytes to read, by which inputs are divided into units of work; 0 if unknown."""

    @property
    @abstractmethod
    def begins(self) -> bool:
        """False for slices of an input other than the first."""

    @abstractmethod
    def slices(self, nbytes: int) -> "Sequence[Input]":
        """Return this input, or slices of about `nbytes` that hold its records in order."""

    @property
    def source(self) -> str:
        """Name of the source in statistics: the directory, or a file without one."""
        return self.name.rpartition("/")[0] or self.name

    @abstractmethod
    def check_unchanged(self, *, opening: bool = False) -> None:
        """Check that the input has not changed since it was planned.

        Args:
            opening: the input is about to be read.

        Raises:
            InputChangedError: it has changed.
            OSError, UserError: its state cannot be read.
        """

    @abstractmethod
    def records(self) -> Iterator[Record]:
        """Yield the records; may raise `READ_ERRORS`, or UserError."""

    def document(self, number: int) -> str:
        """Return the name of the document that is record `number`: `NAME:RECORD`."""
        return f"{self.name}:{number}"


def to_record(number: int, record: Mapping[str, Any], where: str, content: Content) -> Record:
    """Return the document in a mapping, or its problem, as a `Record`."""
    try:
        mapped, outcomes = content.apply(record, where)
        if mapped is None:
            return Record(number, io.BytesIO(), outcomes=outcomes)
        # Maps return plain dicts, in which None still stands for a missing key of the table.
        if isinstance(record, TableRow) and mapped is not record:
            mapped = TableRow(mapped)
        document = content.document(mapped)
    except UserError:  # a problem of the options, not of the record
        raise
    except RecordError as error:
        # A field that the first record lacks is a wrong option; later, the record is at fault.
        return bad_record(number, f"{where}: {error}", error.advice if number == 1 else "")
    except (ValueError, RecursionError) as error:
        return bad_record(number, f"{where}: {error}")
    text = without_surrogates(document)
    return Record(
        number,
        io.BytesIO(text.encode()),
        outcomes=outcomes,
        source=without_surrogates(content.source(mapped)),
        is_utf8=text is document,
    )


def bad_record(number: int, problem: str, advice: str = "") -> Record:
    """Return a `Record` without text."""
    return Record(number, io.BytesIO(), problem, advice)


def without_surrogates(text: str) -> str:
    """Return the text with U+FFFD for each lone surrogate, which JSON can spell and UTF-8 cannot.

    The number of characters stays the same.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return _SURROGATE.sub("\ufffd", text)
    return text


def is_utf8(data: bytes) -> bool:
    """Return whether bytes are UTF-8."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def library(name: str, purpose: str, extra: str = "data") -> ModuleType:
    """Import an optional library.

    Args:
        name: module name, such as "pyarrow.parquet".
        purpose: use of the library in the error message, such as "reading Parquet".
        extra: the extra of jaxforge that has the library.

    Raises:
        UserError: the library is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise UserError(
            f"{purpose} needs {package}: pip install 'jaxforge[{extra}]' ({error})"
        ) from error
