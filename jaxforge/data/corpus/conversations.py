"""Conversion of conversations and pairs of answers to entries (`manifest.FIRST`).

record ─► messages ─► text, learned spans ─► token ids ─────────► entries
          (forms)     (chat template)        (tokenizer, offsets)

Text and spans are passed on as a line of JSON, which is a document like any other.

    prompt, chosen, rejected ─► two conversations ─► entries of chosen, entries of rejected

A pair of answers (preference data) is a document of two conversations with the same prompt. Their
entries follow each other on disk, and both begin with `manifest.FIRST`.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxforge.cli.suggestions import listed
from jaxforge.data.corpus.manifest import FIRST, UNLEARNED
from jaxforge.data.corpus.records import Content, RecordError, TableRow, library
from jaxforge.data.corpus.tokenizer import Tokenizer, with_prefix
from jaxforge.data.corpus.workers import Encoded, Text
from jaxforge.errors import UserError

_FORMS = (("messages",), ("conversations",), ("prompt", "completion"), ("instruction", "output"))
EXTRAS = ("input", "tools", "chat_template_kwargs")
"""Keys of a record that are read in addition to those of its form."""

_FORMS_IN_WORDS = "messages, conversations, prompt and completion, or instruction and output"
_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant",
          "observation": "tool"}  # fmt: skip

_KEYS = {"from": "role", "value": "content"}  # of ShareGPT
_REASONING = ("reasoning_content", "thinking", "reasoning")  # in the order of transformers

Spans = list[tuple[int, int]]

ANSWERS = ("chosen", "rejected")
"""Keys of the two answers of a record, in the order of their entries."""

_PROMPT = "prompt"
_IN_WORDS = "chosen and rejected, with a prompt if they are texts"


class Conversations(Content):
    """Records that hold conversations (a `records.Content`).

    Args:
        tokenizer: tokenizer whose chat template formats the conversations.

    Raises:
        UserError: jinja2 is not installed, or the template is invalid.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._template = None
        self._fingerprint = fingerprint(tokenizer)
        if tokenizer.chat:
            library("jinja2", "a chat template")
            from jaxforge.data.corpus.chat import IsolatedTemplate

            self._template = IsolatedTemplate(tokenizer.chat)

    @property
    def identity(self) -> tuple[str, ...]:
        """Kind of document, and the fingerprint of the template."""
        return ("conversations", self._fingerprint)

    def columns(self, there: Sequence[str] | None, where: str) -> list[str]:
        """Return the columns of a table to read; [] reads all columns.

        Raises:
            UserError: the columns match no form of conversation.
        """
        if there is None:
            return []
        form = _form(there)
        if not form:
            raise UserError(f"{where}: expected columns {_FORMS_IN_WORDS}; it has {listed(there)}")
        return [name for name in there if name in (*form, *EXTRAS)]

    def document(self, record: Mapping[str, Any]) -> str:
        """Return JSON with `text`, `learned` (spans) and `eos` (True if a learned EOS follows).

        Raises:
            ValueError: the record is not a conversation, the template refuses it, or no span is
                learned.
        """
        # Rows of a table have all of its columns: a null must not decide the form.
        form = _form(name for name, value in record.items() if value is not None)
        if not form:
            raise RecordError(
                f"expected {_FORMS_IN_WORDS} (it has: {listed(record)})",
                "leave --conversations out if the records are texts" if "text" in record else "",
            )
        if isinstance(record, TableRow):
            record = without_none(record)
        texts = [record[name] for name in form]
        plain = form == ("prompt", "completion") and all(isinstance(text, str) for text in texts)
        if plain:
            text = "".join(texts)
            spans = [(len(texts[0]), len(text))]
        else:
            text, spans = self._render(record, form)
        if not any(start < end for start, end in spans):
            raise ValueError("the assistant says nothing, so that there is nothing to learn")
        # Templates write their own end of turn; plain text needs EOS to learn where to stop.
        document = {"text": text, "learned": spans, "eos": plain}
        return json.dumps(document, ensure_ascii=False)

    def _render(self, record: Mapping[str, Any], form: Sequence[str]) -> tuple[str, Spans]:
        if self._template is None:
            raise UserError(
                "the tokenizer has no chat template to write conversations with: put a "
                "chat_template.jinja beside its tokenizer.json, or give prompts and completions as "
                "texts"
            )
        messages, first = _conversation(record, form)
        options = record.get("chat_template_kwargs") or {}
        if not isinstance(options, dict):
            raise ValueError(f"expected an object as chat_template_kwargs, not {options!r:.40}")
        tools = record.get("tools")
        # Tables hold tools as JSON in a text, which is empty where a row has none.
        if isinstance(tools, str):
            tools = json.loads(tools) if tools.strip() else None
        if tools is not None:
            options = {**options, "tools": tools}
        return self._template.render(messages, first, options)


