"""Arrow IPC files, and the rows of tables that pyarrow reads."""

import io
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from jaxforge.data.corpus.files import File
from jaxforge.data.corpus.records import Record, TableRow, bad_record, library
from jaxforge.data.corpus.remote_input import open_input
from jaxforge.errors import UserError

if TYPE_CHECKING:
    from pyarrow import DataType, NativeFile, RecordBatch
    from pyarrow.ipc import IpcReadOptions, RecordBatchFileReader, RecordBatchStreamReader


def validate(batch: "RecordBatch") -> None:
    """Check the offsets of a batch, which pyarrow trusts, but not the UTF-8 of each value.

    Raises:
        pyarrow.ArrowInvalid: they are outside of the data.
    """
    for column in batch.columns:
        # As bytes: text that is not UTF-8 is a bad record, and not the end of the file.
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


class ArrowRows(File):
    """Base of files that pyarrow reads."""

    @property
    def can_be_sliced(self) -> bool:
        """True: row groups and record batches are found by the file's index."""
        return True

    def is_in_slice(self, before: int, total: int) -> bool:
        """Return whether a group of rows belongs to the slice.

        Args:
            before: size of the groups before it, in any unit.
            total: size of all groups.
        """
        # By the group's first byte, scaled to the file: each group is in exactly one slice.
        return (
            not self.span or self.span.start <= self.size * before // max(1, total) < self.span.end
        )

    def from_batches(self, batches: "Iterator[RecordBatch]", number: int) -> Iterator[Record]:
        """Yield the records of batches.

        Args:
            batches: batches of rows; the first row is `number + 1`.
            number: rows before the batches.
        """
        size = 0
        for batch in batches:
            validate(batch)
            names = batch.schema.names
            for i in range(batch.num_rows):
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
            number += batch.num_rows


class Arrow(ArrowRows):
    """Arrow IPC files (also Feather) or streams with a document per row."""

    suffixes = (".arrow", ".feather")
    documents = "each row, column `text`"
    numbered_in_slice = True

    def records(self) -> Iterator[Record]:
        """Yield the rows.

        Raises:
            UserError: a column does not exist, or the file is not in Arrow's format.
        """
        arrow, ipc = (library(n, "reading Arrow files") for n in ("pyarrow", "pyarrow.ipc"))
        try:
            # The schema first: the columns to read are options of a second reader.
            with self._reader(arrow, ipc) as reader:
                names = reader.schema.names
                columns = self.columns(names)
            options = ipc.IpcReadOptions(included_fields=[names.index(name) for name in columns])
            with self._reader(arrow, ipc, options) as reader:
                before = 0
                for batch in self._batches(reader):
                    yield from self.from_batches(iter([batch]), before)
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
            # A file has a footer, which streams lack: they raise, and are opened as streams.
            return ipc.open_file(self._open_for(arrow), options=options)
        except arrow.ArrowInvalid:
            return ipc.open_stream(self._open_for(arrow), options=options)

    def _open_for(self, arrow: ModuleType) -> "NativeFile":
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
        # By number: the size of a batch is unknown before it is read.
        return (reader.get_batch(i) for i in range(n) if self.is_in_slice(i, n))


if TYPE_CHECKING:
    from pyarrow.parquet import FileMetaData, ParquetFile

_ROWS = 16  # of a table in memory at a time
_SUSPICIOUS_RATIO = 8  # of a row group: one value may stand for many rows
_SUSPICIOUS_BYTES = 1 << 20


class Parquet(ArrowRows):
    """Parquet files with a document per row, read one row group at a time."""

    suffixes = (".parquet",)
    documents = "each row, column `text`"

    def records(self) -> Iterator[Record]:
        """Yield the rows.

        Raises:
            UserError: a column does not exist, or the file is not Parquet.
        """
        parquet, arrow = (library(n, "reading Parquet") for n in ("pyarrow.parquet", "pyarrow"))
        try:
            with open_input(self.path) as raw, parquet.ParquetFile(raw) as file:
                yield from self._rows(file)
        except arrow.ArrowException as error:
            raise UserError(f"cannot read {self.path}: {error}") from error

    def _rows(self, file: "ParquetFile") -> Iterator[Record]:
        columns = list(self.columns(file.schema_arrow.names))
        sizes = [file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups)]
        before = 0  # rows of earlier groups
        for group, size in zip(range(len(sizes)), accumulate(sizes, initial=0), strict=False):
            rows = file.metadata.row_group(group).num_rows
            # By unpacked bytes before the group, scaled to the file: slices divide the file evenly.
            if self.is_in_slice(size, sum(sizes)):
                n_rows = self._rows_at_a_time(file.metadata, group, columns)
                batches = file.iter_batches(n_rows, row_groups=[group], columns=columns)
                yield from self.from_batches(batches, before)
            before += rows

    def _rows_at_a_time(self, metadata: "FileMetaData", group: int, names: list[str]) -> int:
        """Return the number of rows to hold in memory, by the unpacked size of the row group."""
        row_group = metadata.row_group(group)
        chunks = [row_group.column(i) for i in range(row_group.num_columns)]
        # A nested column has several chunks, whose paths begin with its name.
        chunks = [chunk for chunk in chunks if chunk.path_in_schema.partition(".")[0] in names]
        size = sum(chunk.total_uncompressed_size for chunk in chunks)
        packed = sum(chunk.total_compressed_size for chunk in chunks)
        self.check_growth(size)
        is_suspicious = size > _SUSPICIOUS_BYTES and size > _SUSPICIOUS_RATIO * packed
        return 1 if is_suspicious else _ROWS
