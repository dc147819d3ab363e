"""Files as inputs of `prepare`: their states, slices, and compression.

    plan: state of each file ─► unit opens a file: same state? ─► records ─► end: same state?

The plan, the slices and the numbers of records follow from the listed file. Content of another
file must therefore not enter the shards.
"""

import gzip
import io
import itertools
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, ClassVar, NamedTuple, Self, cast

from jaxforge.data.corpus.records import (
    DEFAULT_FIELD,
    MAX_RECORD_BYTES,
    Content,
    Input,
    Record,
    bad_record,
    is_utf8,
    library,
    to_record,
)
from jaxforge.data.corpus.remote_input import (
    LARGE,
    Location,
    RemotePath,
    changed,
    current_version,
    open_input,
)
from jaxforge.errors import UserError

EXCLUDE = "exclude it with --exclude"
"""Advice on an input that cannot be read."""

SKIPPED = 1 << 20
"""Bytes per read of data that are only counted."""

UNSUSPICIOUS_BYTES = 32 << 20  # unpacked size that is never checked
_LARGEST_RATIO = 250  # of compression; repetitive logs reach 100
_QUICKLY_UNPACKED = 1 << 20  # size below which a file is unpacked once before it is parsed


class FileState(NamedTuple):
    """State of a file.

    Attributes:
        size: bytes.
        modified: time of modification, nanoseconds since 1970, or a version that changes with
            the content.
    """

    size: int
    modified: int | str

    @classmethod
    def of(cls, path: Path) -> "FileState":
        """Return the state of a file of this machine; raise OSError if there is none."""
        status = path.stat()
        return cls(status.st_size, status.st_mtime_ns)


def check_unchanged(path: Location, before: FileState, *, opening: bool = False) -> None:
    """Check that a file has the state that was read before.

    Args:
        path: the file.
        before: its earlier state.
        opening: the file is about to be read. A small file by URL is not checked then, because a
            request takes as long as its content.

    Raises:
        InputChangedError: it has another state, or does not exist any more.
        OSError: the state of a local file cannot be read.
        UserError: that of a file by URL cannot be read.
    """
    if opening and isinstance(path, RemotePath) and path.size < LARGE:
        return
    try:
        if isinstance(path, RemotePath):
            now, number = FileState(*current_version(path)), "version"
        else:
            now, number = FileState.of(path), "time of modification"
    except FileNotFoundError as error:
        raise changed(path, "it does not exist any more") from error
    if now.size != before.size:
        raise changed(path, f"it had {before.size:,} bytes, and has {now.size:,}")
    if now.modified != before.modified:
        raise changed(path, f"its {number} is another")


class InputSpan(NamedTuple):
    """Range of bytes of a file. A slice holds the records that begin within it.

    Attributes:
        start: first byte.
        end: byte after the last.
    """

    start: int
    end: int


