"""Tokens of a file in a bucket, read in blocks.

A file is divided into blocks of 64 KiB from its first token on, the same blocks that `prepare`
hashes (`manifest.BlockHashes`). The blocks of a request are searched for in this order:

    in flight    another batch of this process has requested the block: wait for the same request
    cache        `data.cache_dir`, shared by the processes of the host
    bucket       blocks that are near each other share one request

Fetched blocks are compared with their hashes before they are used and cached.
"""

import functools
import hashlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxforge.data.corpus.manifest import BLOCK_BYTES, BlockHashes
from jaxforge.errors import StorageError
from jaxforge.storage import files
from jaxforge.storage.block_cache import KEY_BYTES, BlockCache
from jaxforge.storage.requests import RefusedError, count

GAP = 2
"""Blocks between two blocks that still share a request: reading them costs less than a request."""
LONGEST = 64
"""Most blocks of a request, so that long ranges arrive in parallel and before their deadline."""


_Block = Callable[[], memoryview]
"""Returns the bytes of a block, and waits for them if necessary."""


class RemoteTokens:
    """Array-like of the tokens in a file. A slice starts requests in the background.

    Args:
        url: URL of the file.
        dtype: type of the tokens.
        offset: bytes before the first token.
        tokens: number of tokens.
        hashes: block hashes of the file.
        cache: cache of blocks.
    """

    def __init__(
        self,
        url: os.PathLike,
        dtype: np.dtype,
        offset: int,
        tokens: int,
        hashes: BlockHashes | None = None,
        cache: BlockCache | None = None,
    ) -> None:
        self._url, self._dtype, self._offset, self._end = os.fspath(url), dtype, offset, tokens
        self._hashes, self._cache = hashes, cache
        self._per_block = BLOCK_BYTES // dtype.itemsize  # tokens

    def __getitem__(self, span: slice) -> "PendingTokens":
        return self.read([(span.start, span.stop)])[0]

    def read(self, ranges: Sequence[tuple[int, int]]) -> "list[PendingTokens]":
        """Start to read ranges of tokens, with as few requests as possible.

        Args:
            ranges: first token and token after the last of each range.
        """
        numbers = [range(start // self._per_block, -(-end // self._per_block))
                   for start, end in ranges]  # fmt: skip
        blocks = self._find(sorted(set().union(*numbers)))
        return [
            PendingTokens(
                [blocks[number] for number in of_range], self._dtype,
                start - of_range.start * self._per_block, end - start,
            )
            for of_range, (start, end) in zip(numbers, ranges, strict=True)
        ]  # fmt: skip

    def _find(self, numbers: Sequence[int]) -> dict[int, _Block]:
        hits = 0
        blocks = self._requested(numbers)
        # The cache is read before the lock is taken, as its disk may be slow.
        for number in numbers:
            if number not in blocks and (data := self._cached(number)) is not None:
                blocks[number] = functools.partial(_view, data)
                hits += 1
        with _lock:  # so that two batches do not request the same block
            # Again: another batch may have sent requests in the meantime.
            blocks = self._requested(numbers) | blocks
            missing = [number for number in numbers if number not in blocks]
            for run in _runs(missing):
                fetch = self._fetch(run)
                for number in run:
                    _in_flight[self._extent(number)] = fetch
                    # A run includes the gaps between its blocks, and these may be cached.
                    blocks.setdefault(number, functools.partial(fetch.block, number))
        if self._cache:
            count(hits=hits, misses=len(missing))
        return blocks

    def _requested(self, numbers: Sequence[int]) -> dict[int, _Block]:
        """Return the blocks in flight."""
        fetches = ((number, _in_flight.get(self._extent(number))) for number in numbers)
        return {
            number: functools.partial(fetch.block, number)
            for number, fetch in fetches
            # A request that failed for one batch is repeated for the next.
            if fetch is not None and not fetch.has_failed
        }

    def _extent(self, block: int) -> tuple[str, int, int]:
        """Return URL, first byte and byte after the last of a block."""
        return self._url, *self._bytes(block)

    def _fetch(self, blocks: range) -> "_Fetch":
        check = functools.partial(self._check, blocks)
        first, end = self._bytes(blocks.start)[0], self._bytes(blocks.stop - 1)[1]
        store = functools.partial(self._store, blocks) if self._cache else None
        return _Fetch(self._url, first, end, check, blocks.start, store)

    def _bytes(self, block: int) -> tuple[int, int]:
        """Return the first byte of a block in the file, and the byte after its last."""
        size = self._dtype.itemsize
        end = min((block + 1) * self._per_block, self._end)
        return self._offset + block * BLOCK_BYTES, self._offset + end * size

    def _check(self, blocks: range, data: bytes) -> None:
        if self._hashes:
            tokens = np.frombuffer(data, self._dtype)
            self._hashes.check_from(tokens, blocks.start * self._per_block)

    def _cached(self, block: int) -> bytes | None:
        if not self._cache:
            return None
        crc = self._hashes.of_block(block) if self._hashes else None
        data = self._cache.get(self._key(block), crc)
        first, end = self._bytes(block)
        return data if data is not None and len(data) == end - first else None

    def _store(self, blocks: range, data: bytes, version: str) -> None:
        assert self._cache
        if not self._hashes and version != _version(self._url):
            return  # replaced since the run started: not the version of the keys
        for i, block in enumerate(blocks):
            self._cache.put(self._key(block), data[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES])

    def _key(self, block: int) -> bytes:
        """Return the key of a block in the cache, which changes with its content."""
        version = self._hashes.of_block(block) if self._hashes else _version(self._url)
        parts = *self._extent(block), version
        return hashlib.blake2b(repr(parts).encode(), digest_size=KEY_BYTES).digest()


class PendingTokens:
    """Tokens that may still be on their way; conversion to an array waits for them.

    Args:
        blocks: the blocks that hold the tokens.
        dtype: type of the tokens.
        start: index of the first token in the first block.
        length: number of tokens.
    """

    def __init__(self, blocks: Sequence[_Block], dtype: np.dtype, start: int, length: int) -> None:
        self._blocks, self._dtype, self._tokens_in_blocks = (
            blocks,
            dtype,
            slice(start, start + length),
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:  # noqa: ANN401
        parts = [np.frombuffer(block(), self._dtype) for block in self._blocks]
        # A window within a single block is not copied.
        tokens: Int[np.ndarray, "_"] = parts[0] if len(parts) == 1 else np.concatenate(parts)
        tokens = tokens[self._tokens_in_blocks]
        return tokens if dtype is None else tokens.astype(dtype)


class _Fetch:
    """A request of consecutive blocks, which the constructor starts.

    Args:
        url: URL of the file.
        first_byte: first byte of the range.
        end_byte: byte after the last.
        check: raises UserError for damaged bytes.
        first: number of the first block.
        store: called once with the bytes and the version of the object; None without a cache.
    """

    def __init__(
        self,
        url: str,
        first_byte: int,
        end_byte: int,
        check: Callable[[bytes], None],
        first: int,
        store: Callable[[bytes, str], None] | None,
    ) -> None:
        self._url, self._first, self._store = url, first, store
        self._read = files.fetch(url, first_byte, end_byte, check)
        self._lock = threading.Lock()

    @property
    def has_failed(self) -> bool:
        """True if `block` raises."""
        return self._read.done() and self._read.exception() is not None

    def block(self, number: int) -> memoryview:
        """Wait for the bytes of a block.

        Raises:
            StorageError: they cannot be read.
            UserError: they are damaged.
        """
        try:
            data, version = self._read.result()
        except FileNotFoundError as error:
            raise StorageError(
                f"{self._url} is gone since the run started. Bring it back, then run the same "
                "command to resume"
            ) from error
        except RefusedError as error:  # the same file was readable when the run started
            raise StorageError(
                f"{error}: it was readable when the run started. Check permissions and the file, "
                "then run the same command to resume"
            ) from error
        with self._lock:
            # The first caller stores all blocks, and the others do not wait for the disk.
            store, self._store = self._store, None
        if store:
            store(data, version)
        at = (number - self._first) * BLOCK_BYTES
        return memoryview(data)[at : at + BLOCK_BYTES]


_lock = threading.Lock()
# A request is in flight as long as a batch needs its blocks.
_in_flight: weakref.WeakValueDictionary[tuple[str, int, int], _Fetch] = (
    weakref.WeakValueDictionary()  # by URL, first byte and end of a block
)


def _view(data: bytes) -> memoryview:
    return memoryview(data)


def _runs(blocks: Sequence[int]) -> Iterator[range]:
    """Yield ranges that contain the sorted blocks, with gaps of at most `GAP` other blocks."""
    start = end = -1
    for block in blocks:
        if start >= 0 and (block - end > GAP or block + 1 - start > LONGEST):
            yield range(start, end)
            start = -1
        start = block if start < 0 else start
        end = block + 1
    if start >= 0:
        yield range(start, end)


@functools.lru_cache(maxsize=1 << 16)
def _version(url: str) -> str:
    """Return the version of an object, which changes with its content."""
    return files.stat(url).version
