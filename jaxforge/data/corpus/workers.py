"""Processes that encode text."""

import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Self

import numpy as np
from jaxtyping import Int

from jaxforge.data.corpus.untrusted_tokenizer import limit_time
from jaxforge.errors import UserError

Text = tuple[str, str, bool, bool]
"""Split and text of a piece, and whether it begins and ends its document."""

Tokens = dict[str, Int[np.ndarray, "_"]]
"""The tokens of a batch by split: documents after BOS, if any, and before EOS; or entries."""

Encode = Callable[[Sequence[Text]], Tokens]

_PATIENCE = 10.0  # seconds that a process whose pipe is closed has to end
_SECONDS_PER_CHARACTER = 20e-6  # of the processor: tokenizers take less than 2e-6


class Workers:
    """Processes that encode, each with a pipe and a thread of its own.

    `concurrent.futures` has its processes share a pipe for results, and waits for ever if one is
    killed while it writes there (seen with Python 3.11). Here both sides see the end of their pipe:
    when a worker dies, and when this process does.

    Args:
        n: how many.
        work: what they do: a function of a module, of a connection and `args`, that calls `serve`.
        args: of `work`.
    """

    def __init__(self, n: int, function: Callable[..., None], *args: object) -> None:
        context = get_context("spawn")  # a fork would take threads' locks along
        self._idle: SimpleQueue[tuple[Connection, BaseProcess]] = SimpleQueue()
        self._processes, self._threads = [], ThreadPoolExecutor(n)
        for _ in range(n):
            ours, theirs = context.Pipe()
            process = context.Process(target=function, args=(theirs, *args), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._idle.put((ours, process))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
        self._threads.shutdown(cancel_futures=True)

    def submit(self, texts: Sequence[Text]) -> Future[Tokens]:
        """Have a worker `encode`."""
        return self._threads.submit(self._encode, texts)

    def _encode(self, texts: Sequence[Text]) -> Tokens:
        connection, process = worker = self._idle.get()
        try:
            connection.send(texts)
            answer: Tokens | UserError = connection.recv()
        except (EOFError, OSError) as error:  # OSError: the end came within a message
            raise UserError(_reason(process)) from error
        finally:
            self._idle.put(worker)
        if isinstance(answer, UserError):
            raise answer
        return answer


def _reason(process: BaseProcess) -> str:
    """Return why a worker has ended."""
    process.join(_PATIENCE)
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
    """Encode what arrives, each batch in a limited time, until the other side is gone: a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with suppress(EOFError, ConnectionError):
        while True:
            connection.send(_answer(encode, connection.recv()))


def _answer(encode: Encode, texts: Sequence[Text]) -> Tokens | UserError:
    limit_time(sum(len(text) for _, text, *_ in texts), _SECONDS_PER_CHARACTER)
    try:
        return encode(texts)
    except UserError as error:
        return error
    finally:
        limit_time(None)
