"""Requests in the background with one policy of retries, and their counts.

Every request runs in one thread with an event loop. A failed request is repeated with exponential
backoff until its patience ends; a refusal (4xx) is an error at once. A service that has never
answered this process nor accepted a connection gets less patience: its address may be wrong.
"""

import asyncio
import atexit
import contextlib
import os
import random
import re
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from jaxforge.errors import StorageError, UserError

PATIENCE_SEC = 90.0
"""Seconds until a request that keeps failing is an error."""
DATA_PATIENCE_SEC = 300.0
"""The same for reads of data: a job that waits loses less than a job that ends."""
CONNECT_SEC = 10.0
"""Seconds until an attempt that finds no connection has failed."""
REQUEST_SEC = (30.0, 60.0, 120.0)
"""Seconds until each attempt is repeated; later ones are longer in case the network is slow."""

_FIRST_PATIENCE_SEC = 20.0  # for a service that may not exist
_DELAY_SEC, _LARGEST_DELAY_SEC = 0.1, 10.0  # between attempts
_SLOWEST = 1e6  # bytes per second of a transfer that is still worth waiting for
_PASSING = (408, 425, 429)  # the only refusals that a repetition may change
_T = TypeVar("_T")


class RefusedError(UserError):
    """A refusal that a repetition cannot change, for example for lack of permission."""


class Traffic(NamedTuple):
    """Counts since the process started.

    Attributes:
        requests: range requests for data.
        bytes_fetched: bytes of their answers.
        retries: repeated requests, also those for other files than data.
        hits: blocks found in the cache.
        misses: blocks looked up in the cache and then fetched.
    """

    requests: int = 0
    bytes_fetched: int = 0
    retries: int = 0
    hits: int = 0
    misses: int = 0

    @property
    def reads(self) -> int:
        """Reads of data of buckets, from the cache or not."""
        return self.requests + self.hits

    def since(self, before: "Traffic") -> dict[str, float]:
        """Return `bucket/*` of the interval since an earlier count."""
        requests, fetched, retries, hits, misses = (
            now - then for now, then in zip(self, before, strict=True)
        )
        metrics = {
            "bucket/requests": float(requests),
            "bucket/bytes_fetched": float(fetched),
            "bucket/retries": float(retries),
        }
        looked_up = hits + misses
        return metrics | ({"bucket/cache_hit_rate": hits / looked_up} if looked_up else {})


_counting = threading.Lock()
_counts = Traffic()


def count(**amounts: int) -> None:
    """Add to the counts of the named fields."""
    global _counts
    with _counting:
        _counts = _counts._replace(
            **{name: getattr(_counts, name) + amount for name, amount in amounts.items()}
        )


def traffic() -> Traffic:
    """Return the counts."""
    return _counts


def submit(request: Coroutine[Any, Any, _T]) -> Future[_T]:
    """Start a request in the background."""
    return asyncio.run_coroutine_threadsafe(request, _loop())


