"""Documents, split into parts of bounded size.

A part is a document, or some whole lines of a long document, so memory is bounded. A line longer
than a part is split before a space. If a tokenizer looks across line ends, a token at a split may
differ from the tokens of the whole document, at most once per MiB.
"""

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import BinaryIO, NamedTuple, TypeVar

from jaxforge.data.corpus.files import EXCLUDE
from jaxforge.data.corpus.records import READ_ERRORS, Input, Outcomes, Record
from jaxforge.errors import StorageError, UserError, unreadable

PART_BYTES = 1 << 20
LINE_BYTES = 1 << 20  # by which the last line may exceed a part
_Input = TypeVar("_Input", bound=Input)


class ReadPosition(NamedTuple):
    """Reading position in an input.

    Attributes:
        record: number of completed records.
        offset: completed bytes in the text of the next record.
    """

    record: int = 0
    offset: int = 0


@dataclass(frozen=True)
class TextPart:
    """Whole lines of a document.

    Attributes:
        document: name of the document.
        split: "train" or "validation".
        text: the lines.
        size: bytes of the lines in the input.
        valid: True if the bytes were UTF-8.
        first: True if the document begins here.
        last: True if the document ends here.
        end: position of the next part.
        skipped: True for a bad record and for one that maps dropped or left empty: it has no text.
        source: name of the source in statistics.
        outcomes: outcomes of maps for a record that ends here.
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
    source: str = ""
    outcomes: Outcomes = ()

    @property
    def is_bad(self) -> bool:
        """True for a skipped bad record."""
        return self.skipped and not self.outcomes


def split_of(document: str, validation_fraction: float) -> str:
    """Return "train" or "validation" by the name of the document only."""
    return "validation" if hash_fraction(document) < validation_fraction else "train"


def is_split_inside(inputs: Sequence[Input]) -> bool:
    """Return whether the validation split is cut from the text of a single file."""
    return len(inputs) == 1 and inputs[0].text_size is not None


def hash_fraction(text: str) -> float:
    """Return a pseudorandom number in [0, 1), the same on every machine."""
    # 48 bits are exact in a float. `fsencode`, because names of files need not be UTF-8.
    return int.from_bytes(hashlib.sha256(os.fsencode(text)).digest()[:6], "big") / 2**48


def first_bytes(inputs: Sequence[_Input], max_bytes: int | None) -> list[_Input]:
    """Return the first inputs that reach `max_bytes` of text together, or all.

    Inputs of unknown size count as empty.
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
    offset: int = 0,
    is_whole: bool = True,
) -> Iterator[TextPart]:
    """Yield documents in parts of about a MiB; bytes that are not UTF-8 become U+FFFD.

    Args:
        inputs: the inputs, in order.
        validation_fraction: fraction of the documents in "validation", selected by name. For a
            single text file, it is the end of the file, from a line start on.
        max_bytes: stop after the line that reaches this many bytes.
        skip_bad: skip records without text; otherwise they are errors.
        offset: bytes of the first document to skip.
        is_whole: the inputs are all inputs of the corpus.

    Raises:
        InputChangedError: an input changed since it was planned.
        UserError: an input cannot be read, or holds a bad record.
    """
    left = max_bytes or sys.maxsize
    inside = is_whole and is_split_inside(inputs) and validation_fraction > 0
    for listed in inputs:
        with _reading(listed) as source:
            for record in source.records():
                if left <= 0:
                    break
                if record.problem:
                    yield _skipped(source, record, skip_bad)
                    continue
                # Maps left no text, but their outcomes count in the split of the record.
                if record.outcomes and not _size(record.content):
                    yield _without_text(source, record, validation_fraction)
                    continue
                # A single text is cut at a line start: its head is trained on, its tail held out.
                if inside:
                    size = min(_size(record.content), max_bytes or sys.maxsize)
                    end = _line_before(record.content, int(size * (1 - validation_fraction)))
                    parts = [TextRange("train", 0, end), TextRange("validation", end, None)]
                else:
                    name = source.document(record.number)
                    parts = [TextRange(split_of(name, validation_fraction), 0, None)]
                for chunk in _of_record(source, record, offset, left, parts):
                    left -= chunk.size
                    yield chunk
                # Only the first document is resumed in its middle.
                offset = 0
        if left <= 0:
            return


@contextmanager
def _reading(source: Input) -> Iterator[Input]:
    """Check that an input is in the state of the plan, before and after it is read.

    Raises:
        InputChangedError: it is not.
        StorageError: it cannot be read, after many attempts.
        UserError: it cannot be read.
    """
    try:
        source.check_unchanged(opening=True)
        try:
            yield source
        except Exception:
            source.check_unchanged()  # a change explains any error
            raise
        source.check_unchanged()
    # An OSError, too, but the bucket has failed and not the input.
    except StorageError:
        raise
    except OSError as error:
        raise unreadable(source.where, error, EXCLUDE) from error
    except READ_ERRORS as error:
        raise UserError(f"cannot read {source.where}: {error}") from error


