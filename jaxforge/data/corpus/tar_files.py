"""Tar archives of samples, as the library `webdataset` reads and writes them.

books/1.json  ┐
books/1.txt   ├ consecutive members with a name up to the first dot: a sample, and a record
books/1.jpg   ┘
books/2.txt   ─ the next sample

Nothing is extracted: names of members group them and occur in messages. Headers are read here and
not by `tarfile.open`, which reads extended headers of any size into memory.
"""

import json
import re
import tarfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import BinaryIO, NamedTuple

from jaxforge.cli.suggestions import listed
from jaxforge.data.corpus.content import text_field
from jaxforge.data.corpus.json_files import BYTES_PER_VALUE, PackedFile
from jaxforge.data.corpus.records import Record, bad_record
from jaxforge.data.corpus.unicode_text import is_utf8
from jaxforge.errors import UserError

_BLOCK = 512
_SKIPPED = 1 << 20  # bytes per read of data that are not used
_LARGEST_HEADER = 1 << 20  # of a long name, or of extended attributes
_PAX = re.compile(rb"(\d{1,9}) ([^=\n]+)=")
_TEXTS = ("txt", "text")
_COMPRESSED = {
    b"\x1f\x8b": "gzip: name it .tar.gz",
    b"\x28\xb5\x2f\xfd": "zstd: decompress it, or compress it by gzip",
    b"\xfd7zXZ": "xz: decompress it, or compress it by gzip",
    b"BZh": "bzip2: decompress it, or compress it by gzip",
}
_NAMED = 8  # parts of a sample that a message names


class _Member(NamedTuple):
    """Regular file in an archive.

    Attributes:
        name: path in the archive.
        size: bytes of its content.
    """

    name: str
    size: int


@dataclass
class _Sample:
    """Consecutive members with the same key.

    Attributes:
        key: path up to the first dot of the file name.
        parts: contents of the parts that are read, by suffix.
        suffixes: first suffixes of all parts.
        problem: reason why the sample is no record, or "".
        advice: advice on `problem`.
    """

    key: str
    parts: dict[str, bytes] = field(default_factory=dict)
    suffixes: list[str] = field(default_factory=list)
    problem: str = ""
    advice: str = ""


class Tar(PackedFile):
    """Tar archive with a document per sample: its `.txt`, or the text field of its `.json`."""

    def records(self, start: int) -> Iterator[Record]:
        """Yield the records after the first `start`.

        Raises:
            UserError: the archive is damaged or truncated, or has a sparse member.
        """
        with closing(self.open()) as file:
            for number, sample in enumerate(self._samples(_Archive(file, self)), 1):
                if number > start:
                    yield self._record(number, sample)

    def _samples(self, archive: "_Archive") -> Iterator[_Sample]:
        sample: _Sample | None = None
        for member in archive.members():
            directory, slash, name = member.name.rpartition("/")
            stem, _, suffix = name.partition(".")
            if not stem or not suffix:
                continue
            key, suffix = directory + slash + stem, suffix.lower()
            if sample is None or sample.key != key:
                if sample is not None:
                    yield sample
                sample = _Sample(key)
            self._add(sample, suffix, member, archive)
        if sample is not None:
            yield sample

    def _add(self, sample: _Sample, suffix: str, member: _Member, archive: "_Archive") -> None:
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
            sample.parts[suffix] = archive.content()

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
        record[text_field(self.content)] = texts[0].decode(errors="replace")
        return self.record(number, record)._replace(is_utf8=is_utf8(texts[0]))


