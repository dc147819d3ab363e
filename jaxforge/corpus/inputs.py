"""What `prepare` reads: text files, files of records, Hugging Face datasets.

input     a file, or a Hugging Face dataset
document  a text file, or one record of any other input
record    of an input, counted from 1: the line of a JSONL file, the row of a table
"""

import gzip
import io
import json
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, NoReturn, Protocol, cast

from jaxforge.corpus.optional import library
from jaxforge.corpus.text_files import check_text, encoding_of
from jaxforge.errors import UserError
from jaxforge.near import path_hint

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from pyarrow.parquet import ParquetFile

_ROWS = 1024  # of a table that are Python strings at a time
_JSON_LINES = tuple(f".json{kind}{end}" for kind in ("l", "") for end in (".gz", ".zst"))
READ_ERRORS = (OSError, EOFError, zlib.error)
"""What reading an input may raise, beside UserError: no access, or damaged data."""

_UNREADABLE = (".gz", ".zst", ".bz2", ".xz", ".zip", ".tar", ".tgz")


class Record(NamedTuple):
    """One document as it is read.

    Attributes:
        number: of the record in its input, from 1.
        content: UTF-8 text, to be read once.
        problem: why there is no text, or "".
    """

    number: int
    content: BinaryIO
    problem: str = ""


class Content(Protocol):
    """What of a record is the document."""

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
            raise UserError(f'{where} has no column "{self.field}"; it has {", ".join(there)}')
        return [self.field]

    def document(self, record: Mapping[str, Any]) -> str:
        """The text.

        Raises:
            ValueError: there is none.
        """
        text = record.get(self.field)
        if isinstance(text, str):
            return text
        there = ", ".join(map(str, record)) or "nothing"
        has = f"{text!r:.40}" if self.field in record else f"it has: {there}"
        raise ValueError(f'no text in "{self.field}" ({has})')


class Input(Protocol):
    """A file or a dataset."""

    @property
    def name(self) -> str:
        """Its path below what it was found in; decides its place and, in part, its splits."""
        ...

    @property
    def identity(self) -> tuple[str, ...]:
        """Changes whenever the documents may have changed."""
        ...

    @property
    def where(self) -> str:
        """What messages call it."""
        ...

    @property
    def text_size(self) -> int | None:
        """Bytes of text, where they are known without reading."""
        ...

    def records(self, start: int) -> Iterator[Record]:
        """The records after the first `start`; raises what `READ_ERRORS` lists, or UserError."""
        ...

    def document(self, number: int) -> str:
        """Name of the document that is record `number`."""
        ...


@dataclass(frozen=True)
class File(ABC):
    """An input that is a file.

    Attributes:
        path: where it is.
        name: its path below the input that it was found in.
        size: bytes on disk.
        modified: nanoseconds since 1970.
        content: of its records.
    """

    path: Path
    name: str
    size: int
    modified: int
    content: Content = TextField()

    @property
    def identity(self) -> tuple[str, ...]:
        """Path, size and time of change."""
        return self.where, str(self.path.absolute()), str(self.size), str(self.modified)

    @property
    def text_size(self) -> int | None:
        """Not known."""
        return None

    def document(self, number: int) -> str:
        """`FILE:RECORD`."""
        return f"{self.name}:{number}"

    @property
    def where(self) -> str:
        """The path."""
        return str(self.path)

    @abstractmethod
    def records(self, start: int) -> Iterator[Record]:
        """The records after the first `start`; raises what `READ_ERRORS` lists."""


class TextFile(File):
    """One document."""

    @property
    def text_size(self) -> int | None:
        """Bytes of the file."""
        return self.size

    def document(self, number: int) -> str:
        """The file's name."""
        return self.name

    def records(self, start: int) -> Iterator[Record]:
        """The whole file, unless it is past; UTF-16 and UTF-32 with a mark are UTF-8 here."""
        if not start:
            with self.path.open("rb") as content:
                encoding = encoding_of(content.read(4))
                content.seek(0)
                if encoding:
                    text = content.read().decode(encoding, errors="replace")
                    yield Record(1, io.BytesIO(text.encode()))
                else:
                    yield Record(1, content)


class JsonLines(File):
    """An object per line, plain or compressed; blank lines count, but are no documents."""

    def records(self, start: int) -> Iterator[Record]:
        """The lines after the first `start`."""
        with closing(self._open()) as file:
            for number, line in enumerate(islice(file, start, None), start + 1):
                if line.strip():
                    yield self._record(number, line)

    def _open(self) -> BinaryIO:
        if self.path.suffix == ".gz":
            return cast(BinaryIO, gzip.open(self.path))
        if self.path.suffix == ".zst":
            # Not through zstandard, whose reader takes a file that is cut short for a whole one.
            arrow = library("pyarrow", "reading .zst")
            raw = arrow.input_stream(str(self.path), compression="zstd")
            return cast(BinaryIO, io.BufferedReader(raw, 1 << 20))
        return self.path.open("rb")

    def _record(self, number: int, line: bytes) -> Record:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            return _bad(number, f"{self.path}:{number}: not JSON ({error})")
        if not isinstance(value, dict):
            return _bad(number, f"{self.path}:{number}: not a JSON object")
        return _record(number, value, f"{self.path}:{number}", self.content)


