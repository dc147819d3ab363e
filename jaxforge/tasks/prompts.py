"""Prompts: reading them from text or JSON Lines files, and their tokens."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxforge.data.corpus.tokenizer import Tokenizer, with_prefix
from jaxforge.errors import UserError

RESULTS = ("completion", "tokens", "finish_reason")
"""Fields that generation adds to those of a prompt."""

_OBJECTS = (".jsonl", ".ndjson", ".json")

STDIN = Path("-")
"""Path that means standard input for files of prompts."""


@dataclass(frozen=True)
class Prompt:
    """A text to continue.

    Attributes:
        text: the text.
        location: file and line for messages ("prompts.txt:3").
        fields: other fields of its JSON object, which are copied to the output.
    """

    text: str
    location: str
    fields: dict[str, Any] = field(default_factory=dict)


def encode(
    tokenizer: Tokenizer,
    prompt: Prompt,
    limit: int,
    max_tokens: int,
    key: str = "--max-tokens",
    *,
    vocab_size: int,
) -> list[int]:
    """Return the token ids of a prompt, after BOS if the tokenizer adds BOS.

    Without BOS, an empty prompt starts from end-of-text, as every document does.

    Args:
        tokenizer: tokenizer of the run.
        prompt: the prompt.
        limit: `model.max_seq_len`.
        max_tokens: tokens to generate.
        key: option that sets `max_tokens`, for messages.
        vocab_size: `model.vocab_size`.

    Raises:
        UserError: the prompt is too long, has a token that the model lacks, or is empty without an
            end-of-text token.
    """
    ids = with_prefix(tokenizer, tokenizer.encode(prompt.text))
    if not ids:
        if tokenizer.eos_id is None:
            raise UserError(
                f"{prompt.location}: the prompt is empty, and the tokenizer has no end-of-text "
                "token to start from; give a text"
            )
        ids = [tokenizer.eos_id]
    if len(ids) + max_tokens > limit:
        raise UserError(
            f"{prompt.location}: a prompt of {len(ids)} tokens and {key} {max_tokens} exceed "
            f"model.max_seq_len = {limit}; shorten the one or lower the other"
        )
    if problem := unknown_token(tokenizer, ids, vocab_size):
        raise UserError(f"{prompt.location}: {problem}")
    return ids


def unknown_token(tokenizer: Tokenizer, ids: Sequence[int], vocab_size: int) -> str:
    """Return a message about the first token that a model lacks; "" if there is none."""
    first = next((id_ for id_ in ids if id_ >= vocab_size), None)
    if first is None:
        return ""
    text = tokenizer.decode([first], special_tokens=True)
    return f"the token {text!r} has id {first}, and the model has only {vocab_size} tokens"


def continuation(tokenizer: Tokenizer, ids: Sequence[int], tokens: Sequence[int]) -> str:
    """Return the text that `tokens` add to the text of a prompt's `ids`."""
    # Decoded together, as some decoders drop the space before the first token.
    return tokenizer.decode([*ids, *tokens])[len(tokenizer.decode(ids)) :]


def read_prompts(path: Path) -> list[Prompt]:
    """Read prompts from a file.

    `.jsonl`, `.ndjson` and `.json` have an object {"prompt": ..., ...} per line. Other files have a
    text per line; an empty line is an empty prompt. Standard input (`STDIN`) has objects if its
    first line is an object with a "prompt".

    Raises:
        UserError: the file cannot be read or is empty, or a line is not a prompt.
    """
    try:
        content = sys.stdin.buffer.read() if path == STDIN else path.read_bytes()
    except OSError as error:
        raise UserError(f"--prompts {path}: {error.strerror}") from error
    # The line end of the last prompt does not begin another, empty one.
    lines = content.removesuffix(b"\n").split(b"\n")
    if lines == [b""]:
        raise UserError(f"--prompts {path}: the file is empty; give a prompt a line")
    is_json = _is_object(lines[0]) if path == STDIN else path.suffix.lower() in _OBJECTS
    return [
        _from_json(text, location) if is_json else Prompt(text, location)
        for text, location in _texts(lines, path)
    ]


def _is_object(line: bytes) -> bool:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and "prompt" in value


def _texts(lines: list[bytes], path: Path) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(lines, 1):
        location = f"{'standard input' if path == STDIN else path}:{number}"
        try:
            yield line.removesuffix(b"\r").decode("utf-8"), location
        except UnicodeDecodeError as error:
            raise UserError(f"{location}: not UTF-8 at byte {error.start} of the line") from None


def _from_json(line: str, location: str) -> Prompt:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{location}: not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{location}: not JSON: {error}") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("prompt"), str):
        raise UserError(f'{location}: expected an object with a text as "prompt", such as '
                        '{"prompt": "Once upon"}')  # fmt: skip
    try:
        # JSON can spell half of a surrogate pair, which the output, UTF-8, cannot.
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UserError(f"{location}: half of a surrogate pair, which is not a character") from None
    for name in RESULTS:
        if name in fields:
            raise UserError(f'{location}: "{name}" is a field of the output: rename it')
    return Prompt(fields.pop("prompt"), location, fields)
