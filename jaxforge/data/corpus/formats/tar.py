"""Tar archives of samples, as the library `webdataset` reads and writes them.

books/1.json  ┐
books/1.txt   ├ consecutive members with a name up to the first dot: a sample, and a record
books/1.jpg   ┘
books/2.txt   ─ the next sample

Nothing is extracted: names of members group them and occur in messages. `tarfile` parses the
headers. It reads an extended header of any size into memory, and takes a truncated or damaged
archive for a shorter one, so `_Bounded` lies between it and the file.
"""

import json
import tarfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import BinaryIO, cast

from jaxforge.cli.suggestions import listed
from jaxforge.data.corpus.files import SKIPPED, File
from jaxforge.data.corpus.formats.json_objects import BYTES_PER_VALUE
from jaxforge.data.corpus.records import Record, bad_record, is_utf8
from jaxforge.errors import UserError

_LARGEST_HEADER = 1 << 16  # of a long name, or of extended attributes
_TEXTS = ("txt", "text")
_COMPRESSED = {
    b"\x1f\x8b": "gzip: name it .tar.gz",
    b"\x28\xb5\x2f\xfd": "zstd: name it .tar.zst",
    b"\xfd7zXZ": "xz: decompress it, or compress it by gzip",
    b"BZh": "bzip2: decompress it, or compress it by gzip",
}
_NAMED = 8  # parts of a sample that a message names


@dataclass
class _Sample:
    """Consecutive members with the same key.

    Attributes:
        key: path up to the first dot of the file name.
        parts: contents of the parts that are read, by suffix.
        suffixes: first suffixes of all parts.
        problem: reason why the sample is not a record, or "".
        advice: advice on `problem`.
    """

    key: str
    parts: dict[str, bytes] = field(default_factory=dict)
    suffixes: list[str] = field(default_factory=list)
    problem: str = ""
    advice: str = ""


class Tar(File):
    """Tar archive with a document per sample: its `.txt`, or the text field of its `.json`."""

    suffixes = (".tar", ".tgz")
    packable = (".tar",)
    documents = 'each sample: its `.txt`, or the `"text"` of its `.json`'

    def records(self) -> Iterator[Record]:
        """Yield the records.

        Raises:
            UserError: the archive is damaged or truncated, or has a sparse member.
        """
        with closing(self.open()) as file:
            for number, sample in enumerate(self._samples(_Bounded(file, self)), 1):
                yield self._record(number, sample)

    def _samples(self, file: "_Bounded") -> Iterator[_Sample]:
        sample: _Sample | None = None
        for member in file.members():
            directory, slash, name = member.name.rpartition("/")
            stem, _, suffix = name.partition(".")
            if not stem or not suffix:
                continue
            key, suffix = directory + slash + stem, suffix.lower()
            if sample is None or sample.key != key:
                if sample is not None:
                    yield sample
                sample = _Sample(key)
            self._add(sample, suffix, member, file)
        if sample is not None:
            yield sample

    def _add(self, sample: _Sample, suffix: str, member: tarfile.TarInfo, file: "_Bounded") -> None:
        """Read a member into its sample if it may hold the text."""
        if len(sample.suffixes) < _NAMED:
            sample.suffixes.append(suffix[:20])
        if suffix not in (*_TEXTS, "json"):
            return
        if suffix in sample.parts:
            sample.problem = f"it has two members .{suffix}"
        elif member.size > self.max_record_bytes:
            sample.problem = f".{suffix} is larger than {self.max_record_bytes:,} bytes"
            sample.advice = "raise --max-record-bytes, or leave such out with --skip-bad"
        else:
            sample.parts[suffix] = file.read(member.size)

    def _record(self, number: int, sample: _Sample) -> Record:
        where = f"{self.path}:{number}: sample {sample.key[:100]!r}"
        if sample.problem:
            return bad_record(number, f"{where}: {sample.problem}", sample.advice)
        texts = [sample.parts[suffix] for suffix in _TEXTS if suffix in sample.parts]
        if not texts and "json" not in sample.parts:
            return bad_record(
                number,
                f"{where} has no .txt and no .json (it has: {listed(sample.suffixes)})",
                "leave such out with --skip-bad, or the archive with --exclude",
            )
        record: dict[str, object] = {}
        if data := sample.parts.get("json"):
            if data.count(b",") > self.max_record_bytes // BYTES_PER_VALUE:
                return self.too_large(number)
            try:
                value = json.loads(data)
            except (ValueError, RecursionError) as error:
                return bad_record(number, f"{where}: .json is not JSON ({error})")
            if not isinstance(value, dict):
                return bad_record(number, f"{where}: .json is not a JSON object")
            record = value
        record["__key__"] = sample.key
        if not texts:
            return self.record(number, record)
        record[self.content.text_field] = texts[0].decode(errors="replace")
        return self.record(number, record)._replace(is_utf8=is_utf8(texts[0]))


