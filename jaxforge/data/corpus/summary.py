"""Summary that `prepare` prints of the shards it has written."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jaxforge.data.corpus.corpus_state import Corpus, Options
from jaxforge.data.corpus.statistics import CorpusStatistics, total
from jaxforge.data.corpus.tokenizer import Tokenizer


class SplitTotals(NamedTuple):
    """Totals of a split.

    Attributes:
        documents: number of documents.
        tokens: number of tokens.
        size: bytes of text.
        broken: number of documents that were not UTF-8.
        counts: occurrences of each token; with conversations, only learned ones.
        statistics: what the manifest holds of its statistics.
    """

    documents: int
    tokens: int
    size: int
    broken: int
    counts: Int[np.ndarray, "V"]
    statistics: CorpusStatistics


class Totals(NamedTuple):
    """Totals of a corpus.

    Attributes:
        splits: totals of the splits, by name.
        skipped: number of bad records that were skipped.
        dtype: numpy name of the type of tokens on disk.
        conversations: True if documents are conversations.
        preferences: True if these are pairs of answers.
    """

    splits: Mapping[str, SplitTotals]
    skipped: int
    dtype: str
    conversations: bool
    preferences: bool = False

    @classmethod
    def of(cls, corpus: Corpus, options: Options) -> "Totals":
        """Return the totals of a finished corpus.

        Args:
            corpus: the corpus.
            options: the options of the command.
        """
        splits = {
            name: SplitTotals(
                split.writer.documents,
                split.writer.tokens,
                split.size,
                split.broken,
                split.writer.counts,
                split.statistics.summary(options.rules),
            )
            for name, split in corpus.splits.items()
        }
        writer = corpus.splits["train"].writer
        kinds = options.conversations, options.preferences
        return cls(splits, corpus.skipped, writer.dtype, *kinds)


def table(totals: Totals, tokenizer: Tokenizer) -> str:
    """Return a table of the results with a column for each split."""
    parts = totals.splits.values()
    cells: dict[str, Callable[[SplitTotals], str]] = {
        "documents": lambda part: f"{part.documents:,}",
        "… not UTF-8": lambda part: f"{part.broken:,}",
        "tokens": lambda part: f"{part.tokens:,}",
        "bytes per token": lambda part: f"{part.size / part.tokens:.3f}",
    }
    if totals.conversations:
        cells = {
            "conversations": cells["documents"],
            "tokens": cells["tokens"],
            "… learned": lambda part: f"{part.counts.sum():,}",
        }
    if totals.preferences:
        cells.pop("conversations")
        cells = {"pairs": lambda part: f"{part.documents // 2:,}", **cells}
    bos = "".join(f", BOS {i}" for i in tokenizer.prefix)
    loss = entropy(totals.splits["train"].counts)
    rows = [
        ("", *totals.splits),
        *((name, *map(cell, parts)) for name, cell in cells.items()),
        ("unigram entropy", f"{loss:.4f} nats per training token: loss to beat"),
        (
            "vocabulary",
            f"{tokenizer.vocab_size:,} ({totals.dtype}), EOS {tokenizer.eos_id}{bos}",
        ),
    ]
    rows += [
        (
            f"map {each.rule}",
            f"{each.unchanged:,} unchanged, {each.changed:,} changed, {each.dropped:,} dropped",
        )
        for each in total(part.statistics for part in parts)
    ]
    if totals.skipped:
        rows.append(("left out as bad", f"{totals.skipped:,} records"))
    lines = (f"{row[0]:<16} " + "".join(f"{cell:<17}" for cell in row[1:]) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def entropy(counts: Int[np.ndarray, "V"]) -> float:
    """Return the entropy, in nats, of a token drawn with these frequencies.

    This is the loss of a model that predicts the frequency of each token.
    """
    frequencies = counts[counts > 0] / counts.sum()
    return -float(frequencies @ np.log(frequencies))
