"""Worker processes of a conversion on this machine."""

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

from jaxforge.errors import UserError


class Share(NamedTuple):
    """Share of a process in a conversion.

    Attributes:
        process: index of the process.
        processes: number of processes.
        parent: process id of process 0 if it started this process, else None.
    """

    process: int = 0
    processes: int = 1
    parent: int | None = None


class Workers:
    """Processes that do the other shares, as a context manager that terminates them on exit.

    Args:
        arguments: arguments of `jaxforge convert` in this process.
        source: resolved source; workers must not resolve "the newest" again.
        processes: number of processes including this one.
    """

    def __init__(self, arguments: Sequence[str] = (), source: str = "", processes: int = 1) -> None:
        self._command = [sys.executable, "-m", "jaxforge", "convert", *arguments]
        self._source, self._processes = source, processes
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._started:
            worker.terminate()
            worker.wait()

    def start(self) -> None:
        """Start the processes. The plan must be on disk (`Staging`)."""
        for i in range(1, self._processes):
            share = [f"--process={i}/{self._processes}", "--worker", str(os.getpid()), self._source]
            self._started.append(subprocess.Popen([*self._command, *share]))

    def check(self) -> None:
        """Raise UserError if a worker has failed."""
        if any(worker.poll() for worker in self._started):
            raise UserError("a worker process failed; its message is above")
