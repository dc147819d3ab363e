"""Chat templates: text of conversations, and the spans that the assistant says.

A template is a Jinja program that comes with a tokenizer. It runs in a sandbox, with the tags,
filters and functions of `apply_chat_template` in transformers. "Now" is a fixed day, so that the
same data give the same tokens.

The sandbox blocks access to files and other code, but not endless loops or large allocations, and
neither can be stopped within a process. So a child process with limits on memory and time renders:

    this process                        child
    settings            ── pickle ──►   ChatTemplate          compiled once
    messages, options   ── pickle ──►   ChatTemplate.render   within the limits
    text, spans         ◄── JSON, UTF-8 ──
"""

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, TypeVar

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxforge.data.corpus.untrusted_tokenizer import limit_memory
from jaxforge.errors import UserError, shortened

Message = dict[str, Any]
"""`role`, `content` and further fields for the template."""

Span = tuple[int, int]
"""Start and end of a range of characters."""

_NOW = datetime(2024, 7, 26)  # the default date of Llama 3's templates
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_REASON = 500  # characters of what a template says when it refuses a conversation
_MARKS = "\ufdd0\ufdd1"  # around generated text; noncharacters, which no text contains
_BETWEEN_MARKS = re.compile(f"[{_MARKS}]")
_SERVE = "from jaxforge.data.corpus.chat import serve; serve()"
_MEMORY = 256 << 20  # bytes in addition to the memory of the process at its start
_SECONDS_PER_MESSAGE = 0.01  # each answer takes two more renderings
_Result = TypeVar("_Result")
_ENCODING = ("utf-8", "surrogatepass")


class _GenerationTag(Extension):
    """`{% generation %}` … `{% endgeneration %}`: what the assistant says, between `_MARKS`."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{_MARKS[0]}{caller()}{_MARKS[1]}"


class ChatTemplate:
    """A tokenizer's chat template, and its template for conversations with tools.

    Args:
        settings: see `Tokenizer.chat`.

    Raises:
        UserError: a template is not a Jinja template.
    """

    def __init__(self, settings: Mapping[str, str]) -> None:
        self._tokens = dict(settings)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_refuse, strftime_now=_NOW.strftime)
        self._default = _Compiled.of(environment, self._tokens.pop("chat_template"))
        tool_use = self._tokens.pop("tool_use", None)
        self._tool_use = None if tool_use is None else _Compiled.of(environment, tool_use)

    def _choose(self, options: Mapping[str, object]) -> "_Compiled":
        """Return the template for these options, as transformers chooses it."""
        has_tools = options.get("tools") is not None
        return self._tool_use if has_tools and self._tool_use else self._default

    def render(
        self,
        messages: Sequence[Message],
        first: int = 0,
        options: Mapping[str, object] = MappingProxyType({}),
    ) -> tuple[str, list[Span]]:
        """Return the text of a conversation and the spans of the assistant.

        The spans are the text between `{% generation %}` and `{% endgeneration %}`. If the template
        has no such tags, or `first` is not 0, a span is the text that an assistant message adds to
        the conversation before it with `add_generation_prompt`, end of turn included.

        Args:
            messages: the messages, in order.
            first: earlier messages have no spans.
            options: `tools` and other variables of the template.

        Raises:
            ValueError: the template refuses the messages, or its text of a conversation does not
                begin with its text of the conversation's beginning.
        """
        try:
            texts = json.dumps([list(messages), dict(options)], ensure_ascii=False, default=str)
        except RecursionError as error:
            raise ValueError("its objects are nested too deeply") from error
        # A mark in the data would pass for the border of a span.
        if _BETWEEN_MARKS.search(texts):
            raise ValueError("it holds U+FDD0 or U+FDD1, which are not characters")
        if self._choose(options).has_marks and not first:
            return _unmark(self._text(messages, options))
        # Without marks, or with `first`, as marks do not name their message: differences of texts.
        text = _unmark(self._text(messages, options))[0]
        spans = []
        for i, message in enumerate(messages):
            if i >= first and message["role"] == "assistant":
                spans.append(self._span(messages, i, text, options))
        return text, spans

    def _span(
        self, messages: Sequence[Message], i: int, text: str, options: Mapping[str, object]
    ) -> Span:
        """Return the span of message `i` in the text."""
        before = self._text(messages[:i], {**options, "add_generation_prompt": True})
        until = self._text(messages[: i + 1], options) if i + 1 < len(messages) else text
        before, until = (_unmark(part)[0] for part in (before, until))
        if not (text.startswith(until) and until.startswith(before)):
            raise ValueError(
                f"the chat template writes message {i + 1} in another way when more follows, so "
                "that what the assistant says cannot be told: mark it in the template with "
                "{% generation %}, or give each turn as a prompt and a completion"
            )
        return len(before), len(until)

    def _text(self, messages: Sequence[Message], options: Mapping[str, object]) -> str:
        variables = {"add_generation_prompt": False, "tools": None, "documents": None}
        try:
            return self._choose(options).template.render(
                {**self._tokens, **variables, **options, "messages": list(messages)}
            )
        except Exception as error:  # a template is a program that may raise anything
            raise ValueError(f"the chat template cannot write it: {_in_words(error)}") from error


class _Compiled(NamedTuple):
    """A compiled template.

    Attributes:
        template: the template.
        has_marks: True if it marks what the assistant says.
    """

    template: jinja2.Template
    has_marks: bool

    @classmethod
    def of(cls, environment: jinja2.Environment, source: str) -> "_Compiled":
        try:
            template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(
                f"the tokenizer's chat template, line {error.lineno}: {error.message}"
            ) from error
        except Exception as error:  # from Python, which compiles the code that Jinja generates
            raise UserError(
                f"the tokenizer's chat template cannot be compiled ({_in_words(error)}): correct "
                "it, or use another"
            ) from error
        return cls(template, bool(_GENERATION.search(source)))


def _in_words(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "it takes too much memory"
    return shortened(str(error), _REASON) or type(error).__name__


def _unmark(text: str) -> tuple[str, list[Span]]:
    """Return `text` without marks, and the spans between the marks."""
    parts = _BETWEEN_MARKS.split(text)
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + len(part))
    return "".join(parts), list(pairwise(ends))[1::2]


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: object, **options: Any) -> str:  # noqa: ANN401
    """Serialize as `json.dumps`; Jinja's own filter escapes HTML characters."""
    return json.dumps(value, **{"ensure_ascii": False, **options})


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
        # The child must find this package where the parent has found it.
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
        # If the child is dead, the empty answer below leads to its exit code, which says why.
        with suppress(BrokenPipeError):
            stdin.write(question)
            stdin.flush()
        header = stdout.readline()
        if not header:
            raise UserError(f"the tokenizer's chat template {self._end()}")
        # JSON and not pickle: what the child sends must not run code in this process.
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
    # After the imports: the limit is relative to the memory in use.
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
    # Before the answer is written, which the signal would cut short.
    signal.setitimer(signal.ITIMER_PROF, 0)
    sys.stdout.buffer.write(json.dumps({**answer, "size": len(text)}).encode() + b"\n" + text)
    sys.stdout.buffer.flush()
    return result