class Preferences(Conversations):
    """Records that hold a prompt and two answers (a `records.Content`)."""

    @property
    def identity(self) -> tuple[str, ...]:
        """Kind of document, and the fingerprint of the template."""
        return ("preferences", self._fingerprint)

    def columns(self, there: Sequence[str] | None, where: str) -> list[str]:
        """Return the columns of a table to read; [] reads all columns.

        Raises:
            UserError: the answers are missing.
        """
        if there is None:
            return []
        if not set(ANSWERS) <= set(there):
            raise UserError(f"{where}: expected columns {_IN_WORDS}; it has {listed(there)}")
        return [name for name in there if name in (_PROMPT, *ANSWERS, *EXTRAS)]

    def document(self, record: Mapping[str, Any]) -> str:
        """Return a JSON list of two documents of `Conversations`: chosen, rejected.

        Raises:
            ValueError: the record is not a pair, the template refuses it, or an answer is empty.
        """
        if isinstance(record, TableRow):
            record = without_none(record)
        record = without_null_keys(record)
        if not set(ANSWERS) <= record.keys():
            raise RecordError(
                f"expected {_IN_WORDS} (it has: {listed(record)})",
                "leave --preferences out if the records are texts" if "text" in record else "",
            )
        prompt, *completions = _split(record)
        extras = {name: record[name] for name in EXTRAS if name in record}
        documents = [
            super(Preferences, self).document({**extras, _PROMPT: prompt, "completion": answer})
            for answer in completions
        ]
        return json.dumps(documents, ensure_ascii=False)


