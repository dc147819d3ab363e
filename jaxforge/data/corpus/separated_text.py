"""Text files that hold many documents with a separator between them."""

import io
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from jaxforge.data.corpus.records import File, Record
from jaxforge.data.corpus.remote_input import open_input
from jaxforge.data.corpus.text_files import utf8

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_CHUNK = 1 << 20  # searched at a time; longer documents are read from the file in parts
_ESCAPE = re.compile(r"\\(.)")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "\\": "\\"}


def parse_separator(text: str) -> bytes:
    r"""Return the separator that a command line names, with \n, \r, \t, \f and \\ replaced.

    Raises:
        ValueError: it is empty, or has another escape.
    """
    if not text:
        raise ValueError("must not be empty")

    def character(match: re.Match[str]) -> str:
        if match[1] not in _ESCAPES:
            raise ValueError(f"{match[0]} is none of \\n, \\r, \\t, \\f and \\\\")
        return _ESCAPES[match[1]]

    return _ESCAPE.sub(character, text).encode("utf-8", errors="surrogateescape")


@dataclass(frozen=True)
class SeparatedText(File):
    """Text file of documents.

    If a separator is alone on its line, the line end belongs to it. Documents of blanks only are
    dropped.

    Attributes:
        separator: the separator.
    """

    separator: bytes = b""

    @property
    def is_text(self) -> bool:
        """True."""
        return True

    def records(self, start: int) -> Iterator[Record]:
        """Yield the documents after the first `start`."""
        with open_input(self.path) as scanned, open_input(self.path) as read:
            text = utf8(read)
            for number, (first, end) in enumerate(self._spans(utf8(scanned), text), 1):
                if number <= start:
                    continue
                document = _span(text, first, end)
                if isinstance(document, io.BytesIO) and document.getvalue().isspace():
                    continue
                yield self.text_record(number, document)

    def _spans(self, scanned: BinaryIO, text: BinaryIO) -> Iterator[tuple[int, int]]:
        """Yield the first byte of each document and the byte after its end."""
        start = 0
        for offset in _occurrences(scanned, self.separator):
            if offset >= start:  # a separator may begin with the line end of another
                yield start, offset
                start = self._after(text, offset)
        yield start, text.seek(0, os.SEEK_END)

    def _after(self, text: BinaryIO, offset: int) -> int:
        """Return the offset after a separator, and after its line if it is alone there."""
        end = offset + len(self.separator)
        text.seek(max(0, offset - 1))
        if self.separator.endswith(b"\n") or (offset and text.read(1) != b"\n"):
            return end
        text.seek(end)
        follows = text.read(2)
        return end + (2 if follows == b"\r\n" else follows.startswith(b"\n"))


def _occurrences(file: BinaryIO, separator: bytes) -> Iterator[int]:
    """Yield the offsets of a separator, from the left and without overlaps."""
    offset, buffer = 0, b""
    while chunk := file.read(_CHUNK):
        buffer += chunk
        position = 0
        while (start := buffer.find(separator, position)) >= 0:
            yield offset + start
            position = start + len(separator)
        position = max(position, len(buffer) - len(separator) + 1)
        offset, buffer = offset + position, buffer[position:]


def _span(text: BinaryIO, start: int, end: int) -> BinaryIO:
    """Return the bytes of a document as a file, which reads long ones when they are needed."""
    if end - start > _CHUNK:
        return io.BufferedReader(_Window(text, start, end), _CHUNK)
    text.seek(start)
    return io.BytesIO(text.read(end - start))


class _Window(io.RawIOBase):
    """Part of a file as a file.

    Args:
        file: the file.
        start: its first byte.
        end: the byte after its last.
    """

    def __init__(self, file: BinaryIO, start: int, end: int) -> None:
        self._file, self._start, self._size, self._offset = file, start, end - start, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Change the position."""
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._offset, os.SEEK_END: self._size}[whence]
        self._offset = origin + offset
        return self._offset

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        """Read bytes into a buffer; return their number."""
        target = memoryview(buffer)
        self._file.seek(self._start + self._offset)
        data = self._file.read(max(0, min(len(target), self._size - self._offset)))
        target[: len(data)] = data
        self._offset += len(data)
        return len(data)
