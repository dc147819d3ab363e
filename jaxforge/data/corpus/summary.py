"""What `prepare` prints of the shards that it wrote."""

from collections.abc import Iterable

import numpy as np
from jaxtyping import Int

from jaxforge.data.corpus.ingest import Corpus, Split
from jaxforge.data.corpus.tokenizer import Tokenizer


def table(corpus: Corpus, tokenizer: Tokenizer) -> str:
    """What was written: a row for each thing to know, a column for each split."""
    parts, train = corpus.splits.values(), corpus.splits["train"].writer
    bos = "".join(f", BOS {i}" for i in tokenizer.prefix)
    rows = [
        ("", *corpus.splits),
        *(_conversations(parts) if train.conversations else _documents(parts)),
        ("unigram entropy", f"{entropy(train.counts):.4f} nats per training token: loss to beat"),
        (
            "vocabulary",
            f"{tokenizer.vocab_size:,} ({train.dtype}), EOS {tokenizer.eos_id}{bos}",
        ),
    ]
    if corpus.skipped:
        rows.append(("left out as bad", f"{corpus.skipped:,} records"))
    lines = (f"{row[0]:<17}" + "".join(f"{cell:<17}" for cell in row[1:]) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _documents(parts: Iterable[Split]) -> list[tuple[str, ...]]:
    return [
        ("documents", *(f"{part.writer.documents:,}" for part in parts)),
        ("… not UTF-8", *(f"{part.broken:,}" for part in parts)),
        ("tokens", *(f"{part.writer.tokens:,}" for part in parts)),
        ("bytes per token", *(f"{part.size / part.writer.tokens:.3f}" for part in parts)),
    ]


def _conversations(parts: Iterable[Split]) -> list[tuple[str, ...]]:
    learned = [int(part.writer.counts.sum()) for part in parts]
    return [
        ("conversations", *(f"{part.writer.documents:,}" for part in parts)),
        ("tokens", *(f"{part.writer.tokens:,}" for part in parts)),
        ("… learned", *(f"{tokens:,}" for tokens in learned)),
    ]


def entropy(counts: Int[np.ndarray, "V"]) -> float:
    """Entropy, in nats, of a token drawn with these frequencies.

    It is the loss of a model that knows nothing but how often each token occurs.
    """
    frequencies = counts[counts > 0] / counts.sum()
    return -float(frequencies @ np.log(frequencies))
