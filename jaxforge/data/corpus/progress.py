"""Progress display of `prepare`."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from jaxforge.data.corpus.inputs import Unit
from jaxforge.data.corpus.parts import Part

_LINE_SECONDS = 10.0  # between lines where there is no terminal
_DISPLAY_SECONDS = 0.5  # between two displays of the progress within units


class Done(NamedTuple):
    """Work that is done.

    Attributes:
        files: number of inputs that have been read.
        fraction: fraction of the bytes of all inputs; None if unknown.
        documents: number of documents.
        tokens: number of tokens.
    """

    files: int
    fraction: float | None
    documents: int
    tokens: int


@contextmanager
def progress_shown(files: int) -> Iterator[Callable[[Done], None]]:
    """Yield a function that shows progress in `files` inputs: a bar, or lines without a terminal.

    Rate and time left are those since the first call, because an earlier run may have done a part.
    """
    console, start = Console(stderr=True), time.monotonic()
    said, first = start, None
    columns = (BarColumn(20), TextColumn("{task.description}"))
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        bar = progress.add_task("", total=1.0)

        def show(done: Done) -> None:
            nonlocal said, first, start
            now = time.monotonic()
            first = first or done
            line = in_words(done, first, files, now - start)
            progress.update(bar, completed=done.fraction or 0.0, description=line)
            if not console.is_terminal and now - said >= _LINE_SECONDS:
                console.print(line, highlight=False, soft_wrap=True, markup=False)
                said = now

        yield show


def in_words(done: Done, first: Done, files: int, seconds: float) -> str:
    """Return a line such as "12%, 24 of 200 files, 5 docs, 0.1 M tokens, 0.02 M/s, 0:00:41 left".

    Args:
        done: the progress.
        first: the progress at the start of this run.
        files: number of inputs.
        seconds: time since the start of this run.
    """
    rate = (done.tokens - first.tokens) / seconds / 1e6 if seconds > 0 else 0.0
    parts = [
        f"{done.files:,} of {files:,} files",
        f"{done.documents:,} docs",
        f"{done.tokens / 1e6:,.1f} M tokens",
        f"{rate:.2f} M/s",
    ]
    if done.fraction is not None:
        parts.insert(0, f"{done.fraction:.0%}")
        if (gained := done.fraction - (first.fraction or 0.0)) > 0:
            left = int(seconds * (1 - done.fraction) / gained)
            parts.append(f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left")
    return ", ".join(parts)


class UnitProgress:
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
