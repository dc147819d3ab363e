"""Reading of byte ranges of objects, with deadlines.

The client repeats failed requests by itself (`buckets`), but waits for ever for an answer that does
not come, and believes an answer that is too short or damaged. So each attempt has a deadline here,
and an answer is checked.
"""

import os
import threading
import time
from collections.abc import Callable

from jaxforge.errors import StorageError, UserError
from jaxforge.storage import buckets, traffic

DEADLINES = (30.0, 60.0, 120.0)
"""Seconds until each attempt is given up; later ones are longer in case the network is slow."""
_CONCURRENT = 64  # requests at a time: tensorstore's 32 carry only 320 per second at 100 ms
_BACKOFF = 0.25  # seconds before the second attempt, four times that before the third


class RangeRead:
    """A byte range of an object. The constructor starts the request. Thread-safe.

    Attributes:
        generation: version of the object; set with the result.

    Args:
        url: URL of the object.
        first: first byte.
        end: byte after the last.
        check: raises UserError if the bytes are damaged. Then they are fetched again, and the last
            error is raised.
    """

    def __init__(
        self,
        url: str | os.PathLike,
        first: int,
        end: int,
        check: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        self.url, self.first, self.end = os.fspath(url), first, end
        self._store, self._check = buckets.open_store(url, _CONCURRENT), check
        self.generation = ""
        self._lock = threading.Lock()
        self._data: bytes | None = None
        self._error: Exception | None = None
        self._start()

    @property
    def has_failed(self) -> bool:
        """True if `result` raises."""
        return self._error is not None

    def result(self) -> bytes:
        """Wait for the bytes.

        Raises:
            StorageError: the object is gone, or all attempts failed.
            UserError: the bytes of each attempt were damaged.
        """
        with self._lock:
            if self._error:
                raise self._error
            if self._data is None:
                try:
                    self._data = self._fetch()
                except Exception as error:
                    self._error = error
                    raise
            return self._data

    def _start(self) -> None:
        self._started = time.monotonic()
        self._future = self._store.read("", byte_range=slice(self.first, self.end))
        traffic.count(requests=1)

    def _fetch(self) -> bytes:
        begun = self._started
        for attempt, seconds in enumerate(DEADLINES, 1):
            is_last, damage = attempt == len(DEADLINES), None
            try:
                data = self._answer(seconds)
                damage = self._damage(data)
                if damage is None:
                    traffic.count(bytes_fetched=len(data))
                    return data
            except TimeoutError:
                self._future.cancel()
                reason = f"no answer within {seconds:g} s"
            except ValueError as error:
                reason = buckets.gist(error)
                is_last |= reason.startswith(buckets.ACCESS_ERRORS)
            if is_last:
                raise damage or self._failure(reason, attempt, time.monotonic() - begun)
            time.sleep(_BACKOFF * 4 ** (attempt - 1))
            traffic.count(retries=1)
            self._start()
        raise AssertionError("the last attempt returns or raises")

    def _damage(self, data: bytes) -> UserError | None:
        try:
            self._check(data)
        except UserError as error:
            return error
        return None

    def _answer(self, seconds: float) -> bytes:
        answer = self._future.result(timeout=max(0.0, self._started + seconds - time.monotonic()))
        if answer.state != "value":
            raise StorageError(
                f"{self.url} is gone since the run started; bring it back, then run the same "
                "command to resume"
            )
        if len(answer.value) != self.end - self.first:
            raise ValueError(
                f"{len(answer.value)} bytes arrived instead of {self.end - self.first}"
            )
        self.generation = answer.stamp.generation.hex()
        return answer.value

    def _failure(self, reason: str, attempts: int, seconds: float) -> StorageError:
        return StorageError(
            f"{self.url} was whole when the run started and cannot be read now: bytes "
            f"{self.first:,} to {self.end - 1:,} failed, attempts: {attempts}, in {seconds:.0f} s "
            f"({reason}). Check bucket and network, then run the same command to resume"
        )
