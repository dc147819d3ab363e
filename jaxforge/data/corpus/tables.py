"""Tables: CSV, Parquet and Arrow files."""

import csv
import io
from collections.abc import Iterator
from contextlib import closing
from itertools import accumulate, chain
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from jaxforge.data.corpus.content import TableRow
from jaxforge.data.corpus.json_files import PackedFile
from jaxforge.data.corpus.optional import library
from jaxforge.data.corpus.records import File, Record, bad_record
from jaxforge.data.corpus.remote_input import open_input
from jaxforge.errors import UserError

if TYPE_CHECKING:
    from pyarrow import DataType, NativeFile, RecordBatch
    from pyarrow.ipc import IpcReadOptions, RecordBatchFileReader, RecordBatchStreamReader
    from pyarrow.parquet import FileMetaData, ParquetFile

_ROWS = 16  # of a table in memory at a time
_SUSPICIOUS_RATIO = 8  # of a row group: one value may stand for many rows
_SUSPICIOUS_BYTES = 1 << 20


class Csv(PackedFile):
    """CSV files with names in the first row and a document per row."""

    def records(self, start: int) -> Iterator[Record]:
        """Yield the rows after the first `start`, not counting the row of names.

        Raises:
            UserError: a column does not exist, or the file is not CSV.
        """
        csv.field_size_limit(max(csv.field_size_limit(), self.max_record_bytes))
        text = io.TextIOWrapper(self.open(), "utf-8-sig", newline="")
        number = 0
        with closing(text):
            lines = _BoundedLines(text, self)
            try:
                first = next(lines, "")
                delimiter = self._delimiter(first)
                rows = csv.reader(chain([first], lines), delimiter=delimiter, strict=True)
                names = next(rows, [])
                _columns(self, names)
                for row in rows:
                    lines.size = 0
                    number += bool(row)
                    if not row or number <= start:
                        continue
                    if len(row) == len(names):
                        yield self.record(number, dict(zip(names, row, strict=True)))
                        continue
                    fields = f"{len(row)} fields, and the first row {len(names)}"
                    yield bad_record(number, f"{self.path}:{number}: {fields}")
            except (csv.Error, UnicodeDecodeError) as error:
                raise UserError(
                    f"{self.path}: not CSV in UTF-8 in row {number + 1} ({error}), so that nothing "
                    "after it can be read; correct it, or exclude the file with --exclude"
                ) from error

    def _delimiter(self, names: str) -> str:
        """Return the delimiter: a tab in `.tsv`, and in `.csv` what separates the names."""
        if ".tsv" in self.path.name.lower():
            return "\t"
        return next((mark for mark in ",;\t" if mark in names), ",")


class _BoundedLines:
    """Iterator of lines that bounds the size of a row.

    Attributes:
        size: characters since it was last set to 0.
    """

    def __init__(self, text: io.TextIOWrapper, source: File) -> None:
        self._text, self._source, self.size = text, source, 0
        self._total = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        limit = self._source.max_record_bytes
        line = self._text.readline(limit + 1)
        if not line:
            raise StopIteration
        self.size += len(line)
        self._total += len(line)
        self._source.check_growth(self._total)
        if self.size > limit:
            raise csv.Error(f"larger than {limit:,} characters: see --max-record-bytes")
        return line


def _columns(source: File, names: list[str]) -> list[str]:
    """Return the names of the columns to read.

    Raises:
        UserError: a column does not exist, or several have its name.
    """
    columns = source.content.columns(names, str(source.path)) or names
    for name in columns:
        if (n := names.count(name)) > 1:
            raise UserError(
                f'{source.path} has {n} columns "{name}": rename or remove all but one, or exclude '
                "the file with --exclude"
            )
    return columns


def validate(batch: "RecordBatch") -> None:
    """Check the offsets of a batch, which pyarrow trusts, but not the UTF-8 of each value.

    Raises:
        pyarrow.ArrowInvalid: they are outside of the data.
    """
    for column in batch.columns:
        column.view(_as_bytes(column.type)).validate(full=True)


def _as_bytes(kind: "DataType") -> "DataType":
    """Return the type with binary values instead of text, at every depth."""
    import pyarrow as pa

    if pa.types.is_string(kind):
        return pa.binary()
    if pa.types.is_large_string(kind):
        return pa.large_binary()
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_as_bytes(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_as_bytes(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_as_bytes(field.type)) for field in kind])
    return kind


