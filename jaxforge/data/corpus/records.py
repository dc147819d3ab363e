"""Base classes of the inputs of `prepare`, and their records."""

import io
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, BinaryIO, ClassVar, NamedTuple, Self

from jaxforge.data.corpus.content import (
    DEFAULT_FIELD,
    DROPPED,
    Content,
    MappingContent,
    Outcomes,
    RecordError,
    TableRow,
)
from jaxforge.data.corpus.file_state import FileState, check_unchanged
from jaxforge.data.corpus.remote_input import Location
from jaxforge.data.corpus.unicode_text import is_utf8, without_surrogates
from jaxforge.errors import UserError

MAX_RECORD_BYTES = 16 << 20
"""Default of `--max-record-bytes`. A parsed record takes up to ten times as much memory."""

READ_ERRORS = (OSError, EOFError, zlib.error)
"""Errors of reading an input (no access, damaged data), in addition to UserError."""

UNSUSPICIOUS_BYTES = 32 << 20  # unpacked size that is never checked
_LARGEST_RATIO = 250  # of compression; repetitive logs reach 100


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

    @property
    def is_dropped(self) -> bool:
        """True if a map dropped the record."""
        return self.outcomes[-1:] == (DROPPED,)


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

    def opened(self) -> Self:
        """Return the input as it is about to be read, to be compared by `check_unchanged`.

        Raises:
            InputChangedError: it changed since it was planned.
            OSError, UserError: its state cannot be read.
        """
        return self

    def check_unchanged(self) -> None:
        """Check that the input has not changed since it was `opened`; raise as `opened`."""
        return

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
        state: state of the file when it was listed or opened; None is not checked.
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
    state: FileState | None = None

    def opened(self) -> Self:
        """Return the file with its present state."""
        if self.state is None:
            return self
        return replace(self, state=check_unchanged(self.path, self.state, opening=True))

    def check_unchanged(self) -> None:
        """Check that the file is that which was opened."""
        if self.state:
            check_unchanged(self.path, self.state)

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
            record = TableRow(mapped) if isinstance(record, TableRow) else mapped
        document = content.document(record)
    except UserError:  # a problem of the options, not of the record
        raise
    except RecordError as error:
        return bad_record(number, f"{where}: {error}", error.advice if number == 1 else "")
    except (ValueError, RecursionError) as error:
        return bad_record(number, f"{where}: {error}")
    text = without_surrogates(document)
    return Record(
        number,
        io.BytesIO(text.encode()),
        outcomes=outcomes,
        source=without_surrogates(content.source(record)),
        is_utf8=text is document,
    )


def bad_record(number: int, problem: str, advice: str = "") -> Record:
    """Return a `Record` without text."""
    return Record(number, io.BytesIO(), problem, advice)