@dataclass(frozen=True)
class File(Input):
    """An input that is a file; a subclass is an input format (see `corpus.formats`).

    Attributes:
        path: path of the file, or its URL.
        name: path relative to the input argument.
        size: bytes on disk.
        modified: see `FileState`.
        content: selects the document of a record.
        max_record_bytes: a larger record is a bad record.
        span: the slice to read; None reads the whole file.
        suffixes: ends of the lower-case names of files in the format.
        packable: those of `suffixes` that .gz or .zst may follow.
        documents: the format's documents, for the table in docs/data.md.
        numbered_in_slice: True if records are numbered from the start of a slice, because their
            numbers in the file are not known without reading all of it.
    """

    suffixes: ClassVar[tuple[str, ...]] = ()
    packable: ClassVar[tuple[str, ...]] = ()
    documents: ClassVar[str] = ""
    numbered_in_slice: ClassVar[bool] = False

    path: Location
    name: str
    size: int
    modified: int | str
    content: Content = DEFAULT_FIELD
    max_record_bytes: int = MAX_RECORD_BYTES
    span: InputSpan | None = None

    def check_unchanged(self, *, opening: bool = False) -> None:
        """Check that the file has the size and the version of the plan."""
        check_unchanged(self.path, FileState(self.size, self.modified), opening=opening)

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
        """True if the records of a span can be found without reading what precedes it."""
        return False

    def slices(self, nbytes: int) -> "Sequence[Self]":
        """Return equal spans of at most `nbytes`, or the whole file if it cannot be sliced.

        The spans follow from the size alone.
        """
        n = -(-self.size // nbytes)
        if n < 2 or not self.can_be_sliced:
            return [self]
        # Integer arithmetic on the size alone: every process and start gets the same borders.
        borders = [self.size * i // n for i in range(n + 1)]
        return [replace(self, span=InputSpan(*ends)) for ends in pairwise(borders)]

    @property
    def is_packed(self) -> bool:
        """True if the file is compressed."""
        return self.path.suffix.lower() in (".gz", ".zst")

    def open(self) -> BinaryIO:
        """Open the file for reading, decompressed.

        Raises:
            UserError: the file is small, and its compression ratio is implausible for text.
        """
        # A small file that unpacks to gigabytes is refused before a parser sees any of it.
        if self.is_packed and self.size < _QUICKLY_UNPACKED:
            with closing(self._open()) as file:
                for size in itertools.count(SKIPPED, SKIPPED):
                    if not file.read(SKIPPED):
                        break
                    self.check_growth(size)
        return self._open()

    def _open(self) -> BinaryIO:
        suffix = self.path.suffix.lower()
        if suffix == ".gz":
            return cast(BinaryIO, _Unzipped(open_input(self.path)))
        if suffix == ".zst":
            # Not zstandard, whose reader does not detect a truncated file.
            arrow = library("pyarrow", "reading .zst")
            source = str(self.path) if isinstance(self.path, Path) else open_input(self.path)
            raw = arrow.input_stream(source, compression="zstd")
            return cast(BinaryIO, io.BufferedReader(raw, 1 << 20))
        return open_input(self.path)

    def check_growth(self, size: int) -> None:
        """Refuse a file that unpacks to `size` bytes if the ratio is implausible for text."""
        if size > UNSUSPICIOUS_BYTES and size > _LARGEST_RATIO * self.size:
            raise UserError(
                f"{self.path}: {self.size:,} bytes unpack to more than {_LARGEST_RATIO} times as "
                "much, as no text does; unpack the file yourself if that is right"
            )

    def columns(self, names: Sequence[str]) -> Sequence[str]:
        """Return those of a table's columns that are read.

        Raises:
            UserError: a column does not exist, or several have its name.
        """
        columns = self.content.columns(names, str(self.path)) or names
        for name in columns:
            if (n := names.count(name)) > 1:
                raise UserError(
                    f'{self.path} has {n} columns "{name}": rename or remove all but one, or '
                    "exclude the file with --exclude"
                )
        return columns

    def record(self, number: int, value: object) -> Record:
        """Return a record of the file: its document or its problem."""
        where = f"{self.where}:{number}"
        if not isinstance(value, Mapping):
            return bad_record(number, f"{where}: not a JSON object")
        record = to_record(number, value, where, self.content)
        # After maps and templates, which can make the text larger than the record.
        size = record.content.seek(0, os.SEEK_END)
        record.content.seek(0)
        return self.too_large(number) if size > self.max_record_bytes else record

    def text_record(self, number: int, content: BinaryIO) -> Record:
        """Return a record of plain text; with maps, it is a record with the text field."""
        if not self.content.has_maps:
            return Record(number, content)
        # One byte more than allowed shows that the text is too large without reading all of it.
        text = content.read(self.max_record_bytes + 1)
        if len(text) > self.max_record_bytes:
            return self.too_large(number)
        document = text.decode(errors="replace").removeprefix("\ufeff")
        record = self.record(number, {self.content.text_field: document})
        # `record` has received a str, in which invalid bytes are U+FFFD already.
        return record._replace(is_utf8=is_utf8(text))

    def too_large(self, number: int) -> Record:
        """Return the bad record for a record beyond `max_record_bytes`."""
        problem = (
            f"{self.where}:{number}: the record is larger than {self.max_record_bytes:,} bytes"
        )
        return bad_record(
            number, problem, "raise --max-record-bytes, or leave such out with --skip-bad"
        )


class _Unzipped(gzip.GzipFile):
    """Decompressed content of an open file, which is closed with it."""

    def __init__(self, packed: BinaryIO) -> None:
        super().__init__(fileobj=packed)
        self._packed = packed

    def close(self) -> None:
        """Close both."""
        super().close()
        self._packed.close()
