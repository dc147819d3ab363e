"""Execution of units of work, in processes of this machine or by another engine.

    units ─► engine ─► results as they are finished, in any order

An engine decides only where and when a unit is prepared. The bytes that it writes do not depend on
the engine, on the number of workers or on the order.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection
from typing import Protocol, TypeVar

from jaxforge.data.corpus.workers import News, Workers, serve_requests

Item = TypeVar("Item")
Result = TypeVar("Result")

Show = Callable[[int, int, int, int], None]
"""Receives a unit's number, and its documents, tokens and bytes of text so far; any thread."""


class Engine(Protocol):
    """Interface of engines."""

    def encoders(self, n_items: int) -> int:
        """Return the number of encoding processes of each of `n_items` units."""
        ...

    def run(
        self, function: Callable[[Item, Show], Result], items: Sequence[Item], show: Show
    ) -> Iterator[tuple[int, Result]]:
        """Yield the index and the result of `function(item, show)` of each item, in any order.

        Args:
            function: a picklable function, which may be repeated.
            items: picklable arguments.
            show: may be called with the progress within items.

        Raises:
            UserError: the function raises one, or processes are lost.
            StorageError: the function raises one, perhaps again and again.
        """
        ...


def ignore_news(*_: int) -> None:
    """Ignore the progress within an item (a `Show`)."""


def in_order(
    engine: Engine, function: Callable[[Item, Show], Result], items: Sequence[Item]
) -> list[Result]:
    """Return the results of all items, in their order."""
    results = dict(engine.run(function, items, ignore_news))
    return [results[i] for i in range(len(items))]


@dataclass(frozen=True)
class Local:
    """Processes of this machine; with one, and for a single item, this process.

    Attributes:
        workers: number of processes.
    """

    workers: int

    def encoders(self, n_items: int) -> int:
        """Return an equal share of the workers for each item at a time."""
        return self.workers // max(1, min(self.workers, n_items))

    def run(
        self, function: Callable[[Item, Show], Result], items: Sequence[Item], show: Show
    ) -> Iterator[tuple[int, Result]]:
        """See `Engine`; each process has one item at a time."""
        n = min(self.workers, len(items))
        if n <= 1:
            for i, item in enumerate(items):
                yield i, function(item, show)
            return
        # Not daemons, because they may start encoding processes themselves.
        with Workers[Item, Result](n, serve_items, function, daemon=False) as pool:
            remaining = iter(enumerate(items))
            waiting: dict[Future[Result], int] = {}
            while True:
                for i, item in islice(remaining, n - len(waiting)):
                    waiting[pool.submit(item, show)] = i
                if not waiting:
                    return
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    yield waiting.pop(future), future.result()


def serve_items(connection: Connection, function: Callable[[Item, Show], Result]) -> None:
    """Answer requests of `Local.run` until the connection is closed (child process)."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    # If the parent was killed, sending news raises, and this process ends within a batch.
    serve_requests(connection, partial(_call, function, partial(_send_news, connection)))


def _call(function: Callable[[Item, Show], Result], show: Show, item: Item) -> Result:
    return function(item, show)


def _send_news(connection: Connection, *content: int) -> None:
    connection.send(News(content))
