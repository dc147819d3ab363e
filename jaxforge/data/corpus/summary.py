"""Summary that `prepare` prints of the shards it has written."""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int

from jaxforge.data.corpus.ingest import Corpus, Split
from jaxforge.data.corpus.statistics import total
from jaxforge.data.corpus.tokenizer import Tokenizer


def table(corpus: Corpus, tokenizer: Tokenizer, rules: Sequence[str] = ()) -> str:
    """Return a table of the results with a column for each split.

    Args:
        corpus: the results.
        tokenizer: the tokenizer.
        rules: names of the maps, in order.
    """
    parts, train = corpus.splits.values(), corpus.splits["train"].writer
    cells: dict[str, Callable[[Split], str]] = {
        "documents": lambda part: f"{part.writer.documents:,}",
        "… not UTF-8": lambda part: f"{part.broken:,}",
        "tokens": lambda part: f"{part.writer.tokens:,}",
        "bytes per token": lambda part: f"{part.size / part.writer.tokens:.3f}",
    }
    if train.conversations:
        cells = {
            "conversations": cells["documents"],
            "tokens": cells["tokens"],
            "… learned": lambda part: f"{part.writer.counts.sum():,}",
        }
    bos = "".join(f", BOS {i}" for i in tokenizer.prefix)
    rows = [
        ("", *corpus.splits),
        *((name, *map(cell, parts)) for name, cell in cells.items()),
        ("unigram entropy", f"{entropy(train.counts):.4f} nats per training token: loss to beat"),
        (
            "vocabulary",
            f"{tokenizer.vocab_size:,} ({train.dtype}), EOS {tokenizer.eos_id}{bos}",
        ),
    ]
    statistics = [part.statistics.summary(rules) for part in parts]
    rows += [
        (
            f"map {each.rule}",
            f"{each.unchanged:,} unchanged, {each.changed:,} changed, {each.dropped:,} dropped",
        )
        for each in total(statistics)
    ]
    if corpus.skipped:
        rows.append(("left out as bad", f"{corpus.skipped:,} records"))
    lines = (f"{row[0]:<16} " + "".join(f"{cell:<17}" for cell in row[1:]) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def entropy(counts: Int[np.ndarray, "V"]) -> float:
    """Return the entropy, in nats, of a token drawn with these frequencies.

    This is the loss of a model that predicts the frequency of each token.
    """
    frequencies = counts[counts > 0] / counts.sum()
    return -float(frequencies @ np.log(frequencies))
