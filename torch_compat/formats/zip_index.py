"""Index and records of uncompressed zip files, restricted to the features that `torch.save` uses.

Format: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT

    local header | path | extra | content      for each record
    index: entry | path | extra | comment      for each record ("central directory")
    end record of zip64, locator of that       only in torch's own files
    end record                                 count, size and start of the index

The local header of a record must agree with its entry in the index.
"""

import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxforge.errors import UserError
from torch_compat.formats import limits
from torch_compat.formats.files import Bytes

# Structures of the format, each with its signature first:
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_MOST32 = 2**32 - 1  # in a 32-bit field: the value is a 64-bit number of the extra field


class ZipEntry(NamedTuple):
    """Entry of a record in the index.

    Attributes:
        name: path of the record.
        version: format version needed to read the record.
        flags: bits of the format: 1 is encryption, 8 omits sizes in the local header.
        method: compression method; 0: none.
        crc: CRC-32 of the content; 0 if torch was configured to compute none.
        stored: bytes in the file.
        length: bytes after decompression.
        header: first byte of the local header in the archive.
    """

    name: bytes
    version: int
    flags: int
    method: int
    crc: int
    stored: int
    length: int
    header: int


def read_index(archive: Bytes) -> Iterator[ZipEntry]:
    """Yield the entries of the archive's index.

    Raises:
        ValueError: the index is missing, damaged or too large.
        struct.error: the index is truncated.
    """
    start, length, count = _find_index(archive)
    if length > limits.ENTRIES or count > length // _ENTRY.size:
        raise ValueError(f"an index of {count} records in {length} bytes")
    index = archive(start, length).tobytes()
    at = 0
    for _ in range(count):
        entry, at = _parse_entry(index, at)
        yield entry
    if at != length:
        raise ValueError("more in its index than records")


def data_start(archive: Bytes, entry: ZipEntry) -> int:
    """Return the first byte of a record's content in the archive.

    Raises:
        ValueError: the local header disagrees with the index, or the content is truncated.
    """
    if entry.header + _LOCAL.size + len(entry.name) > archive.size:
        raise ValueError("the index is damaged")
    fields = archive(entry.header, _LOCAL.size + len(entry.name)).tobytes()
    mark, *about, _, _, crc, stored, length, names, extra = _LOCAL.unpack_from(fields)
    _, flags, _ = about
    same = (mark, about, fields[_LOCAL.size :], names) == (
        b"PK\3\4", list(entry[1:4]), entry.name, len(entry.name)
    )  # fmt: skip
    # torch writes the content before it knows its checksum. With flag 8, the numbers follow in a
    # data descriptor after the content, and those of the local header are 0.
    if flags & 8 and not crc and not stored and not length:
        crc, stored, length = entry.crc, entry.stored, entry.length
    sizes = {stored, length} <= {entry.length, _MOST32}
    if not same or crc != entry.crc or not sizes:
        raise ValueError("its header is damaged, or another record's")
    start = entry.header + _LOCAL.size + names + extra
    if start + entry.length > archive.size:
        raise ValueError("it is truncated")
    return start


class FileRange:
    """Range of a file that is read like a file.

    Args:
        file: the file.
        start: first byte of the range.
        size: length of the range in bytes.
    """

    def __init__(self, file: Bytes, start: int, size: int) -> None:
        self._file, self._start, self.size = file, start, size

    def __call__(self, start: int, length: int) -> np.ndarray:
        """Return bytes of the range."""
        return self._file(self._start + start, length)


class ChecksummedRecord(FileRange):
    """Record that is read as a whole each time, to verify its checksum.

    Args:
        content: content of the record.
        crc: CRC-32 of the content.
        where: description of the record for messages.
    """

    def __init__(self, content: Bytes, crc: int, where: str) -> None:
        super().__init__(content, 0, content.size)
        self._crc, self._where = crc, where

    def __call__(self, start: int, length: int) -> np.ndarray:
        """Return bytes of the record.

        Raises:
            UserError: the checksum differs.
        """
        data = super().__call__(0, self.size)
        if zlib.crc32(data.data) != self._crc:
            raise UserError(f"{self._where}: its checksum differs: the file is damaged")
        return data[start : start + length]


def _find_index(archive: Bytes) -> tuple[int, int, int]:
    """Return the start and length of the index, and its number of records."""
    tail = min(archive.size, _END.size + _LOCATOR.size)
    data = archive(archive.size - tail, tail).tobytes()
    if data[-_END.size :][:4] != b"PK\5\6":
        raise ValueError("no end record")
    *_, count, length, start, _ = _END.unpack(data[-_END.size :])
    end = archive.size - _END.size
    if data.startswith(b"PK\6\7"):
        _, _, at, _ = _LOCATOR.unpack_from(data)
        if not 0 <= at <= archive.size - _END64.size:
            raise ValueError("its end record lies elsewhere")
        mark, *_, count, length, start = _END64.unpack(archive(at, _END64.size).tobytes())
        if mark != b"PK\6\6":
            raise ValueError("no end record")
        end = at
    # No byte may lie between index and end record: other readers could take it for another index.
    if start + length != end:
        raise ValueError("its index lies elsewhere")
    return start, length, count


def _parse_entry(index: bytes, at: int) -> tuple[ZipEntry, int]:
    """Return the entry at a position of the index, and the position of the next entry."""
    fields = _ENTRY.unpack_from(index, at)
    mark, _, version, flags, method, _, _, crc, stored, length, names, extras, comment = fields[:13]
    if mark != b"PK\1\2":
        raise ValueError("the index is damaged")
    after = at + _ENTRY.size + names
    name, extra = index[after - names : after], index[after : after + extras]
    wide = iter(_wide_values(extra))
    length, stored, header = (
        next(wide) if value == _MOST32 else value for value in (length, stored, fields[-1])
    )
    entry = ZipEntry(name, version, flags, method, crc, stored, length, header)
    return entry, after + extras + comment


def _wide_values(extra: bytes) -> Iterator[int]:
    """Yield the 64-bit numbers of an entry's extra field (kind 1); raise if too few are there."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            yield from struct.unpack_from(f"<{size // 8}Q", extra, at + 4)
        at += 4 + size
    raise ValueError("the index is damaged")
