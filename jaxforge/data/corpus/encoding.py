"""Tokens of texts, with the number of tokens of each text."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from jaxforge.data.corpus.entries import FIRST
from jaxforge.data.corpus.tokenizer import Tokenizer, with_prefix
from jaxforge.data.corpus.workers import Encoded, Text, Tokens


def encode(tokenizer: Tokenizer, texts: Sequence[Text], dtype: str) -> Encoded:
    """Return the tokens of texts: each document with BOS, if the tokenizer adds it, and EOS.

    A document that ends with EOS itself gets no second one.

    Args:
        tokenizer: a tokenizer with an EOS.
        texts: the texts of a batch.
        dtype: NumPy name of the type to return.
    """
    parts: dict[str, list[Int[np.ndarray, "_"]]] = {}
    lengths: dict[str, list[int]] = {}
    end = np.asarray([tokenizer.eos_id], dtype)
    encoded = tokenizer.encode_batch([text for _, text, *_ in texts])
    for (split, _, first, last), ids in zip(texts, encoded, strict=True):
        begun = with_prefix(tokenizer, ids) if first else ids
        parts.setdefault(split, []).append(np.asarray(begun, dtype))
        needs_end = last and begun[len(tokenizer.prefix) * first :][-1:] != [tokenizer.eos_id]
        if needs_end:
            parts[split].append(end)
        lengths.setdefault(split, []).append(len(begun) + needs_end)
    return Encoded(
        {split: np.concatenate(arrays) for split, arrays in parts.items()},
        {split: np.asarray(counts, np.int64) for split, counts in lengths.items()},
    )


def conversation_lengths(entries: Tokens) -> Encoded:
    """Return entries of conversations with the length of each."""
    lengths = {
        split: np.diff(np.flatnonzero(array & FIRST), append=len(array))
        for split, array in entries.items()
    }
    return Encoded(entries, lengths)


def split_tokens(
    tokens: Int[np.ndarray, "_"], lengths: Int[np.ndarray, "texts"], count: int
) -> tuple[Int[np.ndarray, "texts"], Int[np.ndarray, "texts"]]:
    """Return the lengths of the texts' parts in `tokens[:count]` and in the other tokens."""
    ends = np.minimum(np.cumsum(lengths), min(count, len(tokens)))
    first = np.diff(ends, prepend=0)
    return first, lengths - first