class _Archive:
    """Forward reader of a tar archive, in bounded memory.

    Args:
        file: the archive, decompressed.
        source: the file in messages; has the limit of its growth.
    """

    def __init__(self, file: BinaryIO, source: PackedFile) -> None:
        self._file, self._source = file, source
        self._is_plain = source.path.suffix.lower() == ".tar"
        self._size = 0  # bytes read so far
        self._left = 0  # bytes of the current member that are not read, padding included
        self._member = _Member("", 0)

    def members(self) -> Iterator[_Member]:
        """Yield the regular files.

        Raises:
            UserError: see `Tar.records`.
        """
        attributes: dict[str, bytes] = {}
        while True:
            self._skip(self._left)
            block = self._read(_BLOCK)
            if not any(block):
                return
            info = self._header(block)
            size = self._number(attributes["size"]) if "size" in attributes else info.size
            if info.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME):
                attributes |= self._extended(info)
                continue
            is_data = info.isreg() or info.type not in tarfile.SUPPORTED_TYPES
            has_data = is_data or info.type in (tarfile.XGLTYPE, tarfile.GNUTYPE_LONGLINK)
            self._left = -(-size // _BLOCK) * _BLOCK if has_data else 0
            name = attributes.get("path", b"").decode(errors="surrogateescape") or info.name
            is_sparse = info.type == tarfile.GNUTYPE_SPARSE
            if is_sparse or any(key.startswith("GNU.sparse") for key in attributes):
                raise UserError(
                    f"{self._source.path}: the member {name[:100]!r} is sparse, as no text is; "
                    "write the archive without --sparse, or exclude it with --exclude"
                )
            if info.isreg():
                self._member = _Member(name, size)
                yield self._member
            if info.type not in (tarfile.XGLTYPE, tarfile.GNUTYPE_LONGLINK):
                attributes = {}

    def content(self) -> bytes:
        """Return the content of the current member."""
        data = self._read(self._member.size)
        self._left -= len(data)
        return data

    def _header(self, block: bytes) -> tarfile.TarInfo:
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise self._damaged(str(error)) from error
        if info.size < 0:
            raise self._damaged("a member has a negative size")
        return info

    def _extended(self, info: tarfile.TarInfo) -> dict[str, bytes]:
        """Return the attributes that a header gives to the next member."""
        if info.size > _LARGEST_HEADER:
            raise self._damaged(f"a header has {info.size:,} bytes")
        data = self._read(info.size)
        self._skip(-info.size % _BLOCK)
        if info.type == tarfile.GNUTYPE_LONGNAME:
            return {"path": data.partition(b"\0")[0]}
        attributes, at = {}, 0
        while at < len(data) and data[at]:
            match = _PAX.match(data, at)
            end = at + int(match[1]) if match else 0
            if match is None or not match.end() < end <= len(data):
                raise self._damaged("an extended header is invalid")
            attributes[match[2].decode(errors="replace")] = data[match.end() : end - 1]
            at = end
        return attributes

    def _number(self, text: bytes) -> int:
        if not text.isdigit() or len(text) > 20:
            raise self._damaged("an extended header is invalid")
        return int(text)

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        while len(data) < size and (more := self._file.read(size - len(data))):
            data += more
        if self._size == 0:
            self._check_start(data)
        self._grow(len(data))
        if len(data) < size:
            raise self._truncated()
        return data

    def _check_start(self, data: bytes) -> None:
        """Refuse a compressed archive, which may be shorter than a header, by its first bytes."""
        for start, advice in _COMPRESSED.items():
            if data.startswith(start):
                raise self._damaged(f"it is compressed by {advice}")

    def _skip(self, size: int) -> None:
        self._left = 0
        if self._is_plain and size > _SKIPPED:
            if self._file.tell() + size > self._source.size:
                raise self._truncated()
            self._file.seek(size, 1)
            return
        while size:
            data = self._file.read(min(size, _SKIPPED))
            self._grow(len(data))
            if not data:
                raise self._truncated()
            size -= len(data)

    def _grow(self, size: int) -> None:
        self._size += size
        self._source.check_growth(self._size)

    def _truncated(self) -> UserError:
        inside = f", in {self._member.name[:100]!r} or after it" if self._member.name else ""
        return UserError(
            f"{self._source.path} is truncated: it ends without the mark of its end{inside}; copy "
            "it again, or exclude it with --exclude"
        )

    def _damaged(self, reason: str) -> UserError:
        after = f" after {self._member.name[:100]!r}" if self._member.name else ""
        return UserError(
            f"{self._source.path} is no tar archive, or damaged{after} ({reason}); replace it, or "
            "exclude it with --exclude"
        )
