"""Documents as pieces of text.

A piece is a document, or some whole lines of a long one, so that no more than a piece of a text
file is in memory; a line that is longer than a piece is cut before a space. Where a tokenizer looks
across line ends, a token at the seam of two pieces may differ from what it makes of the document in
one go; once per MiB at most.
"""

import hashlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import BinaryIO, NamedTuple, TypeVar

from jaxforge.data.corpus.records import READ_ERRORS, Input, Record
from jaxforge.errors import UserError

_PIECE_BYTES = 1 << 20
_LINE_BYTES = 1 << 20  # beyond a piece, that its last line may have
_Input = TypeVar("_Input", bound=Input)


class ReadPosition(NamedTuple):
    """Reading position in a list of documents.

    Attributes:
        input: index of the input.
        record: records of it that are done.
        offset: bytes of the next record's text that are done.
    """

    input: int = 0
    record: int = 0
    offset: int = 0


@dataclass(frozen=True)
class TextPart:
    """Some whole lines of a document.

    Attributes:
        document: its name.
        split: "train" or "validation".
        text: the lines.
        size: bytes that they were.
        valid: they were UTF-8.
        first: the document begins here.
        last: the document ends here.
        end: where to go on reading.
        skipped: nothing but a bad record that was left out.
    """

    document: str
    split: str
    text: str
    size: int
    valid: bool
    first: bool
    last: bool
    end: ReadPosition
    skipped: bool = False


def split_of(document: str, validation_fraction: float) -> str:
    """ "train" or "validation", by the document's name only."""
    return "validation" if _hash(document) < validation_fraction else "train"


def is_split_inside(inputs: Sequence[Input]) -> bool:
    """Return whether the validation split is cut from the text of a single file."""
    return len(inputs) == 1 and inputs[0].text_size is not None


def _hash(text: str) -> float:
    """A number in [0, 1) that looks random and is the same everywhere."""
    return int.from_bytes(hashlib.sha256(os.fsencode(text)).digest()[:6], "big") / 2**48


def shuffled(inputs: Iterable[_Input], seed: int) -> list[_Input]:
    """`inputs` in an order that depends on their names and `seed` only."""
    return sorted(inputs, key=lambda source: _hash(f"{seed} {source.name}"))


def first_bytes(inputs: Sequence[_Input], max_bytes: int | None) -> list[_Input]:
    """The inputs at the front that reach `max_bytes` of text together, or all.

    An input whose text must be read to be measured counts nothing here.
    """
    before = accumulate((source.text_size or 0 for source in inputs), initial=0)
    limit = max_bytes or sys.maxsize
    return [source for source, start in zip(inputs, before, strict=False) if start < limit]


def text_parts(
    inputs: Sequence[Input],
    *,
    validation_fraction: float = 0.0,
    max_bytes: int | None = None,
    skip_bad: bool = False,
    start: ReadPosition | None = None,
    before: int = 0,
) -> Iterator[TextPart]:
    """Read documents in pieces of about a MiB; bytes that are not UTF-8 become U+FFFD.

    Args:
        inputs: in order.
        validation_fraction: part of the documents that are "validation"; which, depends on their
            names only. Of a single text file it is the last part, from a line on.
        max_bytes: stop with the line that reaches this many bytes.
        skip_bad: leave records out that hold no text; otherwise they are errors.
        start: where to begin.
        before: bytes of text before `start`.

    Raises:
        UserError: an input cannot be read, or holds a bad record.
    """
    left = (max_bytes or sys.maxsize) - before
    inside = is_split_inside(inputs) and validation_fraction > 0
    position = start or ReadPosition()
    for i, source in enumerate(inputs[position.input :], position.input):
        offset = position.offset if i == position.input else 0
        try:
            for record in source.records(position.record if i == position.input else 0):
                if left <= 0:
                    return
                if record.problem:
                    yield _skipped(i, source, record, skip_bad)
                    continue
                if inside:
                    size = min(_size(record.content), max_bytes or sys.maxsize)
                    end = _line_before(record.content, int(size * (1 - validation_fraction)))
                    parts = [Part("train", 0, end), Part("validation", end, None)]
                else:
                    name = source.document(record.number)
                    parts = [Part(split_of(name, validation_fraction), 0, None)]
                for chunk in _of_record(i, source, record, offset, left, parts):
                    left -= chunk.size
                    yield chunk
                offset = 0
        except READ_ERRORS as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"cannot read {source.where}: {reason}") from error


