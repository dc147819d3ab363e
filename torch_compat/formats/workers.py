"""The other processes of a conversion on this machine."""

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

from jaxforge.errors import UserError


class Share(NamedTuple):
    """Index of this process among several.

    Attributes:
        process: its number.
        processes: how many there are.
        parent: the process id of process 0, if that has started this one.
    """

    process: int = 0
    processes: int = 1
    parent: int | None = None


class Workers:
    """Processes that do the other shares; a context manager at whose end they have ended.

    Args:
        arguments: of the command that this process runs.
        source: what its source was resolved to: they do not look for the newest again.
        processes: how many there are, this one included.
    """

    def __init__(self, arguments: Sequence[str] = (), source: str = "", processes: int = 1) -> None:
        self._command = [sys.executable, "-m", "torch_compat", *arguments]
        self._source, self._processes = source, processes
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._started:
            worker.terminate()
            worker.wait()

    def start(self) -> None:
        """Starts them, when what they are to do is laid down."""
        for i in range(1, self._processes):
            share = [f"--process={i}/{self._processes}", "--worker", str(os.getpid()), self._source]
            self._started.append(subprocess.Popen([*self._command, *share]))

    def check(self) -> None:
        """Looks whether all of them are well.

        Raises:
            UserError: one of them failed.
        """
        if any(worker.poll() for worker in self._started):
            raise UserError("a worker process failed; its message is above")
