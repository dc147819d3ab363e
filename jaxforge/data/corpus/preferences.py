"""Conversion of pairs of answers (preference data) to entries (`corpus.entries`).

    prompt, chosen, rejected ─► two conversations ─► entries of chosen, entries of rejected

A pair is a document of two conversations with the same prompt (`corpus.conversations`). Their
entries follow each other on disk, and both begin with `entries.FIRST`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxforge.cli.suggestions import listed
from jaxforge.data.corpus.content import RecordError, TableRow
from jaxforge.data.corpus.conversations import (
    EXTRAS,
    Conversations,
    encode_conversations,
    without_none,
    without_null_keys,
)
from jaxforge.data.corpus.entries import FIRST
from jaxforge.data.corpus.tokenizer import Tokenizer
from jaxforge.data.corpus.workers import Encoded, Text
from jaxforge.errors import UserError

ANSWERS = ("chosen", "rejected")
"""Keys of the two answers of a record, in the order of their entries."""

_PROMPT = "prompt"
_IN_WORDS = "chosen and rejected, with a prompt if they are texts"


class Preferences(Conversations):
    """Records that hold a prompt and two answers (a `content.Content`)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.identity = ("preferences", *self.identity[1:])

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
            ValueError: the record is no pair, the template refuses it, or an answer is empty.
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
    starts = np.flatnonzero(entries & FIRST)[::2]
    return np.diff(starts, append=len(entries))
