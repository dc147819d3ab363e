"""Logging to the terminal and to `<run>/logs/process_<i>.log`, and the banner."""

import logging
import sys
import threading
from collections.abc import Callable, Mapping
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table

from jaxforge.cli import streams
from jaxforge.cli.redaction import redacted_message
from jaxforge.cli.running import wide_console
from jaxforge.errors import UserError
from jaxforge.parallel import host_memory, multihost
from jaxforge.storage import safe_files

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_SHORT_FORMAT = "%(levelname)s %(message)s"
_LIBRARIES = ("absl", "asyncio")


def setup_logging(console: Console) -> None:
    """Send log messages to the terminal or stderr until there is a run directory."""
    handler: logging.Handler
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=False, show_time=False)
    else:
        handler = logging.StreamHandler(streams.tolerant(sys.stderr, "standard error"))
    handler.setFormatter(redacting("%(message)s" if console.is_terminal else _SHORT_FORMAT))
    logger = logging.getLogger("jaxforge")
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO)
    # Orbax and Grain log through absl, and asyncio complains about tasks that Orbax abandons when
    # it fails. We report what matters; the messages themselves only go to the log file.
    for name in _LIBRARIES:
        libraries = logging.getLogger(name)
        libraries.handlers[:], libraries.propagate = [logging.NullHandler()], False
    for hook in ("excepthook", "unraisablehook"):
        report = getattr(sys, hook)
        if not isinstance(report, _WithoutClosedLoops):
            setattr(sys, hook, _WithoutClosedLoops(report))


def begin_run() -> Console:
    """Prepare a process that trains: logging and memory allocator. Return its console."""
    console = wide_console(streams.tolerant(sys.stdout))
    setup_logging(console)
    host_memory.keep_freed_memory()
    return console


def begin_command() -> None:
    """Prepare a process that uses a run: logging, memory allocator and the processes of the job."""
    setup_logging(Console(stderr=True))
    host_memory.keep_freed_memory()
    multihost.initialize()


def redacting(layout: str) -> logging.Formatter:
    """Return a formatter that removes secrets from messages and tracebacks."""
    return _Redacting(layout)


class _Redacting(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redacted_message(super().format(record))


class _WithoutClosedLoops:
    """Exception hook that ignores threads whose event loop is closed.

    When a save fails, Orbax closes its event loop while TensorStore still writes other arrays. Each
    of its threads then fails to report and prints a traceback. The failure of the save is raised.
    """

    def __init__(self, report: Callable[..., object]) -> None:
        self._report = report

    def __call__(self, *failure: Any) -> None:  # noqa: ANN401 (of either hook of `sys`)
        is_raised = len(failure) > 1
        error = failure[1] if is_raised else failure[0].exc_value
        is_ours = is_raised and threading.current_thread() is threading.main_thread()
        if is_ours or str(error) != "Event loop is closed":
            self._report(*failure)


def add_log_file(run: Path) -> None:
    """Also log to the file of this process. Other processes than 0 show only warnings on stderr.

    Raises:
        UserError: the file cannot be written.
    """
    logger = logging.getLogger("jaxforge")
    if jax.process_index() > 0:
        logger.handlers[0].setLevel(logging.WARNING)
    path = run / "logs" / f"process_{jax.process_index()}.log"
    try:
        safe_files.make_directory(path.parent)
        handler = _LogFile(path)
    except OSError as error:
        raise UserError(f"cannot write {error.filename or path}: {error.strerror}") from error
    handler.setFormatter(redacting(_FORMAT))
    logger.addHandler(handler)
    for name in _LIBRARIES:
        logging.getLogger(name).addHandler(handler)


class _LogFile(logging.FileHandler):
    """A log file whose failures are reported once: messages are on the terminal too."""

    _has_warned = False

    def _open(self) -> TextIOWrapper:
        file = safe_files.open_to_append(Path(self.baseFilename))
        return TextIOWrapper(file, encoding="utf-8", write_through=True)

    def handleError(self, record: logging.LogRecord) -> None:
        """Report a failed write once, instead of a traceback for each message."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._has_warned:
            self._has_warned = True
            stderr = streams.tolerant(sys.stderr)
            print(f"cannot write log messages to {self.baseFilename}: {error}", file=stderr)


def banner(console: Console, rows: Mapping[str, str]) -> None:
    """Print the banner of a run as a two-column table."""
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(f"[bold]{name}", redacted_message(value))
    console.print(table)
