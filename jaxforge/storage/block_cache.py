"""Cache of blocks on a local disk, of bounded size, shared by all processes of a host.

The cache is one file, organised like the cache of a processor: the key of a block selects a set of
`_SLOTS` slots, and a new block replaces the least recently used block of its set. So reading,
writing and eviction cost a few system calls each, whatever the size, and the file cannot grow:

    header (4 KiB) | records, 32 bytes for each slot | slots of `BLOCK_BYTES`

A record holds the key, CRC-32, length and last use of the block in its slot. Slots are written
without locks, because everything that can go wrong looks the same to a reader. A block that is torn
(by kill -9, a power failure or two writers of one slot) or damaged does not have the CRC-32 of its
record. It is dropped and counts as absent.

    <directory>/blocks-<user id>/lock    locked, shared, by each process with an open cache
    <directory>/blocks-<user id>/blocks  the file; replaced only under an exclusive lock
"""

import errno
import fcntl
import functools
import logging
import os
import struct
import time
import zlib
from pathlib import Path

from jaxforge.errors import UserError
from jaxforge.storage import safe_files

log = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 16
"""Largest block."""
KEY_BYTES = 16

_SLOTS = 16
_HEADER = struct.Struct("<8sQQ")  # magic, bytes of a block, number of sets
_HEADER_BYTES = 4096
_MAGIC = b"jxblock1"
_RECORD = struct.Struct("<16sIIQ")  # key, CRC-32, length (0: empty slot), last use in ns
_USE = struct.Struct("<Q")  # the last field of a record
_SET_BYTES = _SLOTS * (_RECORD.size + BLOCK_BYTES)
SMALLEST = _HEADER_BYTES + _SET_BYTES
"""Bytes of the smallest cache."""


@functools.cache
def shared_cache(directory: str, limit: int) -> "BlockCache":
    """Return the cache of this process in a directory; arguments as for `BlockCache`."""
    return BlockCache(Path(directory), limit)