def _split(record: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Return prompt, chosen and rejected answer of a record.

    Answers may be whole conversations that repeat the prompt: then their common messages are the
    prompt.
    """
    prompt, chosen, rejected = record.get(_PROMPT), record["chosen"], record["rejected"]
    if isinstance(prompt, list) or not (isinstance(chosen, list) and isinstance(rejected, list)):
        if prompt is None:
            raise ValueError("the record has texts as answers, and no prompt")
        return prompt, chosen, rejected
    # Tables have all keys in each row: a null key does not make a difference between two messages.
    pairs = zip(map(without_null_keys, chosen), map(without_null_keys, rejected), strict=False)
    n = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(chosen), len(rejected)))
    if n == 0 and prompt is not None:
        return prompt, chosen, rejected
    if n == 0 or n == len(chosen) or n == len(rejected):
        raise ValueError("the answers have no common messages, or do not differ after them")
    return chosen[:n], chosen[n:], rejected[n:]


def encode_preferences(tokenizer: Tokenizer, texts: Sequence[Text], dtype: str) -> Encoded:
    """Return the entries of pairs by split, with the entries of each pair.

    Arguments are those of `ingest.encode`; texts are results of `Preferences.document`.
    """
    answers = [
        (split, answer, first, last)
        for split, text, first, last in texts
        for answer in json.loads(text)
    ]
    entries = encode_conversations(tokenizer, answers, dtype)
    return Encoded(entries, {split: _pair_lengths(array) for split, array in entries.items()})


def _pair_lengths(entries: Int[np.ndarray, "_"]) -> Int[np.ndarray, "pairs"]:
    # Each pair has two starts, of chosen and of rejected.
    starts = np.flatnonzero(entries & FIRST)[::2]
    return np.diff(starts, append=len(entries))


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return the SHA-256 (hex) of the chat template and the special tokens that it may use."""
    return hashlib.sha256(json.dumps(dict(tokenizer.chat), sort_keys=True).encode()).hexdigest()


def encode_conversations(
    tokenizer: Tokenizer, texts: Sequence[tuple[str, str, bool, bool]], dtype: str
) -> dict[str, Int[np.ndarray, "_"]]:
    """Return the entries of conversations by split.

    Arguments are those of `ingest.encode`; texts are results of `Conversations.document`. A token
    is learned if any of its characters is. A text without a template begins with BOS if the
    tokenizer adds BOS; templates write their own.
    """
    documents = [json.loads(text) for _, text, *_ in texts]
    encoded = tokenizer.encode_with_offsets([document["text"] for document in documents])
    parts: dict[str, list[Int[np.ndarray, "_"]]] = {}
    for (split, *_), document, (ids, offsets) in zip(texts, documents, encoded, strict=True):
        entries = _entries(ids, offsets, document["learned"], dtype)
        if document["eos"]:
            begun = with_prefix(tokenizer, ids)
            added = begun[: len(begun) - len(ids)]  # not learned
            entries = np.concatenate([np.asarray(added, dtype) | UNLEARNED, entries])
            is_ended = begun[len(tokenizer.prefix) :][-1:] == [tokenizer.eos_id]
        # A conversation without tokens also needs an entry, to carry FIRST.
        if not ids or (document["eos"] and not is_ended):
            entries = np.append(entries, np.asarray(tokenizer.eos_id, dtype))
        entries[0] |= FIRST
        parts.setdefault(split, []).append(entries)
    return {split: np.concatenate(arrays) for split, arrays in parts.items()}


def _entries(
    ids: Sequence[int], offsets: Int[np.ndarray, "n 2"], spans: Spans, dtype: str
) -> Int[np.ndarray, "n"]:
    entries, (starts, ends) = np.asarray(ids, dtype), offsets.T
    learned = np.zeros(len(ids), bool)
    for start, end in spans:
        # Half-open ranges overlap if each starts before the other ends; [n] for each span.
        learned |= (starts < end) & (ends > start)
    entries[~learned] |= UNLEARNED
    return entries


def _form(names: Iterable[str]) -> tuple[str, ...]:
    there = set(names)
    return next((form for form in _FORMS if there.issuperset(form)), ())


def _conversation(
    record: Mapping[str, Any], form: Sequence[str]
) -> tuple[list[dict[str, Any]], int]:
    """Return the messages, and the number of the first message that may be learned."""
    if form[0] == "instruction":
        asked = "\n\n".join(_text(record[n]) for n in ("instruction", "input") if record.get(n))
        return [_plain_message("user", asked), _plain_message("assistant", record["output"])], 0
    if form[0] == "prompt":
        prompt = _messages(record["prompt"], "user")
        # The prompt may hold earlier answers, which are not learned.
        return [*prompt, *_messages(record["completion"], "assistant")], len(prompt)
    return _messages(record[form[0]], ""), 0


def _messages(value: object, role: str) -> list[dict[str, Any]]:
    """Return messages in the form of templates; a string is a message of `role`."""
    if isinstance(value, str) and role:
        return [_plain_message(role, value)]
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise ValueError(f"expected a list of messages, not {value!r:.40}")
    return [_message(message) for message in value]


def _plain_message(role: str, content: object) -> dict[str, Any]:
    return _message({"role": role, "content": content})


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with `role`, `content` if it has one, and its other fields."""
    # As in transformers: no null keys, and reasoning under the names that templates read.
    there = without_null_keys(message)
    # ShareGPT's keys are renamed unless the message also has the usual ones.
    fields = {key if (name := _KEYS.get(key, key)) in there else name: value
              for key, value in there.items()}  # fmt: skip
    reasoning = next((fields[key] for key in _REASONING if key in fields), None)
    role, content = fields.get("role"), fields.get("content")
    is_empty = content is None and reasoning is None and "tool_calls" not in fields
    if not isinstance(role, str) or is_empty:
        raise ValueError(f'expected messages with "role" and "content", not {message!r:.60}')
    if fields.get("weight", 1) != 1 or fields.get("train", True) is not True:
        raise ValueError("messages with a weight, or that are not trained on, are not supported")
    fields["role"] = _ROLES.get(role, role)
    if content is not None:
        fields["content"] = _text(content)
    if reasoning is not None:
        fields = {"thinking": reasoning, **fields, "reasoning_content": reasoning}
    return fields


def _text(content: object) -> str:
    if isinstance(content, list):
        content = "".join(map(_part, content))
    if not isinstance(content, str):
        raise ValueError(f"expected a text as content, not {content!r:.40}")
    return content


def _part(part: object) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    if not isinstance(text, str):
        raise ValueError(f"expected parts of text only, not {part!r:.40}")
    return text


def without_null_keys(value: Any) -> Any:  # noqa: ANN401
    """Remove keys with None from an object, and return other values unchanged."""
    if not isinstance(value, Mapping):
        return value
    return {key: item for key, item in value.items() if item is not None}


def without_none(value: Any) -> Any:  # noqa: ANN401
    """Remove keys with None, which tables have for missing keys, at every depth."""
    if isinstance(value, Mapping):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list) else value
