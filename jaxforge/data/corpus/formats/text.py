"""Text files: one document, or many with a separator between them."""

import codecs
import io
import os
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from jaxforge.data.corpus.files import EXCLUDE, File
from jaxforge.data.corpus.records import Record
from jaxforge.data.corpus.remote_input import Location, RemotePath, open_input
from jaxforge.errors import UserError, unreadable

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_CHUNK = 1 << 20  # searched at a time; longer documents are read from the file in parts
_ESCAPE = re.compile(r"\\(.)")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "\\": "\\"}
_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",  # a prefix of the mark of UTF-32 little-endian
    codecs.BOM_UTF16_BE: "UTF-16",
}
_JSON = re.compile(rb'\s*(\[\s*)?\{\s*"(\\.|[^"\\\n])*"\s*:')  # the first key of an object
HEAD = 8000
"""Bytes in which a NUL marks a binary file, as in git."""


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


class TextFile(File):
    """Text file that is one document."""

    suffixes = (".txt", ".md", ".py")
    documents = "the whole file, or each text between `--separator`s"
    is_text = True

    @property
    def text_size(self) -> int | None:
        """Bytes of the file; None with maps, which may change them."""
        return None if self.content.has_maps else self.size

    def document(self, number: int) -> str:
        """Return the name of the file."""
        return self.name

    def records(self) -> Iterator[Record]:
        """Yield the whole file; UTF-16 and UTF-32 with a BOM become UTF-8."""
        with open_input(self.path) as content:
            if isinstance(self.path, RemotePath):  # local files were checked before
                check_heads([(self.path, True, content.read(HEAD))])
                content.seek(0)
            yield self.text_record(1, utf8(content))


@dataclass(frozen=True)
class SeparatedText(File):
    """Text file of documents.

    If a separator is alone on its line, the line end belongs to it. Documents of blanks only are
    dropped.

    Attributes:
        separator: the separator.
    """

    is_text = True

    separator: bytes = b""

    def records(self) -> Iterator[Record]:
        """Yield the documents."""
        # Two handles: the search for separators is ahead of the reader of the documents.
        with open_input(self.path) as scanned, open_input(self.path) as read:
            text = utf8(read)
            for number, (first, end) in enumerate(self._spans(utf8(scanned), text), 1):
                document = _span(text, first, end)
                # Dropped after numbering: names, and so splits, follow from the place in the file.
                # Long documents are not read only to find out whether they are blank.
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
        # Alone on its line: a line end or the start of the file precedes the separator.
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
        # What remains is shorter than a separator, and may be the start of one.
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


def encoding_of(head: bytes) -> str:
    """Return the encoding that a byte-order mark announces if it is not UTF-8, else ""."""
    return next((name for mark, name in _MARKS.items() if head.startswith(mark)), "")


def utf8(file: BinaryIO) -> BinaryIO:
    """Return the file, or its text in UTF-8 if a byte-order mark announces another encoding."""
    encoding = encoding_of(file.read(4))
    file.seek(0)
    if not encoding:
        return file
    return io.BytesIO(file.read().decode(encoding, errors="replace").encode())


def check_text(files: Iterable[tuple[Path, bool]]) -> None:
    """Check that files hold text before they are read.

    Args:
        files: paths, each with True for a plain text file and False for a file of records.

    Raises:
        UserError: a text has NUL bytes or is JSON, or records are not in UTF-8.
    """
    check_heads((path, is_text, _head(path)) for path, is_text in files)


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(HEAD)
    except OSError as error:
        raise unreadable(path, error, EXCLUDE) from error


def check_heads(files: Iterable[tuple[Location, bool, bytes]]) -> None:
    """Check files as `check_text` does, by their first `HEAD` bytes.

    Raises:
        UserError: as `check_text`.
    """
    binary = []
    for path, is_text, head in files:
        if is_text and b"\0" in head and not encoding_of(head):
            binary.append(path)
        elif is_text and _JSON.match(head.removeprefix(codecs.BOM_UTF8)):
            raise UserError(
                f"{path} holds JSON, whose syntax would be learned: name it .jsonl (an object a "
                "line) or .json to have its records read, or exclude it with --exclude"
            )
        elif not is_text and (encoding := encoding_of(head)):
            raise UserError(
                f"{path} is in {encoding}, and records are read as UTF-8: make it so with "
                f"iconv -f {encoding} -t UTF-8"
            )
    if binary:
        named = ", ".join(map(str, binary[:3])) + (", ..." if len(binary) > 3 else "")
        kinds = dict.fromkeys(f"*{path.suffix}" if path.suffix else path.name for path in binary)
        options = " ".join(f"--exclude {shlex.quote(kind)}" for kind in kinds)
        raise UserError(
            f"{len(binary)} file(s) hold NUL bytes, and so no text: {named}; leave them out with "
            f"{options}, or take others alone with --glob (of UTF-16 without a byte-order mark, "
            "make UTF-8: iconv -f UTF-16LE -t UTF-8)"
        )
