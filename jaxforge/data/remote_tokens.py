"""Tokens of a file in a bucket, read piece by piece."""

import os
from typing import Any

import numpy as np
import tensorstore as ts

from jaxforge import buckets
from jaxforge.errors import StorageError


class RemoteTokens:
    """Stands for the array of a file's tokens: a slice of it is asked for at once, in background.

    Args:
        place: of the file.
        dtype: of its tokens.
        offset: bytes before the first of them.
    """

    def __init__(self, place: os.PathLike, dtype: np.dtype, offset: int) -> None:
        self._place, self._dtype, self._offset = place, dtype, offset
        self._store = buckets.open_store(place)

    def __getitem__(self, piece: slice) -> "_Asked":
        size = self._dtype.itemsize
        first, end = (self._offset + size * n for n in (piece.start, piece.stop))
        future = self._store.read("", byte_range=slice(first, end))
        return _Asked(future, self._dtype, os.fspath(self._place))


class _Asked:
    """Tokens that are on their way; whoever makes an array of them waits."""

    def __init__(self, future: ts.Future, dtype: np.dtype, place: str) -> None:
        self._future, self._dtype, self._place = future, dtype, place

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:  # noqa: ANN401
        try:
            found = self._future.result()
        except ValueError as error:
            raise StorageError(
                f"{self._place} was whole when the run started and cannot be read now "
                f"({buckets.gist(error)}); put that right, then run the same command to go on"
            ) from error
        if found.state != "value":
            raise StorageError(
                f"{self._place} is gone since the run started; bring it back, then run the same "
                "command to go on"
            )
        tokens = np.frombuffer(found.value, self._dtype)
        return tokens if dtype is None else tokens.astype(dtype)
