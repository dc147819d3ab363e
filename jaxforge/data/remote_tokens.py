"""Tokens of a file in a bucket, read in ranges."""

import functools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorstore as ts

from jaxforge.data.block_hashes import BlockHashes
from jaxforge.errors import StorageError
from jaxforge.storage import buckets


class RemoteTokens:
    """Array-like of the tokens in a file. A slice starts a request in the background.

    Args:
        url: URL of the file.
        dtype: type of the tokens.
        offset: bytes before the first token.
        hashes: block hashes of the file. If given, whole blocks are read and verified each time.
    """

    def __init__(
        self,
        url: os.PathLike,
        dtype: np.dtype,
        offset: int,
        hashes: BlockHashes | None = None,
    ) -> None:
        self._url, self._dtype, self._offset = url, dtype, offset
        self._hashes = hashes
        self._store = buckets.open_store(url)

    def __getitem__(self, span: slice) -> "_PendingTokens":
        size, hashes = self._dtype.itemsize, self._hashes
        start, stop = span.start, span.stop
        if hashes:
            start, stop = hashes.around(start, stop)
        first, end = (self._offset + size * n for n in (start, stop))
        future = self._store.read("", byte_range=slice(first, end))
        check = functools.partial(hashes.check_from, first=start) if hashes else None
        wanted = slice(span.start - start, span.stop - start)
        return _PendingTokens(future, self._dtype, os.fspath(self._url), wanted, check)


class _PendingTokens:
    """Pending request of tokens; conversion to an array waits for the response."""

    def __init__(
        self,
        future: ts.Future,
        dtype: np.dtype,
        url: str,
        wanted: slice,
        check: Callable[[np.ndarray], None] | None,
    ) -> None:
        self._future, self._dtype, self._url = future, dtype, url
        self._wanted, self._check = wanted, check

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:  # noqa: ANN401
        try:
            data = self._future.result()
        except ValueError as error:
            raise StorageError(
                f"{self._url} was whole when the run started and cannot be read now "
                f"({buckets.gist(error)}); put that right, then run the same command to resume"
            ) from error
        if data.state != "value":
            raise StorageError(
                f"{self._url} is gone since the run started; bring it back, then run the same "
                "command to go on"
            )
        tokens = np.frombuffer(data.value, self._dtype)
        if self._check:
            self._check(tokens)
        tokens = tokens[self._wanted]
        return tokens if dtype is None else tokens.astype(dtype)