def _skipped(i: int, source: Input, record: Record, skip_bad: bool) -> TextPart:
    if not skip_bad:
        usual = "correct it, or have jaxforge.prepare leave such out: --skip-bad"
        raise UserError(f"{record.problem}; {record.advice or usual}")
    end = ReadPosition(i, record.number)
    return TextPart(
        source.document(record.number), "train", "", 0, True, False, False, end, skipped=True
    )


class Part(NamedTuple):
    """Bytes of a record's text.

    Attributes:
        split: "train" or "validation".
        start: of its first byte.
        end: after its last; None: that of the text.
    """

    split: str
    start: int
    end: int | None


def _of_record(
    i: int, source: Input, record: Record, offset: int, limit: int, parts: Sequence[Part]
) -> Iterator[TextPart]:
    document = source.document(record.number)
    for part in parts:
        if part.end is not None and part.end <= offset:
            continue
        record.content.seek(offset)
        for data, last in _lines(record.content, limit, part.end):
            is_first = offset == part.start
            offset += len(data)
            limit -= len(data)
            is_done = last and part is parts[-1]
            end = (
                ReadPosition(i, record.number)
                if is_done
                else ReadPosition(i, record.number - 1, offset)
            )
            # No byte of a multi-byte character equals a line end: lines decode on their own.
            try:
                text, valid = data.decode(), True
            except UnicodeDecodeError:
                text, valid = data.decode(errors="replace"), False
            if offset == len(data):
                text = text.removeprefix("\ufeff")  # a byte-order mark
            yield TextPart(document, part.split, text, len(data), valid, is_first, last, end)


def _size(file: BinaryIO) -> int:
    return file.seek(0, os.SEEK_END)


def _line_before(file: BinaryIO, offset: int) -> int:
    """The nearest begin of a line up to a place; of a character, where no line is near."""
    start = max(0, offset - _PIECE_BYTES)
    file.seek(start)
    data = file.read(offset - start + 1)
    line = data.rfind(b"\n", 0, offset - start) + 1
    if line:
        return start + line
    while len(data) > offset - start > 0 and data[offset - start] & 0xC0 == 0x80:
        offset -= 1
    return offset


def _lines(file: BinaryIO, limit: int, end: int | None) -> Iterator[tuple[bytes, bool]]:
    """Whole lines up to `end`, about a MiB at a time, and whether they are the last."""
    data = _read(file, limit, end)
    while data:
        limit -= len(data)
        tail = _read(file, limit, end) if limit > 0 else b""
        yield data, not tail
        data = tail


def _read(file: BinaryIO, limit: int, end: int | None) -> bytes:
    """Read about a MiB up to the end of a line, or `limit` bytes and the rest of their line."""
    data = file.read(min(limit, _PIECE_BYTES))
    if data and not data.endswith(b"\n"):
        tail = file.readline(_LINE_BYTES)
        data += tail
        if len(tail) == _LINE_BYTES and not tail.endswith(b"\n"):
            whole = _cut(data)
            file.seek(whole - len(data), os.SEEK_CUR)
            data = data[:whole]
    if end is not None and (beyond := file.tell() - end) > 0:
        file.seek(end)
        return data[:-beyond]
    return data


def _cut(data: bytes) -> int:
    """Return where to cut a long line: before its last space, else between characters."""
    if (space := data.rfind(b" ", 1)) > 0:
        return space
    end = len(data)
    while end > len(data) - 4 and data[end - 1] & 0xC0 == 0x80:
        end -= 1
    return end - 1 if data[end - 1] >= 0xC0 else end
