"""Progress display of `prepare`."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from jaxforge.data.corpus.ingest import Corpus

_LINE_SECONDS = 10.0  # between lines where there is no terminal


@contextmanager
def progress_shown(size: int | None) -> Iterator[Callable[[Corpus], None]]:
    """Yield a function that shows progress in `size` bytes: a bar on a terminal, else log lines."""
    console, start = Console(stderr=True), time.monotonic()
    said = start
    columns = (
        BarColumn(20),
        DownloadColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        bar = progress.add_task("", total=size)

        def show(corpus: Corpus) -> None:
            nonlocal said
            now = time.monotonic()
            writers = [split.writer for split in corpus.splits.values()]
            tokens = sum(writer.tokens for writer in writers) / 1e6
            documents = sum(writer.documents for writer in writers)
            text = f"{documents:,} docs, {tokens:,.1f} M tokens, {tokens / (now - start):.2f} M/s"
            progress.update(bar, completed=corpus.size, description=text)
            if not console.is_terminal and now - said >= _LINE_SECONDS:
                line = f"{corpus.size / size:.0%}: {text}" if size else text
                console.print(line, highlight=False, soft_wrap=True)
                said = now

        yield show
