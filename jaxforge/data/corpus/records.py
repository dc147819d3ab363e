"""Base classes of the inputs of `prepare`, and their records."""

import io
import os
import shlex
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, BinaryIO, ClassVar, NamedTuple, Protocol, Self

from jaxforge.cli.suggestions import listed
from jaxforge.data.corpus.remote_input import Location
from jaxforge.errors import UserError

MAX_RECORD_BYTES = 16 << 20
"""Default of `--max-record-bytes`. A parsed record takes up to ten times as much memory."""

READ_ERRORS = (OSError, EOFError, zlib.error)
"""Errors of reading an input (no access, damaged data), in addition to UserError."""

UNSUSPICIOUS_BYTES = 32 << 20  # unpacked size that is never checked
_LONGEST_SOURCE = 200  # characters
_LARGEST_RATIO = 250  # of compression; repetitive logs reach 100
_CHATS = ("messages", "conversations", "conversation")
_TEXT_FIELDS = ("text", "content", "body", "document", "raw_content", "article", "code", "story")


UNCHANGED, CHANGED, DROPPED = range(3)
"""Outcomes of a map for a record."""

Outcomes = tuple[int, ...]
"""Outcome of each map for a record, up to the map that dropped it."""


class Record(NamedTuple):
    """Record of an input: a document, a problem, or a record that a map dropped.

    Attributes:
        number: number of the record in its input, from 1.
        content: UTF-8 text, to be read once.
        problem: reason why there is no text, or "".
        advice: advice on `problem`, or "" for the default.
        outcomes: outcomes of maps; empty without maps, and for a problem.
        source: name of the record's source in statistics; "" for that of the input.
        is_utf8: False if the text was not UTF-8 before it was decoded for maps.
    """

    number: int
    content: BinaryIO
    problem: str = ""
    advice: str = ""
    outcomes: Outcomes = ()
    source: str = ""
    is_utf8: bool = True

    @property
    def is_dropped(self) -> bool:
        """True if a map dropped the record."""
        return self.outcomes[-1:] == (DROPPED,)


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


class Input(ABC):
    """A file or a dataset.

    Attributes:
        name: path relative to the input argument; determines order and splits.
        content: selects the document of a record.
    """

    name: str
    content: Content

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
    def weight(self) -> int:
        """Bytes to read, by which inputs are divided into units of work; 0 if unknown."""
        return 0

    @property
    def begins(self) -> bool:
        """False for slices of an input other than the first."""
        return True

    def slices(self, nbytes: int) -> "Sequence[Input]":
        """Return this input, or slices of about `nbytes` that hold its records in order."""
        return [self]

    @abstractmethod
    def with_content(self, content: Content) -> Self:
        """Return the input with another selection of documents."""

    @property
    def is_text(self) -> bool:
        """True for plain text, of one or more documents."""
        return False

    @property
    def is_document(self) -> bool:
        """True for a file that is one document."""
        return False

    @property
    def source(self) -> str:
        """Name of the source in statistics: the directory, or a file without one."""
        return self.name.rpartition("/")[0] or self.name

    @abstractmethod
    def records(self, start: int) -> Iterator[Record]:
        """Yield the records after the first `start`; may raise `READ_ERRORS`, or UserError."""

    def document(self, number: int) -> str:
        """Return the name of the document that is record `number`: `NAME:RECORD`."""
        return f"{self.name}:{number}"


class Span(NamedTuple):
    """Range of bytes of a file. A slice holds the records that begin within it.

    Attributes:
        start: first byte.
        end: byte after the last.
    """

    start: int
    end: int


