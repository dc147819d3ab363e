"""Inputs of `prepare`: text files, files of records, Hugging Face datasets.

input     a file, or a Hugging Face dataset
document  a text file, or a record of any other input
record    unit of an input, counted from 1: line of a JSONL file, row of a table
"""

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from jaxforge.cli.suggestions import path_hint
from jaxforge.data.corpus.content import DEFAULT_FIELD, Content, MappingContent, TableRow, TextField
from jaxforge.data.corpus.file_state import FileState, check_unchanged
from jaxforge.data.corpus.json_files import Json, JsonLines, PackedFile
from jaxforge.data.corpus.records import MAX_RECORD_BYTES, File, Input, Record, Span, to_record
from jaxforge.data.corpus.remote_input import Location, RemotePath, list_files, open_input
from jaxforge.data.corpus.separated_text import SeparatedText
from jaxforge.data.corpus.tables import Arrow, Csv, Parquet, validate
from jaxforge.data.corpus.tar_files import Tar
from jaxforge.data.corpus.text_files import (
    EXCLUDE,
    HEAD,
    check_heads,
    check_text,
    in_words,
    is_named,
    utf8,
)
from jaxforge.errors import InputChangedError, UserError, quoted, unreadable

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

ROWS = 64  # of a dataset converted to Python objects at a time
_WEB_ARCHIVES = (".warc", ".wet", ".wat")
_PACKED = (".gz", ".zst", ".bz2", ".xz", ".zip", ".tar", ".tgz", ".7z", ".lz4")


class TextFile(File):
    """Text file that is one document."""

    @property
    def is_text(self) -> bool:
        """True."""
        return True

    @property
    def is_document(self) -> bool:
        """True."""
        return True

    @property
    def text_size(self) -> int | None:
        """Bytes of the file; None with maps, which may change them."""
        return None if isinstance(self.content, MappingContent) else self.size

    def document(self, number: int) -> str:
        """Return the name of the file."""
        return self.name

    def records(self, start: int) -> Iterator[Record]:
        """Yield the whole file if `start` is 0; UTF-16 and UTF-32 with a BOM become UTF-8."""
        if not start:
            with open_input(self.path) as content:
                if isinstance(self.path, RemotePath):  # others were checked before
                    check_heads([(self.path, True, content.read(HEAD))])
                    content.seek(0)
                yield self.text_record(1, utf8(content))


