"""Streaming writer of token shards, and the splits of a unit of work that it writes.

Memory is independent of the sizes of corpus and shards.

    add ──► held tokens ──(1 Mi tokens)──► open file ──(complete: header, fsync)──► shard

A killed writer leaves files without a meaning: the unit that wrote them is written again.
"""

import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np
from jaxtyping import Int

from jaxforge.data.corpus.documents import TextPart
from jaxforge.data.corpus.manifest import (
    FIRST,
    ID,
    LENGTHS,
    Options,
    Shard,
    extend_hashes,
)
from jaxforge.data.corpus.statistics import Statistics
from jaxforge.data.corpus.workers import Encoded
from jaxforge.errors import UserError, file_error

CHUNK = 1 << 20  # tokens held before they are written


def token_dtype(name: str | None, vocab_size: int) -> str:
    """Return the type of tokens on disk: `name`, or the smallest of uint16 and uint32 that fits.

    Raises:
        UserError: `name` does not hold the vocabulary.
    """
    smallest = "uint16" if vocab_size <= 2**16 else "uint32"
    if name and np.iinfo(name).max < vocab_size - 1:
        raise UserError(f"--dtype {name} cannot hold a vocabulary of {vocab_size}; use {smallest}")
    return name or smallest


def shard_header(tokens: int, dtype: str, file_format: str) -> bytes:
    """Return the bytes of a complete shard before its tokens."""
    header = io.BytesIO()
    if file_format == "npy":
        descr = np.dtype(dtype).newbyteorder("<").str
        layout = {"descr": descr, "fortran_order": False, "shape": (tokens,)}
        np.lib.format.write_array_header_1_0(header, layout)
    return header.getvalue()


def lengths_bytes(conversations: int) -> int:
    """Return the size of the file of the conversations' lengths."""
    return 4 * conversations