@dataclass(frozen=True)
class File(Input):
    """An input that is a file.

    Attributes:
        path: path of the file, or its URL.
        name: path relative to the input argument.
        size: bytes on disk.
        modified: time of modification, nanoseconds since 1970, or another number that changes with
            the content.
        content: selects the document of a record.
        max_record_bytes: a larger record is a bad record.
        span: the slice to read; None reads the whole file.
        numbered_in_slice: True if records are numbered from the start of a slice, because their
            numbers in the file are not known without reading all of it.
    """

    numbered_in_slice: ClassVar[bool] = False

    path: Location
    name: str
    size: int
    modified: int
    content: Content = DEFAULT_FIELD
    max_record_bytes: int = MAX_RECORD_BYTES
    span: Span | None = None

    @property
    def identity(self) -> tuple[str, ...]:
        """Path, size and time of modification."""
        return self.where, str(self.path.absolute()), str(self.size), str(self.modified)

    @property
    def where(self) -> str:
        """The path, and the start of a slice with numbers of its own."""
        if self.span and self.numbered_in_slice:
            return f"{self.path} (from byte {self.span.start})"
        return str(self.path)

    def document(self, number: int) -> str:
        """Return `NAME:RECORD`, or `NAME@START:RECORD` in a slice with numbers of its own."""
        start = f"@{self.span.start}" if self.span and self.numbered_in_slice else ""
        return f"{self.name}{start}:{number}"

    @property
    def weight(self) -> int:
        """Bytes of the file, or of its slice."""
        return self.span.end - self.span.start if self.span else self.size

    @property
    def begins(self) -> bool:
        """False for slices of a file other than the first."""
        return not self.span or not self.span.start

    @property
    def can_be_sliced(self) -> bool:
        """Return whether the records of a span can be found without reading what precedes it."""
        return False

    def slices(self, nbytes: int) -> "Sequence[Self]":
        """Return equal spans of at most `nbytes`, or the whole file if it cannot be sliced.

        The spans follow from the size alone.
        """
        n = -(-self.size // nbytes)
        if n < 2 or not self.can_be_sliced:
            return [self]
        borders = [self.size * i // n for i in range(n + 1)]
        return [replace(self, span=Span(*ends)) for ends in pairwise(borders)]

    def with_content(self, content: Content) -> Self:
        """Return the file with another selection of documents."""
        return replace(self, content=content)

    def record(self, number: int, value: object) -> Record:
        """Return a record of the file: its document or its problem."""
        where = f"{self.where}:{number}"
        if not isinstance(value, Mapping):
            return bad_record(number, f"{where}: not a JSON object")
        record = to_record(number, value, where, self.content)
        size = record.content.seek(0, os.SEEK_END)
        record.content.seek(0)
        return self.too_large(number) if size > self.max_record_bytes else record

    def text_record(self, number: int, content: BinaryIO) -> Record:
        """Return a record of plain text; with maps, it is a record with the text field."""
        if not isinstance(self.content, MappingContent):
            return Record(number, content)
        text = content.read(self.max_record_bytes + 1)
        if len(text) > self.max_record_bytes:
            return self.too_large(number)
        document = text.decode(errors="replace").removeprefix("\ufeff")
        record = self.record(number, {self.content.text_field: document})
        return record._replace(is_utf8=is_utf8(text))

    def too_large(self, number: int) -> Record:
        """Return the bad record for a record beyond `max_record_bytes`."""
        problem = (
            f"{self.where}:{number}: the record is larger than {self.max_record_bytes:,} bytes"
        )
        return bad_record(
            number, problem, "raise --max-record-bytes, or leave such out with --skip-bad"
        )

    def check_growth(self, size: int) -> None:
        """Refuse a file that unpacks to `size` bytes if the ratio is implausible for text.

        Raises:
            UserError: the ratio is too large.
        """
        if size > UNSUSPICIOUS_BYTES and size > _LARGEST_RATIO * self.size:
            raise UserError(
                f"{self.path}: {self.size:,} bytes unpack to more than {_LARGEST_RATIO} times as "
                "much, as no text does; unpack the file yourself if that is right"
            )


def to_record(number: int, record: Mapping[str, Any], where: str, content: Content) -> Record:
    """Return the document in a mapping, or its problem, as a `Record`."""
    outcomes: Outcomes = ()
    try:
        if isinstance(content, MappingContent):
            mapped, outcomes = content.apply(number, record, where)
            if mapped is None:
                return Record(number, io.BytesIO(), outcomes=outcomes)
            record = mapped
        document = content.document(record)
    except UserError:  # a problem of the options, not of the record
        raise
    except RecordError as error:
        return bad_record(number, f"{where}: {error}", error.advice if number == 1 else "")
    except (ValueError, RecursionError) as error:
        return bad_record(number, f"{where}: {error}")
    # A lone surrogate, which JSON can spell and UTF-8 cannot, becomes "?".
    text = io.BytesIO(document.encode("utf-8", errors="replace"))
    return Record(number, text, outcomes=outcomes, source=content.source(record))


def is_utf8(data: bytes) -> bool:
    """Return whether bytes are UTF-8."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def bad_record(number: int, problem: str, advice: str = "") -> Record:
    """Return a `Record` without text."""
    return Record(number, io.BytesIO(), problem, advice)