class _ArrowTable(File):
    """Base of files that pyarrow reads."""

    @property
    def can_be_sliced(self) -> bool:
        """True: row groups and record batches are found by the file's index."""
        return True

    def _is_in_slice(self, before: int, total: int) -> bool:
        """Return whether a group of rows belongs to the slice.

        Args:
            before: size of the groups before it, in any unit.
            total: size of all groups.
        """
        return (
            not self.span or self.span.start <= self.size * before // max(1, total) < self.span.end
        )

    def _from_batches(
        self, batches: "Iterator[RecordBatch]", number: int, skipped: int
    ) -> Iterator[Record]:
        """Yield the records of batches.

        Args:
            batches: batches of rows; the first row is `number + 1`.
            number: rows before the batches.
            skipped: rows of the batches to skip.
        """
        size = 0
        for batch in batches:
            validate(batch)
            names = batch.schema.names
            for i in range(min(skipped, batch.num_rows), batch.num_rows):
                # Row by row: a value that many rows share exists once in Arrow, not in Python.
                try:
                    row = TableRow({name: batch[name][i].as_py() for name in names})
                except (ValueError, OverflowError) as error:
                    at, reason = number + i + 1, str(error)
                    if isinstance(error, UnicodeDecodeError):
                        reason = f"not UTF-8 ({error.reason})"
                    yield bad_record(at, f"{self.path}:{at}: {reason}")
                    continue
                record = self.record(number + i + 1, row)
                size += record.content.seek(0, io.SEEK_END)
                record.content.seek(0)
                self.check_growth(size)
                yield record
            skipped -= min(skipped, batch.num_rows)
            number += batch.num_rows


class Parquet(_ArrowTable):
    """Parquet files with a document per row, read one row group at a time."""

    def records(self, start: int) -> Iterator[Record]:
        """Yield the rows after the first `start`.

        Raises:
            UserError: a column does not exist, or the file is not Parquet.
        """
        parquet, arrow = (library(n, "reading Parquet") for n in ("pyarrow.parquet", "pyarrow"))
        try:
            with open_input(self.path) as raw, parquet.ParquetFile(raw) as file:
                yield from self._rows(file, start)
        except arrow.ArrowException as error:
            raise UserError(f"cannot read {self.path}: {error}") from error

    def _rows(self, file: "ParquetFile", start: int) -> Iterator[Record]:
        columns = _columns(self, file.schema_arrow.names)
        sizes = [file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups)]
        before = 0  # rows of earlier groups
        for group, size in zip(range(len(sizes)), accumulate(sizes, initial=0), strict=False):
            rows = file.metadata.row_group(group).num_rows
            if before + rows > start and self._is_in_slice(size, sum(sizes)):
                n_rows = self._rows_at_a_time(file.metadata, group, columns)
                batches = file.iter_batches(n_rows, row_groups=[group], columns=columns)
                yield from self._from_batches(batches, before, max(0, start - before))
            before += rows

    def _rows_at_a_time(self, metadata: "FileMetaData", group: int, names: list[str]) -> int:
        """Return the number of rows to hold in memory, by the unpacked size of the row group."""
        row_group = metadata.row_group(group)
        chunks = [row_group.column(i) for i in range(row_group.num_columns)]
        chunks = [chunk for chunk in chunks if chunk.path_in_schema.partition(".")[0] in names]
        size = sum(chunk.total_uncompressed_size for chunk in chunks)
        packed = sum(chunk.total_compressed_size for chunk in chunks)
        self.check_growth(size)
        is_suspicious = size > _SUSPICIOUS_BYTES and size > _SUSPICIOUS_RATIO * packed
        return 1 if is_suspicious else _ROWS


class Arrow(_ArrowTable):
    """Arrow IPC files (also Feather) or streams with a document per row."""

    numbered_in_slice = True

    def records(self, start: int) -> Iterator[Record]:
        """Yield the rows after the first `start`.

        Raises:
            UserError: a column does not exist, or the file is not in Arrow's format.
        """
        arrow, ipc = (library(n, "reading Arrow files") for n in ("pyarrow", "pyarrow.ipc"))
        try:
            with self._reader(arrow, ipc) as reader:
                names = reader.schema.names
                columns = _columns(self, names)
            options = ipc.IpcReadOptions(included_fields=[names.index(name) for name in columns])
            with self._reader(arrow, ipc, options) as reader:
                before = 0
                for batch in self._batches(reader):
                    if before + batch.num_rows > start:
                        yield from self._from_batches(iter([batch]), before, max(0, start - before))
                    before += batch.num_rows
        except arrow.ArrowException as error:
            raise UserError(f"cannot read {self.path}: {error}") from error

    def _reader(
        self,
        arrow: ModuleType,
        ipc: ModuleType,
        options: "IpcReadOptions | None" = None,
    ) -> "RecordBatchFileReader | RecordBatchStreamReader":
        try:
            return ipc.open_file(self._open(arrow), options=options)
        except arrow.ArrowInvalid:
            return ipc.open_stream(self._open(arrow), options=options)

    def _open(self, arrow: ModuleType) -> "NativeFile":
        # Not a memory map: the system ends a process that reads the map of a file which was cut.
        if isinstance(self.path, Path):
            return arrow.OSFile(str(self.path))
        return arrow.PythonFile(open_input(self.path), "r")

    def _batches(
        self, reader: "RecordBatchFileReader | RecordBatchStreamReader"
    ) -> "Iterator[RecordBatch]":
        """Yield the batches of the slice; a stream, which has no index, is whole in the first."""
        n = getattr(reader, "num_record_batches", None)
        if n is None:
            return iter(reader if self.begins else ())
        return (reader.get_batch(i) for i in range(n) if self._is_in_slice(i, n))
