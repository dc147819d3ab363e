"""The index of a stored zip file, and the records that it names: no more than `torch.save` writes.

Format: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT. What the index says of a
record, the record's own header must say too.
"""

import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxforge.errors import UserError
from torch_compat.formats import limits
from torch_compat.formats.files import Bytes

_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_MOST32 = 2**32 - 1


class ZipEntry(NamedTuple):
    """A record, as the index has it.

    Attributes:
        name: its name.
        version: of the format that it needs.
        flags: of the format; 1 is encryption, 8 leaves sizes out of the record's own header.
        method: of compression.
        crc: CRC-32 of its bytes; 0 where torch was told to compute none.
        stored: bytes in the file.
        length: bytes when unpacked.
        header: byte of the archive at which its own header begins.
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
        ValueError: there is no index, it is damaged, or it is too large.
        struct.error: it is cut off.
    """
    start, length, count = _find_index(archive)
    if length > limits.ENTRIES or count > length // _ENTRY.size:
        raise ValueError(f"an index of {count} records in {length} bytes")
    index = archive(start, length).tobytes()
    at = 0
    for _ in range(count):
        entry, at = _entry(index, at)
        yield entry
    if at != length:
        raise ValueError("more in its index than records")


def data_start(archive: Bytes, entry: ZipEntry) -> int:
    """The byte of the archive at which the data of a record begin.

    Raises:
        ValueError: its own header says otherwise than the index, or it is cut off.
    """
    if entry.header + _LOCAL.size + len(entry.name) > archive.size:
        raise ValueError("the index is damaged")
    fields = archive(entry.header, _LOCAL.size + len(entry.name)).tobytes()
    mark, *about, _, _, crc, stored, length, names, extra = _LOCAL.unpack_from(fields)
    _, flags, _ = about
    same = (mark, about, fields[_LOCAL.size :], names) == (
        b"PK\3\4", list(entry[1:4]), entry.name, len(entry.name)
    )  # fmt: skip
    if flags & 8 and not crc and not stored and not length:  # as torch writes them
        crc, stored, length = entry.crc, entry.stored, entry.length
    sizes = {stored, length} <= {entry.length, _MOST32}
    if not same or crc != entry.crc or not sizes:
        raise ValueError("its header is damaged, or another record's")
    start = entry.header + _LOCAL.size + names + extra
    if start + entry.length > archive.size:
        raise ValueError("it is truncated")
    return start


class FileRange:
    """A part of a file as a file of its own.

    Args:
        file: the file.
        start: where the part begins.
        size: its bytes.
    """

    def __init__(self, file: Bytes, start: int, size: int) -> None:
        self._file, self._start, self.size = file, start, size

    def __call__(self, start: int, length: int) -> np.ndarray:
        """Bytes of it."""
        return self._file(self._start + start, length)


class ChecksummedRecord(FileRange):
    """A record that is read whole each time, for its checksum.

    Args:
        part: its bytes.
        crc: CRC-32 of them.
        where: what it is, for messages.
    """

    def __init__(self, part: Bytes, crc: int, where: str) -> None:
        super().__init__(part, 0, part.size)
        self._crc, self._where = crc, where

    def __call__(self, start: int, length: int) -> np.ndarray:
        """Bytes of it.

        Raises:
            UserError: the record is not what was written.
        """
        data = super().__call__(0, self.size)
        if zlib.crc32(data.data) != self._crc:
            raise UserError(f"{self._where}: its checksum is another one: the file is damaged")
        return data[start : start + length]


def _find_index(archive: Bytes) -> tuple[int, int, int]:
    """Start and length of the index, and how many records it names."""
    tail = min(archive.size, _END.size + _LOCATOR.size)
    data = archive(archive.size - tail, tail).tobytes()
    if data[-_END.size :][:4] != b"PK\5\6":
        raise ValueError("no end record")
    *_, count, length, start, _ = _END.unpack(data[-_END.size :])
    end = archive.size - _END.size
    if data.startswith(b"PK\6\7"):
        _, _, at, _ = _LOCATOR.unpack_from(data)
        if not 0 <= at <= archive.size - _END64.size:
            raise ValueError("its end lies elsewhere")
        mark, *_, count, length, start = _END64.unpack(archive(at, _END64.size).tobytes())
        if mark != b"PK\6\6":
            raise ValueError("no end record")
        end = at
    if start + length != end:
        raise ValueError("its index lies elsewhere")
    return start, length, count


def _entry(index: bytes, at: int) -> tuple[ZipEntry, int]:
    """One entry, and where the next begins."""
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
    """Yield the 64-bit numbers of an entry's extra field."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            yield from struct.unpack_from(f"<{size // 8}Q", extra, at + 4)
        at += 4 + size
    raise ValueError("the index is damaged")