class BlockCache:
    """Blocks of at most `BLOCK_BYTES`, by key. Thread-safe.

    Failures of the disk do not raise: there is one warning, and blocks are absent from then on.

    Args:
        directory: `data.cache_dir`.
        limit: maximum size in bytes. If other processes use the cache, its size stays as it is.

    Raises:
        UserError: the directory cannot be used, or the limit is below `SMALLEST`.
    """

    def __init__(self, directory: Path, limit: int) -> None:
        if limit < SMALLEST:
            raise UserError(
                f"data.cache_gb = {limit / 1e9:.3g}: a cache has at least {SMALLEST / 1e9:.3g} GB"
            )
        self._directory = directory / f"blocks-{os.getuid()}"
        self._file: int | None = None
        self._lock: int | None = None
        self._is_writable = True
        self._n_sets = 0
        try:
            safe_files.private_directory(self._directory)
        except OSError as error:
            raise UserError(
                f"data.cache_dir: {error.filename or self._directory}: {error.strerror}"
            ) from error
        try:
            self._open(max(1, (limit - _HEADER_BYTES) // _SET_BYTES))
        except OSError as error:
            self._fail(error)
            self.close()  # an exclusive lock would stop other processes

    @property
    def size(self) -> int:
        """Largest size of the file in bytes."""
        return _HEADER_BYTES + self._n_sets * _SET_BYTES

    def get(self, key: bytes, crc: int | None = None) -> bytes | None:
        """Return a block, or None if it is absent or damaged.

        Args:
            key: `KEY_BYTES` bytes.
            crc: CRC-32 that the block must have; None if it is not known.
        """
        if self._file is None:
            return None
        try:
            number = self._set_of(key)
            records = self._records(number)
            slot = self._find(records, key)
            if slot is None:
                return None
            # The length may be of another record than the bytes, if both were being written.
            _, stored_crc, length, _ = _RECORD.unpack_from(records, slot * _RECORD.size)
            data = os.pread(self._file, min(length, BLOCK_BYTES), self._position(number, slot))
            if len(data) == length and zlib.crc32(data) == stored_crc and crc in (None, stored_crc):
                self._touch(number, slot)
                return data
            self._write_record(number, slot, bytes(KEY_BYTES), 0, 0)
        except OSError as error:
            self._fail(error)
        return None

    def put(self, key: bytes, data: bytes) -> None:
        """Store a block in place of the least recently used one of its set."""
        if self._file is None or not self._is_writable:
            return
        assert len(key) == KEY_BYTES
        assert 0 < len(data) <= BLOCK_BYTES
        try:
            number = self._set_of(key)
            records = self._records(number)
            slot = self._find(records, key)
            if slot is None:
                uses = [use for *_, use in _RECORD.iter_unpack(records)]  # empty slots: 0
                slot = uses.index(min(uses))
            # The record last: a crash in between leaves the old record, whose CRC-32 does not match
            # the new bytes.
            self._write(data, self._position(number, slot))
            self._write_record(number, slot, key, zlib.crc32(data), len(data))
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        """Close the file; all blocks are absent from then on."""
        for descriptor in (self._file, self._lock):
            if descriptor is not None:
                os.close(descriptor)
        self._file = self._lock = None

    def __reduce__(self) -> tuple:
        return shared_cache, (str(self._directory.parent), self.size)

    def _open(self, n_sets: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._lock = os.open(self._directory / "lock", flags, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # other processes use the cache
            pass
        else:
            if self._stored_sets() != n_sets:
                self._create(n_sets)
        # Waits only for a process that creates the file.
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        self._n_sets = self._stored_sets()
        self._file = os.open(self._directory / "blocks", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        if self._n_sets != n_sets:
            log.warning(
                "data.cache_gb: other processes use %s, which stays at %.3g GB until they end",
                self._directory, self.size / 1e9,
            )  # fmt: skip

    def _stored_sets(self) -> int:
        """Return the number of sets of the file; 0 if it does not exist or is something else."""
        try:
            with (self._directory / "blocks").open("rb") as file:
                head = file.read(_HEADER.size)
        except FileNotFoundError:
            return 0
        if len(head) < _HEADER.size:
            return 0
        magic, block_bytes, n_sets = _HEADER.unpack(head)
        return n_sets if (magic, block_bytes) == (_MAGIC, BLOCK_BYTES) else 0

    def _create(self, n_sets: int) -> None:
        """Replace the file by an empty, sparse one."""
        for partial in self._directory.glob(".*.partial"):  # of killed processes
            partial.unlink(missing_ok=True)
        with safe_files.replacing(self._directory / "blocks") as file:
            file.write(_HEADER.pack(_MAGIC, BLOCK_BYTES, n_sets))
            file.truncate(_HEADER_BYTES + n_sets * _SET_BYTES)

    def _set_of(self, key: bytes) -> int:
        # Keys are hashes, so that sets fill evenly.
        return int.from_bytes(key[:8], "little") % self._n_sets

    def _records(self, number: int) -> bytes:
        """Return the records of a set."""
        assert self._file is not None
        size = _SLOTS * _RECORD.size
        return os.pread(self._file, size, _HEADER_BYTES + number * size).ljust(size, b"\0")

    def _find(self, records: bytes, key: bytes) -> int | None:
        at = records.find(key)
        while at % _RECORD.size and at >= 0:  # the key's bytes within another record
            at = records.find(key, at + 1)
        return at // _RECORD.size if at >= 0 else None

    def _position(self, number: int, slot: int) -> int:
        """Return the position of a slot's block in the file."""
        index_bytes = self._n_sets * _SLOTS * _RECORD.size
        return _HEADER_BYTES + index_bytes + (number * _SLOTS + slot) * BLOCK_BYTES

    def _write_record(self, number: int, slot: int, key: bytes, crc: int, length: int) -> None:
        """Write the record of a slot; it was used now, unless it is empty."""
        if self._is_writable:
            record = _RECORD.pack(key, crc, length, time.time_ns() if length else 0)
            self._write(record, _HEADER_BYTES + (number * _SLOTS + slot) * _RECORD.size)

    def _touch(self, number: int, slot: int) -> None:
        """Write the last use of a slot, and not its record, which another process may replace."""
        if self._is_writable:
            at = _HEADER_BYTES + (number * _SLOTS + slot + 1) * _RECORD.size - _USE.size
            self._write(_USE.pack(time.time_ns()), at)

    def _write(self, data: bytes, at: int) -> None:
        assert self._file is not None
        if os.pwrite(self._file, data, at) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _fail(self, error: OSError) -> None:
        """Warn once, and cache nothing more."""
        if self._is_writable:
            self._is_writable = False
            log.warning(
                "data.cache_dir: %s failed (%s); reading continues without caching more blocks",
                self._directory, error.strerror or error,
            )  # fmt: skip
