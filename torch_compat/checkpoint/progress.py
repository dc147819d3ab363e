"""A progress bar in bytes."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich import progress
from rich.console import Console


@contextlib.contextmanager
def bar(total: int, console: Console, *, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """Show a progress bar; yield a function that advances it by a number of bytes.

    Nothing is shown if standard error is no terminal, or if `quiet`.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda nbytes: None
        return
    columns = (
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console) as shown:
        task = shown.add_task("", total=total)
        yield lambda nbytes: shown.advance(task, nbytes)
