"""Execution of units of work: in processes of this machine, or by another engine.

    units ─► engine ─► finished parts, in any order ─► counts are folded, progress is shown

An engine decides only where and when a unit is prepared. The bytes that it writes do not depend on
the engine, on the number of workers or on the order.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection
from typing import Protocol

from jaxforge.data.corpus.parts import Fold, Part
from jaxforge.data.corpus.progress import Done
from jaxforge.data.corpus.unit_worker import Job, Show, intact_units, prepare_unit
from jaxforge.data.corpus.units import Unit
from jaxforge.data.corpus.workers import News, Workers, serve_requests

_DISPLAY_SECONDS = 0.5  # between two displays of the progress within units


class Engine(Protocol):
    """Function that prepares units.

    It yields the parts as they are finished. It may call `show` with the progress within units,
    from any thread.
    """

    def __call__(self, job: Job, units: Sequence[Unit], show: Show) -> Iterator[Part]:
        """Prepare units; raise what `prepare_unit` raises, or UserError if processes are lost."""
        ...


def run_units(
    job: Job,
    units: Sequence[Unit],
    engine: Engine,
    *,
    vocab_size: int,
    share: int = 0,
    show: Callable[[Done], None] = lambda _: None,
) -> None:
    """Prepare all units that are not finished.

    Args:
        job: see `Job`.
        units: the units of this process.
        engine: prepares them.
        vocab_size: number of tokens in the vocabulary.
        share: number of this process, if several share the units of a corpus.
        show: called with the progress.

    Raises:
        UserError: a unit fails.
        StorageError: the bucket of the output fails.
    """
    parts = job.parts
    fold = Fold(parts, share, (len(job.options.splits), vocab_size))
    numbers = {unit.number for unit in units}
    finished = intact_units(job, parts.finished() & numbers)
    for number in parts.with_counts() & finished:  # left by an interrupted process
        fold.add(number)
    progress = _Progress(units, finished, show)
    for part in engine(job, [u for u in units if u.number not in finished], progress.update):
        fold.add(part.unit)
        progress.finish(part)
    fold.save()


def local(job: Job, units: Sequence[Unit], show: Show, *, workers: int) -> Iterator[Part]:
    """Prepare units in processes of this machine; an `Engine` with `workers` bound.

    Each process prepares one unit at a time. If there are fewer units than workers, each of them
    has encoding processes of its own.
    """
    n = min(workers, len(units))
    if n <= 1:
        for unit in units:
            yield prepare_unit(job, unit, workers, show)
        return
    with Workers[Unit, Part](n, serve_units, job, workers // n, daemon=False) as pool:
        remaining = iter(units)
        waiting: set[Future[Part]] = set()
        while True:
            for unit in islice(remaining, n - len(waiting)):
                waiting.add(pool.submit(unit, show))
            if not waiting:
                return
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()


def serve_units(connection: Connection, job: Job, workers: int) -> None:
    """Prepare units until the connection is closed (child process)."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    # If the parent was killed, sending news raises, and this process ends within a batch.
    show = partial(_send_news, connection)

    def prepare(unit: Unit) -> Part:
        return prepare_unit(job, unit, workers, show)

    serve_requests(connection, prepare)


def _send_news(connection: Connection, *content: int) -> None:
    connection.send(News(content))


class _Progress:
    """Sum of the progress of all units.

    Args:
        units: the units.
        finished: numbers of the units that were finished before.
        show: receives the sum.
    """

    def __init__(
        self, units: Sequence[Unit], finished: Iterable[int], show: Callable[[Done], None]
    ) -> None:
        self._show, self._lock, self._displayed = show, threading.Lock(), 0.0
        self._weights = {unit.number: unit.weight for unit in units}
        self._files = {unit.number: unit.files for unit in units}
        self._total = sum(self._weights.values())
        self._running: dict[int, tuple[int, int, int]] = {}
        self._weight = self._n_files = self._documents = self._tokens = 0
        for number in finished:
            self._count(number)
        self._display()

    def update(self, unit: int, documents: int, tokens: int, size: int) -> None:
        """Record the progress within a unit, from any thread."""
        with self._lock:
            if unit in self._weights:
                # Compressed files have more text than bytes.
                self._running[unit] = documents, tokens, min(size, self._weights[unit])
            if time.monotonic() - self._displayed >= _DISPLAY_SECONDS:
                self._display()

    def finish(self, part: Part) -> None:
        """Record that a unit is finished."""
        with self._lock:
            self._running.pop(part.unit, None)
            self._documents += part.documents
            self._tokens += part.tokens
            self._count(part.unit)
            self._display()

    def _count(self, unit: int) -> None:
        self._weight += self._weights.pop(unit)
        self._n_files += self._files[unit]

    def _display(self) -> None:
        running = self._running.values()
        weight = self._weight + sum(size for _, _, size in running)
        self._displayed = time.monotonic()
        self._show(
            Done(
                files=self._n_files,
                fraction=weight / self._total if self._total else None,
                documents=self._documents + sum(documents for documents, _, _ in running),
                tokens=self._tokens + sum(tokens for _, tokens, _ in running),
            )
        )
