"""Conversation with a trained model on a terminal: `jaxforge generate` without a prompt.

With a chat template, turns are messages of a user and an assistant. Without a template, the typed
text and the answers form one text, which the model continues. If the conversation exceeds the
model's context, the oldest turns or the beginning of the text are dropped.
"""

import contextlib
import dataclasses
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from jaxforge.data.corpus.records import library
from jaxforge.data.corpus.tokenizer import Tokenizer, with_prefix
from jaxforge.errors import UserError
from jaxforge.model.decoding import Decoder
from jaxforge.tasks.prompts import continuation, unknown_token

if TYPE_CHECKING:
    from jaxforge.data.corpus.chat import IsolatedTemplate

_HELP = "/reset forgets what was said, /quit or Ctrl-D ends, Ctrl-C stops an answer"
_CHAT, _TEXT = "a chat", "the tokenizer has no chat template: the model continues your text"
_UNFINISHED = "�"  # decoded from an incomplete character
_ANSWER = "jaxforge's answer"  # to find the text that a template adds after an answer

Say = Callable[[str], None]
"""Function that prints text without a newline."""


class _Turn(NamedTuple):
    said: str
    answer: str


class Dialogue:
    """History of a conversation, encoded as the tokens that the model continues.

    Args:
        tokenizer: tokenizer of the run.
        room: tokens of the model's context that are left for the history.
        vocab_size: `model.vocab_size`.

    Raises:
        UserError: the tokenizer's chat template cannot write a conversation.
    """

    def __init__(self, tokenizer: Tokenizer, room: int, vocab_size: int) -> None:
        self._tokenizer, self._room, self._vocab_size = tokenizer, room, vocab_size
        self._template = _template(tokenizer)
        self._turns: list[_Turn] = []
        self.end = self._end_of_answer()

    @property
    def has_template(self) -> bool:
        """True if turns are formatted by a chat template."""
        return self._template is not None

    def ask(self, text: str) -> tuple[list[int], str]:
        """Begin a new turn.

        Returns:
            The tokens to continue, and a notice to the user about dropped tokens, or "".

        Raises:
            ValueError: the message alone is too long, has a token that the model lacks, or the
                template refuses it.
        """
        return self._message(text) if self._template else self._more_text(text)

    def _message(self, text: str) -> tuple[list[int], str]:
        n = 0
        for dropped in range(len(self._turns) + 1):
            turns = [*self._turns[dropped:], _Turn(text, "")]
            ids = self._encode(turns)
            if (n := len(ids)) <= self._room:
                # Only after encoding: a message that is refused leaves the history as it was.
                self._turns = turns
                left_out = f"oldest turns that the model does not see any more: {dropped}"
                return ids, left_out if dropped else ""
        raise ValueError(
            f"that is {n} tokens, and there is room for {self._room}: say less, or lower "
            "--max-tokens"
        )

    def _more_text(self, text: str) -> tuple[list[int], str]:
        # After an answer, a typed line begins a new line of the text.
        said = f"\n{text}" if self._turns and text else text
        ids = self._encode([*self._turns, _Turn(said, "")])
        self._turns.append(_Turn(said, ""))
        is_cut = len(ids) > self._room
        word = f"the model sees the last {self._room:,} tokens of {len(ids):,}"
        return ids[-self._room :], word if is_cut else ""

    def record_answer(self, text: str) -> None:
        """Record the answer, which may be partial."""
        self._turns[-1] = self._turns[-1]._replace(answer=text)

    def reset(self) -> None:
        """Clear the history."""
        self._turns = []

    def _encode(self, turns: Sequence[_Turn]) -> list[int]:
        ids = self._tokenizer.encode(self._text(turns))
        if self._template is None:  # templates write BOS themselves
            ids = with_prefix(self._tokenizer, ids)
        if problem := unknown_token(self._tokenizer, ids, self._vocab_size):
            raise ValueError(problem)
        if ids:
            return ids
        if self._tokenizer.eos_id is None:
            raise ValueError("the tokenizer has no end-of-text token to start from: say something")
        return [self._tokenizer.eos_id]

    def _text(self, turns: Sequence[_Turn]) -> str:
        if self._template is None:
            return "".join(f"{turn.said}{turn.answer}" for turn in turns)
        # Without the last answer, which is empty: the model writes it.
        messages = [message for turn in turns for message in _messages(turn)][:-1]
        options = {"add_generation_prompt": True}
        # `len(messages)`: no spans, which take further renderings.
        return self._template.render(messages, len(messages), options)[0]

    def _end_of_answer(self) -> str:
        """Return the stripped text that the template adds after an answer, or ""."""
        if self._template is None:
            return ""
        messages = list(_messages(_Turn("a question", _ANSWER)))
        try:
            text, _ = self._template.render(messages, len(messages))
        except ValueError as error:
            raise UserError(f"no conversation with this tokenizer: {error}") from error
        return text.partition(_ANSWER)[2].strip()


