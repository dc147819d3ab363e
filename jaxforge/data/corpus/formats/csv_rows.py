"""CSV files.

The standard library parses rows: readers of pyarrow and pandas name no rows in errors, and guess
types of columns.
"""

import csv
import io
from collections.abc import Iterator
from contextlib import closing
from itertools import chain

from jaxforge.data.corpus.files import File
from jaxforge.data.corpus.records import Record, bad_record
from jaxforge.errors import UserError


class Csv(File):
    """CSV files with names in the first row and a document per row."""

    suffixes = (".csv", ".tsv")
    packable = suffixes
    documents = (
        "each row, column `text`; the first row has the names. In `.csv`, semicolons or tabs may "
        "separate them"
    )

    def records(self) -> Iterator[Record]:
        """Yield the rows, without the row of names.

        Raises:
            UserError: a column does not exist, or the file is not CSV.
        """
        # The limit is global, 128 KiB by default: raised here, but never lowered for others.
        csv.field_size_limit(max(csv.field_size_limit(), self.max_record_bytes))
        # newline="" as the csv module requires: a quoted field may hold line ends.
        text = io.TextIOWrapper(self.open(), "utf-8-sig", newline="")
        number = 0
        with closing(text):
            lines = _BoundedLines(text, self)
            try:
                first = next(lines, "")
                delimiter = self._delimiter(first)
                # Strict: else a quote that is never closed makes one row of all that follows.
                rows = csv.reader(chain([first], lines), delimiter=delimiter, strict=True)
                names = next(rows, [])
                self.columns(names)
                for row in rows:
                    # All lines of this row are read: the next row has the whole limit again.
                    lines.size = 0
                    # Blank lines are not records.
                    number += bool(row)
                    if not row:
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
