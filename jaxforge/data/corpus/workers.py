"""Pools of processes that encode text, and that run units of work.

    this process                                              worker
    submit ─► thread ─► take an idle worker ─► send ──pipe──► recv, limit the time, encode
              thread ◄─ put the worker back ◄─ recv ◄──pipe── send

Each worker has one pipe, and each pipe carries one request at a time: the thread that took the
worker from the idle queue is the only one that uses the pipe until it puts the worker back.

    units ─► `run_in_processes` ─► results as they are finished, in any order

The number of processes decides only where and when a unit is prepared, not its bytes.
"""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Generic, NamedTuple, Self, TypeVar

import numpy as np
from jaxtyping import Int

from jaxforge.data.corpus.untrusted_tokenizer import limit_time
from jaxforge.errors import FAILING_STORAGE, StorageError, UserError

Text = tuple[str, str, bool, bool]
"""Split and text of a part of a document; True if the part begins, and if it ends, the document."""

Tokens = dict[str, Int[np.ndarray, "_"]]
"""Tokens of a batch by split: each document with BOS, if any, and EOS; or conversation entries."""

_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer")
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class News(NamedTuple):
    """Message of a worker before its answer.

    Attributes:
        content: arguments of the function that receives the messages.
    """

    content: tuple[int, ...]


class Encoded(NamedTuple):
    """Tokens of a batch.

    Attributes:
        tokens: the tokens by split.
        lengths: the number of tokens of each text, by split.
    """

    tokens: Tokens
    lengths: dict[str, Int[np.ndarray, "texts"]]


Encode = Callable[[Sequence[Text]], Encoded]

_EXIT_SECONDS = 10.0  # in which a process whose pipe is closed must end
_SECONDS_PER_CHARACTER = 20e-6  # of CPU time; tokenizers take less than 2e-6


class Workers(Generic[_Request, _Answer]):
    """Pool of processes that answer requests, each with its own pipe.

    The processes of `concurrent.futures` share a pipe for results. It waits for ever if a process
    is killed while it writes there (seen with Python 3.11). Here each side sees the end of its pipe
    when the other process dies.

    Args:
        n: number of processes.
        function: called in each process with a connection and `args`; must be importable. It
            receives requests and sends answers, or a UserError, as `serve` does.
        args: further arguments of `function`.
        daemon: False for processes that start processes themselves.
    """

    def __init__(
        self, n: int, function: Callable[..., None], *args: object, daemon: bool = True
    ) -> None:
        context = get_context("spawn")  # a fork would copy locks that threads hold
        self._idle: SimpleQueue[tuple[Connection, BaseProcess]] = SimpleQueue()
        self._processes, self._threads = [], ThreadPoolExecutor(n)
        # As many threads as workers: a thread that runs a request always finds an idle worker.
        for _ in range(n):
            parent_end, child_end = context.Pipe()
            process = context.Process(target=function, args=(child_end, *args), daemon=daemon)
            process.start()
            child_end.close()  # else `recv` would not see the end of the pipe when the worker dies
            self._processes.append(process)
            self._idle.put((parent_end, process))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # In this order: a thread that waits in `recv` ends only when its worker does.
        for process in self._processes:
            process.terminate()
        self._threads.shutdown(cancel_futures=True)

    def submit(
        self, request: _Request, show: Callable[..., None] = lambda *_: None
    ) -> Future[_Answer]:
        """Send a request to a worker; `show` receives its `News`."""
        return self._threads.submit(self._ask, request, show)

    def _ask(self, request: _Request, show: Callable[..., None]) -> _Answer:
        connection, process = worker = self._idle.get()
        try:
            connection.send(request)
            answer: _Answer | UserError | StorageError | News = connection.recv()
            while isinstance(answer, News):
                show(*answer.content)
                answer = connection.recv()
        except (EOFError, OSError) as error:  # OSError: the worker died within a message
            raise UserError(_reason(process)) from error
        finally:
            # A dead worker is put back, too: the next request then fails instead of waiting.
            self._idle.put(worker)
        if isinstance(answer, UserError | StorageError):
            raise answer
        return answer


def _reason(process: BaseProcess) -> str:
    """Return the reason why a worker ended, for a message."""
    # The end of the pipe may be seen before the exit code.
    process.join(_EXIT_SECONDS)
    if process.exitcode == -signal.SIGPROF:
        return (
            "the tokenizer takes more than ten times as long for a text as others do: correct "
            "the patterns in its tokenizer.json, or use another"
        )
    return (
        "a worker process ended early; if it left no message, it was killed, perhaps for want of "
        "memory: try fewer --workers"
    )


def serve(connection: Connection, encode: Encode) -> None:
    """Encode batches, each in a limited time, until the connection is closed."""
    # By default the signal ends the process; a Python handler would wait for the Rust code.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    serve_requests(connection, partial(_encode_in_time, encode))


def serve_requests(connection: Connection, function: Callable[[_Request], _Answer]) -> None:
    """Answer requests with the results of a function until the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    with suppress(EOFError, ConnectionError):
        while True:
            connection.send(answer(function, connection.recv()))


def answer(
    function: Callable[[_Request], _Answer], request: _Request
) -> _Answer | UserError | StorageError:
    """Return the function's result, or the error that the process which asked has to raise."""
    try:
        return function(request)
    except (UserError, StorageError) as error:
        return error
    except OSError as error:
        # Any other error is a fault of the program: the worker ends with its traceback.
        if error.errno not in FAILING_STORAGE:
            raise
        return StorageError(error.errno, error.strerror, error.filename)


def _encode_in_time(encode: Encode, texts: Sequence[Text]) -> Encoded:
    limit_time(sum(len(text) for _, text, *_ in texts), _SECONDS_PER_CHARACTER)
    try:
        return encode(texts)
    finally:
        limit_time(None)


Show = Callable[[int, int, int, int], None]
"""Receives a unit's number, and its documents, tokens and bytes of text so far; any thread."""


def ignore_news(*_: int) -> None:
    """Ignore the progress within an item (a `Show`)."""


def run_in_processes(
    workers: int, function: Callable[[_Item, Show], _Result], items: Sequence[_Item], show: Show
) -> Iterator[_Result]:
    """Yield `function(item, show)` of each item, in any order.

    Args:
        workers: number of processes, each with one item at a time. With one, and for a single
            item, this process does the work.
        function: a picklable function.
        items: picklable arguments.
        show: called with the progress within items.

    Raises:
        UserError: the function raises one, or a process ends.
        StorageError: the function raises one.
    """
    n = min(workers, len(items))
    if n <= 1:
        for item in items:
            yield function(item, show)
        return
    # Not daemons, because they may start encoding processes themselves.
    with Workers[_Item, _Result](n, serve_items, function, daemon=False) as pool:
        # In the order of completion: a slow unit does not hold back the display of later ones.
        for future in as_completed(pool.submit(item, show) for item in items):
            yield future.result()


def serve_items(connection: Connection, function: Callable[[_Item, Show], _Result]) -> None:
    """Answer requests of `run_in_processes` until the connection is closed (child process)."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    # If the parent was killed, sending news raises, and this process ends within a batch.
    serve_requests(connection, partial(_call, function, partial(_send_news, connection)))


def _call(function: Callable[[_Item, Show], _Result], show: Show, item: _Item) -> _Result:
    return function(item, show)


def _send_news(connection: Connection, *content: int) -> None:
    connection.send(News(content))
