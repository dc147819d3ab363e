"""Execution of a chat template in a child process with limits on memory and time.

    this process                        child
    settings            ── pickle ──►   ChatTemplate          compiled once
    messages, options   ── pickle ──►   ChatTemplate.render   within the limits
    text, spans         ◄── JSON, UTF-8 ──

A template is a program of the author of the tokenizer. Jinja's sandbox blocks access to files and
other code, but not endless loops or large allocations. Neither can be stopped within a process.
"""

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from jaxforge.data.corpus.chat import ChatTemplate, Message, Span
from jaxforge.data.corpus.untrusted_tokenizer import limit_memory
from jaxforge.errors import UserError

_SERVE = "from jaxforge.data.corpus.isolated_chat import serve; serve()"
_MEMORY = 256 << 20  # bytes in addition to the memory of the process at its start
_SECONDS_PER_MESSAGE = 0.01  # each answer takes two more renderings
_Result = TypeVar("_Result")
_ENCODING = ("utf-8", "surrogatepass")


class IsolatedTemplate:
    """Thread-safe `ChatTemplate` with limits.

    Args:
        settings: see `ChatTemplate`.
        seconds: CPU time for a conversation of few messages.

    Raises:
        UserError: the template is not a Jinja template, or compiling it exceeds the limits.
    """

    def __init__(self, settings: Mapping[str, str], seconds: float = 2.0) -> None:
        self._settings, self._seconds, self._lock = dict(settings), seconds, threading.Lock()
        self._start()

    def __reduce__(self) -> tuple[type["IsolatedTemplate"], tuple[dict[str, str], float]]:
        return IsolatedTemplate, (self._settings, self._seconds)

    def _start(self) -> None:
        self._pid = os.getpid()
        package = str(Path(__file__).parents[3])
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-c", _SERVE],  # -P: nothing of the working directory
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        weakref.finalize(self, _stop, self._child, self._pid)
        self._ask((self._settings,))

    def render(
        self,
        messages: Sequence[Message],
        first: int = 0,
        options: Mapping[str, object] = MappingProxyType({}),
    ) -> tuple[str, list[Span]]:
        """Render a conversation; see `ChatTemplate.render`.

        Raises:
            ValueError: as `ChatTemplate.render`, or it takes too much memory.
            UserError: it takes too much time, or ends the process.
        """
        with self._lock:
            if self._pid != os.getpid():  # after a fork, whose copy of the pipes is the parent's
                self._start()
            text, spans = self._ask((list(messages), first, dict(options)))
        return text, [(start, end) for start, end in spans]

    def _ask(self, question: tuple[Any, ...]) -> tuple[str, list[list[int]]]:
        seconds = self._seconds + _SECONDS_PER_MESSAGE * len(question[0])
        answer, text = self._exchange(pickle.dumps((seconds, question)))
        if "error" in answer:
            raise (UserError if answer["is_template"] else ValueError)(answer["error"])
        return text, answer["spans"]

    def _exchange(self, question: bytes) -> tuple[dict[str, Any], str]:
        stdin, stdout = self._child.stdin, self._child.stdout
        assert stdin is not None
        assert stdout is not None
        with suppress(BrokenPipeError):
            stdin.write(question)
            stdin.flush()
        header = stdout.readline()
        if not header:
            raise UserError(f"the tokenizer's chat template {self._end()}")
        answer = json.loads(header)
        return answer, stdout.read(answer["size"]).decode(*_ENCODING)

    def _end(self) -> str:
        """Return the reason why the child ended, for a message."""
        code = self._child.wait()
        if code == -signal.SIGPROF:
            return f"ran for more than {self._seconds:g} seconds: correct it, or use another"
        return f"ended its process (exit code {code}): correct it, or use another"


def _stop(child: subprocess.Popen[bytes], parent: int) -> None:
    """Kill the child. It also ends by itself when its standard input is closed."""
    if os.getpid() != parent:  # in a fork
        return
    child.kill()
    for pipe in (child.stdin, child.stdout):
        if pipe:
            with suppress(BrokenPipeError):  # the buffer is not empty
                pipe.close()
    child.wait()


def serve() -> None:
    """Compile a template and render conversations until standard input ends (child process)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends the process
    limit_memory(_MEMORY)
    with suppress(EOFError):
        template = _answer(ChatTemplate, *pickle.load(sys.stdin.buffer))
        while template is not None:
            _answer(template.render, *pickle.load(sys.stdin.buffer))


def _answer(function: Callable[..., _Result], seconds: float, args: tuple) -> _Result | None:
    """Call a function within the time limit, write the answer and return the result."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    result: _Result | None = None
    text, answer = b"", {}
    try:
        result = function(*args)
        if isinstance(result, tuple):
            text, answer = result[0].encode(*_ENCODING), {"spans": result[1]}
        else:
            answer = {"spans": []}
    except UserError as error:
        answer = {"error": str(error), "is_template": True}
    except ValueError as error:
        answer = {"error": str(error), "is_template": False}
    except MemoryError:
        answer = {"error": f"it takes more than {_MEMORY >> 20} MiB", "is_template": False}
    signal.setitimer(signal.ITIMER_PROF, 0)
    sys.stdout.buffer.write(json.dumps({**answer, "size": len(text)}).encode() + b"\n" + text)
    sys.stdout.buffer.flush()
    return result