@dataclass(frozen=True)
class HuggingFace(Input):
    """Dataset of the library `datasets`, or one file of such a dataset.

    Attributes:
        name: name in messages.
        dataset: the rows, streaming or on disk.
        content: selects the text of a row.
        span: the first row to read, and the row after the last; None reads all rows.
        states: states of the files of a dataset on disk when it was listed or opened.
    """

    name: str
    dataset: "Dataset | IterableDataset"
    content: Content = DEFAULT_FIELD
    span: Span | None = None
    states: tuple[tuple[Path, FileState], ...] = ()

    @classmethod
    def on_disk(cls, name: str, dataset: "Dataset", content: Content) -> Self:
        """Return the input of a dataset with the states of its files."""
        paths = [Path(file["filename"]) for file in dataset.cache_files]
        return cls(name, dataset, content, states=tuple((p, FileState.of(p)) for p in paths))

    def opened(self) -> Self:
        """Return the dataset with the present states of its files."""
        states = tuple((path, self._checked(path, state)) for path, state in self.states)
        return replace(self, states=states)

    def check_unchanged(self) -> None:
        """Check that the files are those which were opened."""
        self.opened()

    def _checked(self, path: Path, state: FileState) -> FileState:
        try:
            return check_unchanged(path, state)
        except InputChangedError as error:
            raise InputChangedError(str(error), self.name) from error

    @property
    def identity(self) -> tuple[str, ...]:
        """Name, and the fingerprint that `datasets` computes of source and transformations."""
        return self.name, self.dataset._fingerprint

    @property
    def where(self) -> str:
        """The name."""
        return self.name

    @property
    def weight(self) -> int:
        """Bytes of the rows in Arrow's format; 0 for a stream."""
        table = getattr(self.dataset, "data", None)
        if table is None:
            return 0
        first, end = self.span or Span(0, len(self.dataset))
        return table.nbytes * (end - first) // max(1, table.num_rows)

    @property
    def begins(self) -> bool:
        """False for ranges of rows other than the first."""
        return not self.span or not self.span.start

    def slices(self, nbytes: int) -> "Sequence[HuggingFace]":
        """Return equal ranges of rows of about `nbytes`."""
        n = min(-(-self.weight // nbytes), len(self.dataset)) if self.weight else 1
        if n < 2:
            return [self]
        borders = [len(self.dataset) * i // n for i in range(n + 1)]
        return [replace(self, span=Span(*ends)) for ends in pairwise(borders)]

    def with_content(self, content: Content) -> Self:
        """Return the dataset with another selection of documents."""
        return replace(self, content=content)

    def records(self, start: int) -> Iterator[Record]:
        """Yield the rows after the first `start`.

        Raises:
            UserError: a column does not exist.
        """
        columns = self.content.columns(self.dataset.column_names, self.name)
        rows = self.dataset.select_columns(columns) if columns else self.dataset
        if self.span:
            start = max(start, self.span.start)
            rows = rows.take(self.span.end)
        for number, record in enumerate(_rows(rows.skip(start), self.name), start + 1):
            yield to_record(number, record, f"{self.name}:{number}", self.content)


_KINDS: dict[str, type[File]] = {
    ".jsonl": JsonLines,
    ".ndjson": JsonLines,
    ".json": Json,
    ".csv": Csv,
    ".tsv": Csv,
    ".parquet": Parquet,
    ".arrow": Arrow,
    ".feather": Arrow,
    ".tar": Tar,
    ".tgz": Tar,
}
"""Type of a file by the suffix of its lower-case name; other files are text."""


def find_inputs(
    paths: Sequence[Path | str],
    globs: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    content: Content | None = None,
    max_record_bytes: int = MAX_RECORD_BYTES,
    separator: bytes = b"",
) -> list[File]:
    """Find the files to read, each once, sorted by name, without empty files.

    Args:
        paths: files and directories, or their URLs as str. Directories are searched recursively,
            without following symbolic links to directories.
        globs: names of files to read in directories.
        exclude: names of inputs to exclude ("*" matches "/" too).
        content: selects the text of a record; by default the field "text".
        max_record_bytes: see `File`.
        separator: separator of the documents in text files; empty if a text file is one document.

    Raises:
        UserError: a path does not exist or cannot be read, a file is of a kind that cannot be
            read or holds no text, or no file is left.
    """
    files: dict[Location, File] = {}
    for location, name, state in _walk(paths, globs, exclude):
        if state.size and not any(fnmatch(name, pattern) for pattern in exclude):
            kind = _kind(location)
            is_separated = separator and kind is TextFile
            read_as = partial(SeparatedText, separator=separator) if is_separated else kind
            facts = location, name, state.size, state.modified, content or TextField()
            file = read_as(*facts, max_record_bytes, state=state)
            files.setdefault(location.resolve(), file)
    # Others are checked when they are read: a request for each of them would take hours.
    check_text((file.path, file.is_text) for file in files.values() if isinstance(file.path, Path))
    if not files:
        for path in paths:
            if isinstance(path, Path) and path.is_file() and not path.stat().st_size:
                raise UserError(f"INPUT {path} is empty: give a file with text, or a directory")
        where, exclusion = ", ".join(map(str, paths)), " and no --exclude" if exclude else ""
        raise UserError(f"no text in {where}: no file matches --glob {in_words(globs)}{exclusion}")
    if separator and not any(file.is_text for file in files.values()):
        raise UserError("--separator is for text files, and no INPUT is one: remove it")
    return sorted(files.values(), key=lambda file: file.name)


def _kind(path: Location) -> type[File]:
    name = path.name.lower()
    suffix = Path(name.removesuffix(".gz").removesuffix(".zst")).suffix
    if suffix in _WEB_ARCHIVES:
        raise UserError(
            f"cannot read {path}: WARC files hold web pages and not their text. Extract the text "
            "to JSON lines first, with datatrove or trafilatura, and prepare these; or exclude the "
            "file with --exclude"
        )
    kind = _KINDS.get(suffix, TextFile)
    is_read = name.endswith((".gz", ".zst")) and issubclass(kind, PackedFile)
    if name.endswith(_PACKED) and not is_read and kind is not Tar:
        known = ", ".join(f"{end}.gz" for end in _KINDS
                          if issubclass(_KINDS[end], PackedFile) and end != ".tgz")  # fmt: skip
        raise UserError(
            f"cannot read {path}: of compressed files, only {known} are known, and the same with "
            ".zst; unpack it, or exclude it with --exclude"
        )
    return kind


def _walk(
    paths: Iterable[Path | str], globs: Sequence[str], exclude: Sequence[str]
) -> Iterator[tuple[Location, str, FileState]]:
    """Yield files with their names relative to their input, and their states."""
    for root in paths:
        if isinstance(root, str):
            for file in list_files(root):
                if file.name == file.path.name == root.rpartition("/")[2] or is_named(
                    file.path.name, globs
                ):
                    yield file.path, file.name, FileState(file.path.size, file.version)
            continue
        for local, name in _walk_local(root, globs, exclude):
            yield local, name, FileState.of(local)


def _walk_local(
    root: Path, globs: Sequence[str], exclude: Sequence[str]
) -> Iterator[tuple[Path, str]]:
    try:
        kind = root.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        name = quoted(root.absolute())
        raise UserError(f"INPUT {name} does not exist{path_hint(root)}") from error
    except OSError as error:
        raise unreadable(f"INPUT {root}", error, "remove it") from error
    if stat.S_ISREG(kind):
        yield root, root.name
        return
    if not stat.S_ISDIR(kind):
        raise UserError(
            f"INPUT {root} is neither a file nor a directory: write the text to a file first"
        )

    def fail(error: OSError) -> None:
        name = f"{Path(error.filename).relative_to(root).as_posix()}/"
        if not any(fnmatch(name, pattern) for pattern in exclude):
            raise unreadable(error.filename, error, EXCLUDE) from error

    for directory, _, names in os.walk(root, onerror=fail):
        for path in (Path(directory, name) for name in names):
            if path.is_file() and is_named(path.name, globs):
                yield path, path.relative_to(root).as_posix()


def links_out(paths: Iterable[Path | str], files: Iterable[Input]) -> list[Path]:
    """Return the files that are links to files outside of every searched directory.

    Args:
        paths: see `find_inputs`.
        files: its result.
    """
    roots = [path.resolve() for path in paths if isinstance(path, Path) and path.is_dir()]
    links = [
        file.path
        for file in files
        if isinstance(file, File) and isinstance(file.path, Path) and file.path.is_symlink()
    ]
    named = {path for path in paths if isinstance(path, Path)}
    return [
        link
        for link in links
        if link not in named and not any(link.resolve().is_relative_to(root) for root in roots)
    ]


def _rows(dataset: "Dataset | IterableDataset", where: str) -> Iterator[TableRow]:
    for batch in _checked(dataset, where) if hasattr(dataset, "data") else dataset.iter(ROWS):
        for values in zip(*batch.values(), strict=True):
            yield TableRow(zip(batch, values, strict=True))


def _checked(dataset: "Dataset", where: str) -> Iterator[dict[str, Any]]:
    """Yield batches of a dataset on disk, each after a check of its Arrow data."""
    batches = dataset.iter(ROWS)
    for table in dataset.with_format("arrow").iter(ROWS):
        try:
            for part in table.to_batches():
                validate(part)
        except ValueError as error:  # of pyarrow
            raise UserError(f"cannot read {where}: {error}") from error
        yield next(batches)
