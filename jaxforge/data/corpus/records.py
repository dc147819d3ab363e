"""Records and documents: what all inputs of `prepare` have in common."""

import io
import os
import shlex
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from jaxforge.errors import UserError

MAX_RECORD_BYTES = 16 << 20
"""Default of `--max-record-bytes`: parsed, a record takes up to ten times as much memory."""

READ_ERRORS = (OSError, EOFError, zlib.error)
"""What reading an input may raise, beside UserError: no access, or damaged data."""

_UNSUSPICIOUS_BYTES = 32 << 20  # that any compressed file may grow to
_LARGEST_RATIO = 250  # of text, compressed; repetitive logs reach 100
_CHATS = ("messages", "conversations", "conversation")
_TEXT_FIELDS = ("text", "content", "body", "document", "raw_content", "article", "code", "story")


class Record(NamedTuple):
    """One document as it is read.

    Attributes:
        number: of the record in its input, from 1.
        content: UTF-8 text, to be read once.
        problem: why there is no text, or "".
        advice: what the user can do about `problem`, or "" for the usual.
    """

    number: int
    content: BinaryIO
    problem: str = ""
    advice: str = ""


class Content(Protocol):
    """Selection of a record's part that is the document."""

    @property
    def identity(self) -> tuple[str, ...]:
        """Changes whenever other documents may come of the same records."""
        ...

    def columns(self, there: Sequence[str] | None, where: str) -> list[str]:
        """The columns of a table that are read, [] being all; UserError if needed ones lack.

        `there` is None where they are not known before reading.
        """
        ...

    def document(self, record: Mapping[str, Any]) -> str:
        """The document; raises ValueError if the record holds none."""
        ...


@dataclass(frozen=True)
class TextField:
    """A text that stands in the record.

    Attributes:
        field: its key or column.
    """

    field: str = "text"

    @property
    def identity(self) -> tuple[str, ...]:
        """The field."""
        return (self.field,)

    def columns(self, there: Sequence[str] | None, where: str) -> list[str]:
        """The field.

        Raises:
            UserError: there is no such column.
        """
        if there is not None and self.field not in there:
            message = f'{where} has no column "{self.field}"; it has {", ".join(there)}'
            raise UserError("; ".join(filter(None, [message, _option_for(there)])))
        return [self.field]

    def document(self, record: Mapping[str, Any]) -> str:
        """The text.

        Raises:
            RecordError: there is none.
        """
        text = record.get(self.field)
        if isinstance(text, str):
            return text
        there = ", ".join(map(str, record)) or "nothing"
        has = f"{text!r:.40}" if self.field in record else f"it has: {there}"
        advice = "" if self.field in record else _option_for(record)
        texts = [name for name, value in record.items() if isinstance(value, str)]
        if not advice and self.field not in record and len(texts) == 1:
            advice = _text_field(texts[0])
        raise RecordError(f'no text in "{self.field}" ({has})', advice)


DEFAULT_FIELD = TextField()
"""What of a record is read by default."""


class RecordError(ValueError):
    """A record that holds no document.

    Attributes:
        advice: what the user can do, or "" for the usual.
    """

    def __init__(self, problem: str, advice: str) -> None:
        super().__init__(problem)
        self.advice = advice


def _option_for(names: Iterable[str]) -> str:
    """Return the advice to read one of these keys or columns, if it is likely to be meant."""
    there = [str(name) for name in names]
    if key := next((name for name in _CHATS if name in there), ""):
        return f'"{key}" are conversations: give --conversations'
    key = next((name for name in _TEXT_FIELDS if name in there), "")
    return _text_field(key) if key else ""


def _text_field(name: str) -> str:
    return f"give --text-field {shlex.quote(name)}"


class Input(ABC):
    """A file or a dataset.

    Attributes:
        name: its path below what it was found in; decides its place and, in part, its splits.
    """

    name: str

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

    @abstractmethod
    def records(self, start: int) -> Iterator[Record]:
        """Yield the records after the first `start`; may raise `READ_ERRORS`, or UserError."""

    def document(self, number: int) -> str:
        """Return the name of the document that is record `number`: `NAME:RECORD`."""
        return f"{self.name}:{number}"


@dataclass(frozen=True)
class File(Input):
    """An input that is a file.

    Attributes:
        path: where it is.
        name: its path below the input that it was found in.
        size: bytes on disk.
        modified: nanoseconds since 1970.
        content: of its records.
        max_record_bytes: a larger record is a bad record.
    """

    path: Path
    name: str
    size: int
    modified: int
    content: Content = DEFAULT_FIELD
    max_record_bytes: int = MAX_RECORD_BYTES

    @property
    def identity(self) -> tuple[str, ...]:
        """Path, size and time of change."""
        return self.where, str(self.path.absolute()), str(self.size), str(self.modified)

    @property
    def where(self) -> str:
        """The path."""
        return str(self.path)

    def record(self, number: int, value: object) -> Record:
        """Return a record of the file: its document, or what is wrong with it."""
        where = f"{self.path}:{number}"
        if not isinstance(value, Mapping):
            return bad_record(number, f"{where}: not a JSON object")
        record = to_record(number, value, where, self.content)
        size = record.content.seek(0, os.SEEK_END)
        record.content.seek(0)
        return self.too_large(number) if size > self.max_record_bytes else record

    def too_large(self, number: int) -> Record:
        """Return the record that stands for one beyond `max_record_bytes`."""
        problem = f"{self.path}:{number}: the record is larger than {self.max_record_bytes:,} bytes"
        return bad_record(
            number, problem, "raise --max-record-bytes, or leave such out with --skip-bad"
        )

    def check_growth(self, size: int) -> None:
        """Refuse a file that has grown to `size` bytes in a way that no text does.

        Raises:
            UserError: it has.
        """
        if size > _UNSUSPICIOUS_BYTES and size > _LARGEST_RATIO * self.size:
            raise UserError(
                f"{self.path}: {self.size:,} bytes unpack to more than {_LARGEST_RATIO} times as "
                "much, as no text does; unpack the file yourself if that is right"
            )


def to_record(number: int, record: Mapping[str, Any], where: str, content: Content) -> Record:
    """Return the document in a mapping as a `Record`, or what is wrong with it."""
    try:
        document = content.document(record)
    except UserError:  # not the record's fault
        raise
    except RecordError as error:
        return bad_record(number, f"{where}: {error}", error.advice if number == 1 else "")
    except (ValueError, RecursionError) as error:
        return bad_record(number, f"{where}: {error}")
    # A lone surrogate, which JSON can spell and UTF-8 cannot, becomes "?".
    return Record(number, io.BytesIO(document.encode("utf-8", errors="replace")))


def bad_record(number: int, problem: str, advice: str = "") -> Record:
    """Return a `Record` without text."""
    return Record(number, io.BytesIO(), problem, advice)