class ShardWriter:
    """Writer of `shard_00000.npy`, `shard_00001.npy`, … and the final manifest.

    The shards of a unit of work are `shard_000012_00000.npy`, …, without a manifest of their own.

    A document may continue in the next shard. Conversations must be added whole and are not split.
    Use the writer in a `with` statement, which closes the current file on an error.

    Args:
        directory: output directory; must not exist unless `lengths` is given.
        dtype: numpy name of the type on disk.
        file_format: "npy" or "bin".
        shard_tokens: tokens per shard. The last has fewer; shards of conversations may exceed it.
        conversations: entries (`corpus.manifest`) are added; the length of each conversation is
            recorded.
        unit: number of the unit; None if the directory has only one.
        lengths: file of the conversations' lengths; by default `LENGTHS` in the directory.

    Attributes:
        tokens: tokens added so far.
        documents: documents ended so far.
        dtype: numpy name of the type on disk.
        conversations: True if entries are added.
        learned: tokens with a loss written so far; 0 for text. Complete after `complete`.

    Raises:
        UserError: a file cannot be written (from every method).
        StorageError: the disk is full, or fails (from every method).
    """

    def __init__(
        self,
        directory: Path,
        *,
        dtype: str,
        file_format: str = "npy",
        shard_tokens: int = 100_000_000,
        conversations: bool = False,
        unit: int | None = None,
        lengths: Path | None = None,
    ) -> None:
        self._directory, self._format, self._shard_tokens = directory, file_format, shard_tokens
        self._unit, self._lengths = unit, lengths or directory / LENGTHS
        self.conversations = conversations
        self.dtype, self._dtype = dtype, np.dtype(dtype).newbyteorder("<")
        self.tokens = self.documents = self.learned = 0
        self._held: list[Int[np.ndarray, "_"]] = []
        self._written = 0  # number of tokens passed to the operating system
        self._shards: list[Shard] = []
        self._file: BinaryIO | None = None  # the last shard, until it is complete
        with _named(directory):
            # Units share the directory of a split; a writer alone must not mix with older shards.
            directory.mkdir(parents=True, exist_ok=lengths is not None)
            self._lengths.unlink(missing_ok=True)  # of an attempt that was lost

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file:
            with suppress(OSError):  # closing flushes, which fails again on a full disk
                self._file.close()

    def add(self, tokens: Int[np.ndarray, "_"] | Sequence[int], documents: int = 0) -> None:
        """Append tokens.

        Args:
            tokens: the tokens, EOS included.
            documents: number of documents that end in `tokens`; conversations are counted.
        """
        self._held.append(np.asarray(tokens, self._dtype))
        if self.conversations:  # a record may hold several
            documents = int(np.count_nonzero(self._held[-1] & FIRST))
        self.documents += documents
        self.tokens += len(tokens)
        if self.tokens - self._written >= CHUNK:
            self._write_held()

    def complete(self) -> tuple[Shard, ...]:
        """Complete the last shard and return all shards. Nothing can be added after that."""
        self._write_held()
        self._complete_shard()
        self._sync_lengths()
        return tuple(self._shards)

    def _write_held(self) -> None:
        if not self._held:
            return
        held, self._held = np.concatenate(self._held), []
        self._written = self.tokens
        if self.conversations:
            # Conversations are added whole, so the held entries begin with FIRST, and differences
            # of the starts are lengths of whole conversations. A learned entry has no bit above ID.
            self.learned += int(np.count_nonzero(held <= ID))
            starts = np.flatnonzero(held & FIRST)
            lengths = np.diff(starts, append=len(held)).astype("<u4")
            with _named(self._lengths), self._lengths.open("ab") as file:
                file.write(lengths.tobytes())
        while len(held):
            held = held[self._write(held) :]

    def _write(self, tokens: Int[np.ndarray, "_"]) -> int:
        """Write as many of `tokens` as the current shard has room for; return their number."""
        file = self._file or self._begin_shard()
        shard = self._shards[-1]
        room = self._shard_tokens - shard.tokens
        if self.conversations and room < len(tokens):
            # Split before the next conversation, so that none spans two shards:
            #   tokens  F . . . F . . . . F . . .
            #   room    - - - - - -
            #   part    - - - - - - - - -
            begun = np.flatnonzero(tokens[room:] & FIRST)
            room = room + int(begun[0]) if len(begun) else len(tokens)
        part = tokens[:room]
        data = part.tobytes()
        with _named(self._directory / shard.file):
            file.write(data)
        self._shards[-1] = Shard(
            shard.file,
            shard.tokens + len(part),
            max(shard.max_token, int((part & ID if self.conversations else part).max())),
            extend_hashes(shard.crc32, shard.tokens * self._dtype.itemsize, data),
        )
        if self._shards[-1].tokens >= self._shard_tokens:
            self._complete_shard()
        return len(part)

    def _sync_lengths(self) -> None:
        if self.conversations:
            # fsync acts on the file, whichever descriptor wrote to it.
            with _named(self._lengths), self._lengths.open("ab") as file:
                os.fsync(file.fileno())

    def _shard_name(self, number: int) -> str:
        unit = "" if self._unit is None else f"{self._unit:06d}_"
        return f"shard_{unit}{number:05d}.{self._format}"

    def _begin_shard(self) -> BinaryIO:
        shard = Shard(self._shard_name(len(self._shards)), 0, 0)
        path = self._directory / shard.file
        with _named(path):
            path.unlink(missing_ok=True)  # of an attempt that was lost
            self._file = file = path.open("wb")
            # Reserves the bytes of the header: the number of tokens is known at the end.
            self._write_header(file, 0)
        self._shards.append(shard)
        return file

    def _complete_shard(self) -> None:
        if not self._file:
            return
        with _named(self._directory / self._shards[-1].file), self._file as file:
            file.seek(0)  # the header has said 0 tokens so far
            self._write_header(file, self._shards[-1].tokens)
            # Durable before `Parts.write` names the shard.
            file.flush()
            os.fsync(file.fileno())
        self._file = None

    def _write_header(self, file: BinaryIO, tokens: int) -> None:
        """Write a .npy header; NumPy pads it, so its size is the same for any number of tokens."""
        file.write(shard_header(tokens, self.dtype, self._format))


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Convert OSError to one message with the path."""
    try:
        yield
    except OSError as error:
        raise file_error(f"cannot write {path}", error) from error


Batch = list[TextPart]
"""Consecutive parts of documents that are tokenized in one call."""


@dataclass
class Split:
    """Progress of one split, "train" or "validation".

    Attributes:
        writer: writer of the shards.
        broken: number of documents that were not UTF-8.
        last_broken: name of the last such document.
        statistics: statistics of the documents.
    """

    writer: ShardWriter
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
        for chunk in chunks:
            # Parts of a document follow one another: the last name suffices to count each once.
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
        return sum(split.statistics.size for split in self.splits.values())

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
            # Also of records that maps dropped, which have no tokens above.
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