class Parquet(File):
    """A row per document; row groups are read one after the other."""

    def records(self, start: int) -> Iterator[Record]:
        """The rows after the first `start`.

        Raises:
            UserError: there is no such column, or the file is not Parquet.
        """
        parquet, arrow = (library(n, "reading Parquet") for n in ("pyarrow.parquet", "pyarrow"))
        try:
            with parquet.ParquetFile(self.path) as file:
                yield from self._rows(file, start)
        except arrow.ArrowException as error:
            raise UserError(f"cannot read {self.path}: {error}") from error

    def _rows(self, file: "ParquetFile", start: int) -> Iterator[Record]:
        columns = self.content.columns(file.schema_arrow.names, str(self.path))
        before = 0  # rows of the groups before
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if before + rows > start:
                batches = file.iter_batches(_ROWS, row_groups=[group], columns=columns)
                records = (record for batch in batches for record in batch.to_pylist())
                skip = max(0, start - before)
                for number, record in enumerate(islice(records, skip, None), before + skip + 1):
                    yield _record(number, record, f"{self.path}:{number}", self.content)
            before += rows


@dataclass(frozen=True)
class HuggingFace:
    """A dataset of the library `datasets`, or one file of it.

    Attributes:
        name: what it is called.
        dataset: the rows, streaming or on disk.
        content: of its rows.
    """

    name: str
    dataset: "Dataset | IterableDataset"
    content: Content = TextField()

    @property
    def identity(self) -> tuple[str, ...]:
        """The fingerprint that `datasets` gives what is on disk: of its source and its changes."""
        return self.name, self.dataset._fingerprint

    @property
    def where(self) -> str:
        """The name."""
        return self.name

    @property
    def text_size(self) -> int | None:
        """Not known."""
        return None

    def document(self, number: int) -> str:
        """`DATASET:ROW`."""
        return f"{self.name}:{number}"

    def records(self, start: int) -> Iterator[Record]:
        """The rows after the first `start`.

        Raises:
            UserError: there is no such column.
        """
        columns = self.content.columns(self.dataset.column_names, self.name)
        rows = self.dataset.select_columns(columns) if columns else self.dataset
        for number, record in enumerate(_rows(rows.skip(start)), start + 1):
            yield _record(number, record, f"{self.name}:{number}", self.content)


def find_inputs(
    places: Sequence[Path],
    globs: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    content: Content | None = None,
) -> list[File]:
    """Finds the files to read, each once, sorted by name; empty ones are left out.

    Args:
        places: files and directories; directories are searched in depth, but not those that are
            symbolic links.
        globs: which file names to take from directories.
        exclude: which names of inputs to leave out ("*" matches "/" too).
        content: of files of records; by default their "text".

    Raises:
        UserError: a place does not exist or cannot be read, a file is of a kind that cannot be
            read or holds no text, or no file is left.
    """
    found: dict[Path, File] = {}
    for path, name in _walk(places, globs):
        status = path.stat()
        if status.st_size and not any(fnmatch(name, pattern) for pattern in exclude):
            kind = _kind(path)
            file = kind(path, name, status.st_size, status.st_mtime_ns, content or TextField())
            found.setdefault(path.resolve(), file)
    check_text((file.path, isinstance(file, TextFile)) for file in found.values())
    if not found:
        where, kept = ", ".join(map(str, places)), " and no --exclude" if exclude else ""
        raise UserError(f"no text in {where}: no file matches --glob {','.join(globs)}{kept}")
    return sorted(found.values(), key=lambda file: file.name)


def _kind(path: Path) -> type[File]:
    if path.name.endswith((".jsonl", *_JSON_LINES)):
        return JsonLines
    if path.suffix == ".parquet":
        return Parquet
    if path.suffix in _UNREADABLE:
        raise UserError(
            f"cannot read {path}: of compressed files, only {', '.join(_JSON_LINES)} are known; "
            "unpack it, or leave it out with --exclude"
        )
    return TextFile


def _walk(places: Iterable[Path], globs: Sequence[str]) -> Iterator[tuple[Path, str]]:
    """Files, and their names below their places."""
    for root in places:
        if not root.exists():
            raise UserError(f"INPUT {root.absolute()} does not exist{path_hint(root)}")
        if root.is_file():
            yield root, root.name
            continue
        for directory, _, names in os.walk(root, onerror=_unreadable):
            for path in (Path(directory, name) for name in names):
                if path.is_file() and any(fnmatch(path.name, pattern) for pattern in globs):
                    yield path, path.relative_to(root).as_posix()


def _unreadable(error: OSError) -> NoReturn:
    raise UserError(f"cannot read {error.filename}: {error.strerror}") from error


def _rows(dataset: "Dataset | IterableDataset") -> Iterator[dict[str, Any]]:
    for batch in dataset.iter(_ROWS):
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(batch, values, strict=True))


def _record(number: int, record: Mapping[str, Any], where: str, content: Content) -> Record:
    try:
        document = content.document(record)
    except UserError:  # not the record's fault
        raise
    except (ValueError, RecursionError) as error:
        return _bad(number, f"{where}: {error}")
    # A lone surrogate, which JSON can spell and UTF-8 cannot, becomes "?".
    return Record(number, io.BytesIO(document.encode("utf-8", errors="replace")))


def _bad(number: int, problem: str) -> Record:
    return Record(number, io.BytesIO(), problem)
