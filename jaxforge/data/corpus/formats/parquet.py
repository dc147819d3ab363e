"""Parquet files."""

from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from jaxforge.data.corpus.formats.arrow import ArrowRows
from jaxforge.data.corpus.optional import library
from jaxforge.data.corpus.records import Record
from jaxforge.data.corpus.remote_input import open_input
from jaxforge.errors import UserError

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
            if self.is_in_slice(size, sum(sizes)):
                n_rows = self._rows_at_a_time(file.metadata, group, columns)
                batches = file.iter_batches(n_rows, row_groups=[group], columns=columns)
                yield from self.from_batches(batches, before)
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