def _template(tokenizer: Tokenizer) -> "IsolatedTemplate | None":
    if not tokenizer.chat:
        return None
    library("jinja2", "a chat template")
    from jaxforge.data.corpus.chat import IsolatedTemplate

    return IsolatedTemplate(tokenizer.chat)


def _messages(turn: _Turn) -> Iterator[dict[str, str]]:
    yield {"role": "user", "content": turn.said}
    yield {"role": "assistant", "content": turn.answer}


def answer(
    tokens: Iterator[int], ids: Sequence[int], tokenizer: Tokenizer, end: str
) -> Iterator[str]:
    """Yield the text that tokens add to a prompt, up to the end of the answer.

    Only whole characters are yielded. Text that may be the beginning of `end` is held back.

    Args:
        tokens: stream of tokens.
        ids: token ids of the prompt.
        tokenizer: tokenizer of both.
        end: text that ends an answer, with special tokens spelled out; "": none.
    """
    tokens_: list[int] = []
    n_printed, text = 0, ""
    for token in tokens:
        tokens_.append(token)
        # An end is often a special token, which the text of an answer leaves out.
        if end and end in tokenizer.decode(tokens_, special_tokens=True):
            break
        text = continuation(tokenizer, ids, tokens_)
        ready = len(text) - _overlap(text, end)
        if not text.endswith(_UNFINISHED) and ready > n_printed:
            yield text[n_printed:ready]
            n_printed = ready
    text = continuation(tokenizer, ids, tokens_)
    yield (text.partition(end)[0] if end else text)[n_printed:]


def _overlap(text: str, end: str) -> int:
    """Return the number of final characters that may begin `end`."""
    return next((n for n in range(min(len(end), len(text)), 0, -1) if text.endswith(end[:n])), 0)


def talk(
    decoder: Decoder,
    tokenizer: Tokenizer,
    *,
    ask: Callable[[str], str] = input,
    say: Say = lambda text: print(text, end="", flush=True),
) -> None:
    """Run a conversation until /quit or the end of input.

    Args:
        decoder: decoder of one prompt; its `max_tokens` limits an answer.
        tokenizer: tokenizer of the run.
        ask: function that shows a prompt and returns a line; EOFError ends the conversation.
        say: function that prints.

    Raises:
        UserError: the tokenizer's chat template cannot write a conversation.
    """
    model = decoder.model.config
    dialogue = Dialogue(tokenizer, model.max_seq_len - decoder.max_tokens, model.vocab_size)
    say(f"{_CHAT if dialogue.has_template else _TEXT}; {_HELP}\n")
    with _interruptible():
        for turn, line in enumerate(_lines(ask, say)):
            if line == "/reset":
                dialogue.reset()
                continue
            try:
                ids, word = dialogue.ask(line)
            except ValueError as error:
                say(f"({error})\n")
                continue
            if word:
                say(f"({word})\n")
            # With one seed, a repeated question would get the same answer after /reset.
            seeded = dataclasses.replace(decoder, seed=decoder.seed + turn)
            dialogue.record_answer(_answer(seeded, ids, tokenizer, dialogue.end, say))


def _lines(ask: Callable[[str], str], say: Say) -> Iterator[str]:
    """Yield typed lines; a line that ends with a backslash continues in the next one."""
    text = ""
    while True:
        try:
            line = ask(". " if text else "> ")
        except EOFError:
            say("\n")
            return
        except KeyboardInterrupt:
            say(f"\n({_HELP})\n")
            text = ""
            continue
        if line.endswith("\\"):
            text += f"{line[:-1]}\n"
            continue
        text, line = "", text + line
        if line.strip() == "/quit":
            return
        yield line.strip() if line.strip() == "/reset" else line


def _answer(decoder: Decoder, ids: list[int], tokenizer: Tokenizer, end: str, say: Say) -> str:
    """Print the answer as a stream, until Ctrl-C, and return it."""
    tokens, text = _tokens(decoder, ids), ""
    try:
        for part in answer(tokens, ids, tokenizer, end):
            say(part)
            text += part
    except KeyboardInterrupt:
        say(" (stopped)")
    say("\n")
    return text


def _tokens(decoder: Decoder, ids: list[int]) -> Iterator[int]:
    for (token,) in decoder.stream([ids]):
        if token is None:
            return
        yield token


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt; it ends other commands (`jaxforge.__init__`)."""
    # Python sets signal handlers in the main thread only.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def is_possible() -> bool:
    """Return whether standard input and output are terminals."""
    return sys.stdin.isatty() and sys.stdout.isatty()