def wait(request: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of a request."""
    return submit(request).result()


async def attempts(
    url: str | os.PathLike,
    request: Callable[[], Coroutine[Any, Any, _T]],
    what: str,
    patience: float | None = None,
    limit: Callable[[], contextlib.AbstractAsyncContextManager] = contextlib.nullcontext,
    size: int = 0,
) -> _T:
    """Return the result of a request, which is repeated until it succeeds or patience ends.

    Args:
        url: the file or directory.
        request: starts one attempt.
        what: the result, for messages.
        patience: seconds for all attempts; by default `PATIENCE_SEC`.
        limit: limits how many requests run at a time.
        size: bytes to transfer; a large transfer gets more time.
    """
    url = os.fspath(url)
    patience = PATIENCE_SEC if patience is None else patience
    async with limit():
        delay, attempt, spent = _DELAY_SEC, 0, 0.0
        while True:
            seconds, begun = REQUEST_SEC[min(attempt, len(REQUEST_SEC) - 1)], time.monotonic()
            attempt += 1
            try:
                result = await asyncio.wait_for(request(), seconds + size / _SLOWEST)
            except TimeoutError:
                reason, status = f"no answer within {seconds:g} s", None
            except FileNotFoundError as error:
                _answered.add(_host(url))
                raise FileNotFoundError(2, "no such file", url) from error
            except RefusedError as error:
                raise RefusedError(f"{url}: {error}") from error
            except UserError:
                raise
            except Exception as error:  # of several clients, without a common class
                reason, status = _gist(error), _status(error)
                if status and 400 <= status < 500 and status not in _PASSING:
                    raise RefusedError(f"{url}: {reason}") from error
                if type(error) is ValueError:  # obstore's: no object can have such a key
                    raise UserError(f"{url}: {reason}") from error
            else:
                _answered.add(_host(url))
                return result
            # A long attempt had a connection: the address is right, and the service slow.
            if status or time.monotonic() - begun > 2 * CONNECT_SEC:
                _answered.add(_host(url))
            # A long transfer that breaks costs no more patience than a request without an answer.
            spent += min(time.monotonic() - begun, seconds)
            is_known = _host(url) in _answered
            if spent + delay > (patience if is_known else min(patience, _FIRST_PATIENCE_SEC)):
                raise _failure(url, what, reason, attempt, spent, is_known=is_known)
            count(retries=1)
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))
            spent += delay
            delay = min(2 * delay, _LARGEST_DELAY_SEC)


def _failure(
    url: str, what: str, reason: str, attempts: int, seconds: float, *, is_known: bool
) -> StorageError:
    if is_known:
        return StorageError(
            f"{url}: {what} failed, attempts: {attempts}, in {seconds:.0f} s ({reason}). Check "
            "bucket and network, then run the same command to resume"
        )
    return StorageError(
        f"{url}: {_host(url)} cannot be reached: {reason}. Correct the URL or the endpoint "
        "(AWS_ENDPOINT_URL, TENSORSTORE_GCS_HTTP_URL), or check network and credentials"
    )


_answered: set[str] = set()  # services that have answered this process, or accepted a connection


def _host(url: str) -> str:
    return endpoint(url.partition("://")[0]) or "/".join(url.split("/")[:3])


def _status(error: Exception) -> int | None:
    """Return the HTTP status of an answer, from obstore's text or huggingface_hub's attribute."""
    response = getattr(error, "response", None)
    if response is not None:
        return getattr(response, "status_code", None)
    # obstore's errors have no attribute for it.
    match = re.search(r"status code: (\d{3})", str(error).partition("\n\nDebug")[0])
    return int(match[1]) if match else None


def _gist(error: Exception) -> str:
    """Return the answer of the service, or the error of the system, from a client's message."""
    text, _, details = str(error).partition("\n\nDebug source:")
    if answer := re.search(r"status code: (\d{3} [\w -]+)(.*)", text, re.DOTALL):
        message = re.search(r"<Message>(.*?)</Message>", answer[2], re.DOTALL)
        return answer[1].strip() + (f": {message[1].strip()}" if message else "")
    cause = re.findall(r'(?:message|error): "([^"]+)"', details)
    first = text.partition("\n")[0].rpartition(" - ")[2]
    return cause[-1] if cause else first or type(error).__name__


_starting = threading.Lock()
_running: asyncio.AbstractEventLoop | None = None


def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all requests, in a thread of its own."""
    global _running
    with _starting:
        if _running is None:
            # One loop for all threads: connections are reused, and waiting threads hold no lock.
            _running = asyncio.new_event_loop()
            thread = threading.Thread(target=_running.run_forever, name="files", daemon=True)
            thread.start()
            atexit.register(_stop, _running, thread)
        return _running


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Cancel all requests: obstore's threads must not call Python while it shuts down."""

    def cancel() -> None:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.call_later(0.1, loop.stop)

    loop.call_soon_threadsafe(cancel)
    thread.join(5.0)


def endpoint(scheme: str) -> str:
    """Return the endpoint that the environment selects instead of the cloud's; "" if none."""
    names = {
        "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
        "gs": ("TENSORSTORE_GCS_HTTP_URL",),
    }.get(scheme, ())
    return next(filter(None, map(os.environ.get, names)), "").rstrip("/")
