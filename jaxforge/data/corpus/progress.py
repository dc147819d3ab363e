"""Progress display of `prepare`."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

_LINE_SECONDS = 10.0  # between lines where there is no terminal


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
