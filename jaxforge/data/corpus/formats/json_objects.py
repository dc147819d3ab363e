"""JSON files: one object per line, an array, or concatenated objects.

The standard library parses values. Readers of pyarrow and datasets infer one type for a key in all
records, name no lines, and fail on a whole block where a single record is bad.
"""

import codecs
import json
import re
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import BinaryIO, ClassVar

from jaxforge.data.corpus.files import SKIPPED, File
from jaxforge.data.corpus.records import Record, bad_record
from jaxforge.errors import UserError

CHUNK = 1 << 16
BYTES_PER_VALUE = 16
"""Smallest bytes of JSON per value of a valid record: parsed values take up to 70 bytes."""
_BLANK = re.compile(r"[ \t\r\n]*")


class JsonLines(File):
    """An object per line, plain or compressed; blank lines are numbered, but are not documents.

    A slice holds the lines that begin in its span.
    """

    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".ndjson")
    packable: ClassVar[tuple[str, ...]] = suffixes
    documents = 'each line, an object with a `"text"`'
    numbered_in_slice = True

    @property
    def can_be_sliced(self) -> bool:
        """True unless the file is compressed."""
        return not self.is_packed

    def records(self) -> Iterator[Record]:
        """Yield the records."""
        with closing(self.open()) as file:
            for number, line in enumerate(self._lines(file), 1):
                # Commas bound the number of values: counted before the parser allocates them.
                largest = self.max_record_bytes // BYTES_PER_VALUE
                if line is None or line.count(b",") > largest:
                    yield self.too_large(number)
                elif line.strip():
                    try:
                        value = json.loads(line)
                    except (ValueError, RecursionError) as error:
                        yield bad_record(number, f"{self.where}:{number}: not JSON ({error})")
                        continue
                    yield self.record(number, value)

    def _lines(self, file: BinaryIO) -> Iterator[bytes | None]:
        """Yield lines; None for a line that is too long."""
        limit, size = self.max_record_bytes, 0
        position, end = self._first_line(file)
        # A line belongs to the slice in which it begins, even if it ends beyond.
        while position + size < end and (line := file.readline(limit + 1)):
            size += len(line)
            is_too_long = len(line) > limit and not line.endswith(b"\n")
            tail = line
            # The tail is read, but not held, so that the next line is a record again.
            while is_too_long and tail and not tail.endswith(b"\n"):
                tail = file.readline(SKIPPED)
                size += len(tail)
                self.check_growth(size)
            self.check_growth(size)
            yield None if is_too_long else line

    def _first_line(self, file: BinaryIO) -> tuple[int, int]:
        """Move to the first line of the span; return its position and the end of the span."""
        if not self.span:
            return 0, sys.maxsize
        position, end = self.span
        if position:
            position -= 1  # a line that begins at the start follows a line end there
            file.seek(position)
            skipped = b""
            while not skipped.endswith(b"\n") and position < end:
                skipped = file.readline(SKIPPED)
                position += len(skipped)
                if not skipped:
                    break
        return position, end


class Json(JsonLines):
    """An array of objects, or concatenated objects over one or more lines each."""

    suffixes = (".json",)
    packable = suffixes
    documents = 'each object with a `"text"`, in an array or in sequence'

    @property
    def can_be_sliced(self) -> bool:
        """False: a value may span lines."""
        return False

    def records(self) -> Iterator[Record]:
        """Yield the records.

        Raises:
            UserError: the file is not JSON. Nothing after the error can be read.
        """
        # JSON lines named .json are common; by line, an error costs one record and not the tail.
        if self._has_object_per_line():
            yield from super().records()
            return
        with closing(self.open()) as file:
            number = 0
            try:
                values = _Values(file, self)
                while values.has_more():
                    number += 1
                    value = values.next()
                    yield self.record(number, value)
            except (ValueError, RecursionError) as error:
                raise UserError(
                    f"{self.path}: not JSON in record {number or 1} ({error}), so that nothing "
                    "after it can be read; correct it, or exclude the file with --exclude"
                ) from error

    def _has_object_per_line(self) -> bool:
        with closing(self.open()) as file:
            line = file.readline(self.max_record_bytes + 1)
        try:
            return isinstance(json.loads(line.removeprefix(codecs.BOM_UTF8)), dict)
        except (ValueError, RecursionError):
            return False


class _Values:
    """Parser of the values of an array, or of concatenated values.

    At most one value and one chunk are in memory.

    Args:
        file: UTF-8 text.
        source: has the limits of a value and of the whole file.
    """

    def __init__(self, file: BinaryIO, source: File) -> None:
        self._file, self._source = file, source
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._raw_decode = json.JSONDecoder().raw_decode
        self._text, self._at, self._size, self._is_whole = "", 0, 0, False
        self._in_array = self._next_character() == "["
        self._at += self._in_array
        self._is_first = True

    def has_more(self) -> bool:
        """Advance to the next value; return False at the end.

        Raises:
            ValueError: a syntax error.
        """
        character = self._next_character()
        if not self._in_array:
            return bool(character)
        if character == "]":
            self._at += 1
            if self._next_character():
                raise ValueError("text after the array's end")
            return False
        if not self._is_first:
            if character != ",":
                raise ValueError('the array ends without "]"' if not character else "no comma")
            self._at += 1
            self._next_character()
        self._is_first = False
        return True

    def next(self) -> object:
        """Return the next value.

        Raises:
            ValueError: it is not JSON, or too large.
        """
        limit = self._source.max_record_bytes
        while True:
            left = len(self._text) - self._at
            if left > limit or (
                left > 2 * CHUNK and self._text.count(",", self._at) > limit // BYTES_PER_VALUE
            ):
                raise ValueError(f"larger than {limit:,} characters: see --max-record-bytes")
            try:
                value, end = self._raw_decode(self._text, self._at)
            # The value may only be incomplete: then more text is read.
            except json.JSONDecodeError:
                if self._is_whole:
                    raise
            else:
                if end < len(self._text) or self._is_whole:  # else a number may go on
                    self._at = end
                    return value
            self._read_more()

    def _next_character(self) -> str:
        """Skip blanks; return the character after them, or ""."""
        while True:
            if blank := _BLANK.match(self._text, self._at):
                self._at = blank.end()
            if self._at < len(self._text) or self._is_whole:
                return self._text[self._at : self._at + 1]
            self._read_more()

    def _read_more(self) -> None:
        """Double the buffer, so that parsing a large value again at most doubles the cost."""
        data = self._file.read(max(CHUNK, len(self._text) - self._at))
        self._size += len(data)
        self._source.check_growth(self._size)
        self._text = self._text[self._at :] + self._decode(data, final=not data)
        self._at, self._is_whole = 0, not data