def _skipped(source: Input, record: Record, skip_bad: bool) -> TextPart:
    if not skip_bad:
        usual = "correct it, or have jaxforge.prepare leave such out: --skip-bad"
        raise UserError(f"{record.problem}; {record.advice or usual}")
    end = ReadPosition(record.number)
    return TextPart(
        source.document(record.number), "train", "", 0, True, False, False, end, skipped=True
    )


def _without_text(source: Input, record: Record, validation_fraction: float) -> TextPart:
    """Return the part of a record that maps dropped or left empty, with their outcomes."""
    name, end = source.document(record.number), ReadPosition(record.number)
    split = split_of(name, validation_fraction)
    return TextPart(
        name, split, "", 0, True, False, False, end, skipped=True, outcomes=record.outcomes
    )


class TextRange(NamedTuple):
    """Range of bytes in the text of a record.

    Attributes:
        split: "train" or "validation".
        start: offset of the first byte.
        end: offset after the last byte; None: the end of the text.
    """

    split: str
    start: int
    end: int | None


def _of_record(
    source: Input, record: Record, offset: int, limit: int, parts: Sequence[TextRange]
) -> Iterator[TextPart]:
    document, origin = source.document(record.number), record.source or source.source
    for part in parts:
        # Reading begins behind this range.
        if part.end is not None and part.end <= offset:
            continue
        record.content.seek(offset)
        for data, last in _lines(record.content, limit, part.end):
            # A text that is cut into two splits is a document in each of them.
            is_first = offset == part.start
            offset += len(data)
            limit -= len(data)
            # Before the last range ends, reading resumes within this record.
            is_done = last and part is parts[-1]
            end = (
                ReadPosition(record.number) if is_done else ReadPosition(record.number - 1, offset)
            )
            # No byte of a multi-byte character equals a line end: lines decode on their own.
            try:
                text, valid = data.decode(), True
            except UnicodeDecodeError:
                text, valid = data.decode(errors="replace"), False
            # Only at the start of the text: elsewhere U+FEFF is a character of it.
            if offset == len(data):
                text = text.removeprefix("\ufeff")  # a byte-order mark
            yield TextPart(
                document, part.split, text, len(data), valid and record.is_utf8, is_first, last,
                end, source=origin, outcomes=record.outcomes if is_done else (),
            )  # fmt: skip


def _size(file: BinaryIO) -> int:
    return file.seek(0, os.SEEK_END)


def _line_before(file: BinaryIO, offset: int) -> int:
    """Return the last line start up to an offset, or the start of a character if none is near."""
    start = max(0, offset - PART_BYTES)
    file.seek(start)
    data = file.read(offset - start + 1)
    line = data.rfind(b"\n", 0, offset - start) + 1
    if line:
        return start + line
    # Bytes 10xxxxxx continue a character, and a cut must not be before one.
    while len(data) > offset - start > 0 and data[offset - start] & 0xC0 == 0x80:
        offset -= 1
    return offset


def _lines(file: BinaryIO, limit: int, end: int | None) -> Iterator[tuple[bytes, bool]]:
    """Yield whole lines up to `end`, about a MiB at a time, with True for the last ones."""
    # One part ahead of the caller, because only an empty read shows which part was the last.
    data = _read(file, limit, end)
    while data:
        limit -= len(data)
        tail = _read(file, limit, end) if limit > 0 else b""
        yield data, not tail
        data = tail


def _read(file: BinaryIO, limit: int, end: int | None) -> bytes:
    """Read about a MiB up to the end of a line, or `limit` bytes and the end of their line."""
    data = file.read(min(limit, PART_BYTES))
    if data and not data.endswith(b"\n"):
        # Up to the end of the line, or back to a cut within it if the line is too long.
        tail = file.readline(LINE_BYTES)
        data += tail
        if len(tail) == LINE_BYTES and not tail.endswith(b"\n"):
            whole = _cut(data)
            file.seek(whole - len(data), os.SEEK_CUR)
            data = data[:whole]
    # The range may end within this line; the next range begins there.
    if end is not None and (beyond := file.tell() - end) > 0:
        file.seek(end)
        return data[:-beyond]
    return data


def _cut(data: bytes) -> int:
    """Return the offset to split a long line at: before the last space, or between characters."""
    if (space := data.rfind(b" ", 1)) > 0:
        return space
    # In UTF-8, bytes 0x80 to 0xBF continue a character, and 0xC0 and above begin one.
    end = len(data)
    while end > len(data) - 4 and data[end - 1] & 0xC0 == 0x80:
        end -= 1
    return end - 1 if data[end - 1] >= 0xC0 else end
