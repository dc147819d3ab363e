"""State of a unit of a corpus that is being written, and the options of the corpus."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
from jaxtyping import Int

from jaxforge.data.corpus.documents import TextPart
from jaxforge.data.corpus.manifest import CONVERSATIONS, PREFERENCES, VERSION
from jaxforge.data.corpus.statistics import Statistics
from jaxforge.data.corpus.workers import Encoded
from jaxforge.data.corpus.writer import ShardWriter
from jaxforge.errors import UserError


@dataclass(frozen=True)
class Options:
    """Options that the shards depend on, in addition to inputs and tokenizer.

    Attributes:
        dtype: numpy name of the type on disk.
        file_format: "npy" or "bin".
        shard_tokens: tokens per shard.
        validation_fraction: fraction of the documents to hold out.
        validation_tokens: number of first tokens to hold out instead.
        max_bytes: bytes of text after which to stop.
        skip_bad: skip records without text.
        conversations: documents are conversations (`Conversations.document`).
        preferences: documents are pairs of conversations (`Preferences.document`).
        rules: names of the maps, in order.
    """

    dtype: str
    file_format: str = "npy"
    shard_tokens: int = 100_000_000
    validation_fraction: float = 0.0
    validation_tokens: int = 0
    max_bytes: int | None = None
    skip_bad: bool = False
    conversations: bool = False
    preferences: bool = False
    rules: tuple[str, ...] = ()

    @property
    def version(self) -> int:
        """The version of the manifest."""
        if self.preferences:
            return PREFERENCES
        return CONVERSATIONS if self.conversations else VERSION

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits to write."""
        holds_out = self.validation_fraction or self.validation_tokens
        return ("train", "validation") if holds_out else ("train",)


Batch = list[TextPart]
"""Consecutive parts of documents that are tokenized in one call."""


@dataclass
class Split:
    """Progress of one split, "train" or "validation".

    Attributes:
        writer: writer of the shards.
        size: bytes of text.
        broken: number of documents that were not UTF-8.
        last_broken: name of the last such document.
        statistics: statistics of the documents.
    """

    writer: ShardWriter
    size: int = 0
    broken: int = 0
    last_broken: str = ""
    statistics: Statistics = field(default_factory=Statistics)

    def add(
        self,
        chunks: Sequence[TextPart],
        tokens: Int[np.ndarray, "_"],
        lengths: Int[np.ndarray, "chunks"] | None = None,
    ) -> None:
        """Append parts of documents and their tokens.

        Args:
            chunks: the parts.
            tokens: tokens of all parts.
            lengths: number of tokens of each part; None if they are counted already.
        """
        if lengths is not None:
            self.statistics.add(chunks, lengths)
        self.writer.add(tokens, sum(chunk.last for chunk in chunks))
        self.size += sum(chunk.size for chunk in chunks)
        for chunk in chunks:
            if not chunk.valid and chunk.document != self.last_broken:
                self.broken, self.last_broken = self.broken + 1, chunk.document


@dataclass
class Corpus:
    """Progress of all documents.

    Attributes:
        splits: by name.
        skipped: number of bad records that were skipped.
    """

    splits: dict[str, Split]
    skipped: int = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for split in self.splits.values():
            split.writer.__exit__(*error)

    @property
    def size(self) -> int:
        """Bytes of text."""
        return sum(split.size for split in self.splits.values())

    @property
    def documents(self) -> int:
        """Documents in all splits."""
        return sum(split.writer.documents for split in self.splits.values())

    @property
    def tokens(self) -> int:
        """Tokens in all splits."""
        return sum(split.writer.tokens for split in self.splits.values())

    def add(self, batch: Batch, encoded: Encoded) -> None:
        """Append a batch and its tokens by split."""
        for name, arrived in encoded.tokens.items():
            chunks = [p for p in batch if p.split == name and not p.skipped]
            self.splits[name].add(chunks, arrived, encoded.lengths.get(name))
        for name, split in self.splits.items():
            split.statistics.add_outcomes(p for p in batch if p.outcomes and p.split == name)
        self.skipped += sum(chunk.is_bad for chunk in batch)


def open_corpus(
    out: Path,
    options: Options,
    unit: int | None,
    lengths: Callable[[str], Path],
) -> Corpus:
    """Return an empty corpus.

    Args:
        out: directory of the splits.
        options: see `Options`.
        unit: number of the unit of work; None if there is only one.
        lengths: returns the file of the conversations' lengths of a split.
    """
    return Corpus(
        {
            name: Split(
                ShardWriter(
                    out / name,
                    dtype=options.dtype,
                    file_format=options.file_format,
                    shard_tokens=options.shard_tokens,
                    conversations=options.conversations,
                    unit=unit,
                    lengths=lengths(name),
                )
            )
            for name in options.splits
        }
    )


def check_documents(counts: Mapping[str, int], skipped: int, options: Options) -> None:
    """Check the numbers of documents by split, after `skipped` bad records.

    Raises:
        UserError: a split has no document.
    """
    if options.validation_tokens and not counts["train"] and counts["validation"]:
        raise UserError(
            f"--validation-tokens {options.validation_tokens} leaves nothing to train on: the text "
            "has no more; hold fewer out"
        )
    if skipped and not any(counts.values()):
        raise UserError(
            f"the inputs hold no text: --skip-bad left out all {skipped} records; without "
            "it, the first is named with what is wrong"
        )
    if not all(counts.values()):
        check_split(counts["train"], counts.get("validation", 0), options.validation_fraction)


def check_split(train: int, validation: int, fraction: float) -> None:
    """Check that every split has a document.

    Raises:
        UserError: a split has none.
    """
    if not train + validation:
        raise UserError("the inputs hold no text")
    if not train or (fraction and not validation):
        raise UserError(
            f"--validation-fraction {fraction} puts {validation} of {train + validation} "
            "documents into validation; change it, or split the text into more documents"
        )