class _Bounded:
    """File of an archive for `tarfile`, read forwards in bounded memory.

    Args:
        file: the archive, decompressed.
        source: the file in messages; has the limits of a record and of its growth.
    """

    def __init__(self, file: BinaryIO, source: File) -> None:
        self._file, self._source = file, source
        self._is_plain = source.path.suffix.lower() == ".tar"
        self._at = 0
        self._largest = max(_LARGEST_HEADER, source.max_record_bytes)
        self._block = b""  # read last
        self._member = ""  # name of the last member

    def members(self) -> Iterator[tarfile.TarInfo]:
        """Yield the regular files; the position is then at the content of each.

        Raises:
            UserError: see `Tar.records`.
        """
        try:
            file = cast(BinaryIO, self)  # with the three methods that tarfile calls
            archive = tarfile.TarFile(fileobj=file, encoding="utf-8", errors="surrogateescape")
            while info := archive.next():
                archive.members = []  # type: ignore[attr-defined]  # it would keep all
                is_sparse = any(key.startswith("GNU.sparse") for key in info.pax_headers)
                if info.issparse() or is_sparse:
                    raise UserError(
                        f"{self._source.path}: the member {info.name[:100]!r} is sparse, as no "
                        "text is; write the archive without --sparse, or exclude it with --exclude"
                    )
                if info.isreg():
                    self._member = info.name
                    yield info
        except UserError:
            raise
        except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
            raise self._damaged(str(error)) from error
        if any(self._block):  # at the end of an archive, tarfile has read a block of zeros
            raise self._damaged("invalid header")

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int) -> None:
        """Skip bytes up to a later position."""
        size = offset - self._at
        if size < 0:
            raise self._damaged("a member has a negative size")
        if self._is_plain and size > SKIPPED and offset < self._source.size:
            self._file.seek(offset)
            self._at = offset
        while self._at < offset:
            self._take(min(offset - self._at, SKIPPED))

    def read(self, size: int) -> bytes:
        """Return that many bytes."""
        if size > self._largest:
            raise self._damaged(f"a header has {size:,} bytes")
        self._block = self._take(size)
        return self._block

    def _take(self, size: int) -> bytes:
        data = self._file.read(size)
        while len(data) < size and (more := self._file.read(size - len(data))):
            data += more
        for start, advice in _COMPRESSED.items() if self._at == 0 else ():
            if data.startswith(start):
                raise self._damaged(f"it is compressed by {advice}")
        self._at += len(data)
        self._source.check_growth(self._at)
        if len(data) < size:
            inside = f", in {self._member[:100]!r} or after it" if self._member else ""
            raise UserError(
                f"{self._source.path} is truncated: it ends without the mark of its end{inside}; "
                "copy it again, or exclude it with --exclude"
            )
        return data

    def _damaged(self, reason: str) -> UserError:
        after = f" after {self._member[:100]!r}" if self._member else ""
        return UserError(
            f"{self._source.path} is not a tar archive, or damaged{after} ({reason}); replace it, "
            "or exclude it with --exclude"
        )
