"""JSON files: one object per line, an array, or concatenated objects."""

import codecs
import gzip
import io
import itertools
import json
import re
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import BinaryIO, cast

from jaxforge.data.corpus.optional import library
from jaxforge.data.corpus.records import File, Record, bad_record
from jaxforge.data.corpus.remote_input import open_input
from jaxforge.errors import UserError

GZIPPED = (".gz", ".tgz")
CHUNK = 1 << 16
_SKIPPED = 1 << 20  # bytes per read of data that are only counted
_QUICKLY_UNPACKED = 1 << 20  # size below which a file is unpacked once before it is parsed
BYTES_PER_VALUE = 16
"""Smallest bytes of JSON per value of a valid record: parsed values take up to 70 bytes."""
_BLANK = re.compile(r"[ \t\r\n]*")


class _Unzipped(gzip.GzipFile):
    """Decompressed content of an open file, which is closed with it."""

    def __init__(self, packed: BinaryIO) -> None:
        super().__init__(fileobj=packed)
        self._packed = packed

    def close(self) -> None:
        """Close both."""
        super().close()
        self._packed.close()


class PackedFile(File):
    """A file that may be compressed."""

    @property
    def is_packed(self) -> bool:
        """Return whether the file is compressed."""
        return self.path.suffix.lower() in (*GZIPPED, ".zst")

    def open(self) -> BinaryIO:
        """Open the file for reading, decompressed.

        Raises:
            UserError: the file is small, and its compression ratio is implausible for text.
        """
        if self.is_packed and self.size < _QUICKLY_UNPACKED:
            with closing(self._open()) as file:
                for size in itertools.count(_SKIPPED, _SKIPPED):
                    if not file.read(_SKIPPED):
                        break
                    self.check_growth(size)
        return self._open()

    def _open(self) -> BinaryIO:
        suffix = self.path.suffix.lower()
        if suffix in GZIPPED:
            return cast(BinaryIO, _Unzipped(open_input(self.path)))
        if suffix == ".zst":
            # Not zstandard, whose reader does not detect a truncated file.
            arrow = library("pyarrow", "reading .zst")
            source = str(self.path) if isinstance(self.path, Path) else open_input(self.path)
            raw = arrow.input_stream(source, compression="zstd")
            return cast(BinaryIO, io.BufferedReader(raw, 1 << 20))
        return open_input(self.path)


class JsonLines(PackedFile):
    """An object per line, plain or compressed; blank lines are numbered, but are no documents.

    A slice holds the lines that begin in its span.
    """

    numbered_in_slice = True

    @property
    def can_be_sliced(self) -> bool:
        """True unless the file is compressed."""
        return not self.is_packed

    def records(self, start: int) -> Iterator[Record]:
        """Yield the records after the first `start` lines."""
        with closing(self.open()) as file:
            for number, line in enumerate(self._lines(file), 1):
                if number <= start:
                    continue
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
        while position + size < end and (line := file.readline(limit + 1)):
            size += len(line)
            is_too_long = len(line) > limit and not line.endswith(b"\n")
            tail = line
            while is_too_long and tail and not tail.endswith(b"\n"):
                tail = file.readline(_SKIPPED)
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
                skipped = file.readline(_SKIPPED)
                position += len(skipped)
                if not skipped:
                    break
        return position, end


class Json(JsonLines):
    """An array of objects, or concatenated objects over one or more lines each."""

    @property
    def can_be_sliced(self) -> bool:
        """False: a value may span lines."""
        return False

    def records(self, start: int) -> Iterator[Record]:
        """Yield the records after the first `start`.

        Raises:
            UserError: the file is not JSON. Nothing after the error can be read.
        """
        if self._has_object_per_line():
            yield from super().records(start)
            return
        with closing(self.open()) as file:
            number = 0
            try:
                values = _Values(file, self)
                while values.has_more():
                    number += 1
                    value = values.next()
                    if number > start:
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
