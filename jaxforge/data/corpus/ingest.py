"""Tokenization of documents to shards: read in order, encode in parallel, write in order.

inputs ─► parts  ─► batches ─► worker processes ─► in order ─► one ShardWriter per split
 (one reader)                  text ─► tokens         │
                                                      └─► every few seconds: sync, journal

Tokens depend on the parts of the text alone. So the shards do not depend on the number of workers
or on interruptions.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import chain, islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import numpy as np
from jaxtyping import Int

from jaxforge.data.corpus.conversations import encode_conversations
from jaxforge.data.corpus.documents import ReadPosition, TextPart, text_parts
from jaxforge.data.corpus.encoding import conversation_lengths, encode, split_tokens
from jaxforge.data.corpus.manifest import CONVERSATIONS, PREFERENCES, VERSION
from jaxforge.data.corpus.preferences import encode_preferences
from jaxforge.data.corpus.records import Input
from jaxforge.data.corpus.statistics import Statistics
from jaxforge.data.corpus.tokenizer import Tokenizer
from jaxforge.data.corpus.tokenizer_files import load_tokenizer
from jaxforge.data.corpus.workers import Encoded, Text, Workers, serve
from jaxforge.data.corpus.writer import ShardWriter
from jaxforge.errors import UserError
from jaxforge.storage.atomic_directory import AtomicDirectory

BATCH_BYTES = 1 << 20  # of text per call of a tokenizer, whose results take up to 50 times as much
BATCH_PARTS = 4096
_FEW_BATCHES = 4  # starting processes for them does not pay
COMMIT_SECONDS = 5.0  # of work that a killed run may lose

EMPTY_JOURNAL: dict[str, Any] = {"splits": {}, "place": ReadPosition(), "skipped": 0}
"""Journal before the first tokens."""


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


def texts_of(batch: Batch) -> list[Text]:
    """Return the fields of a batch that a worker needs."""
    return [(p.split, p.text, p.first, p.last) for p in batch if not p.skipped]


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

    def journal(self) -> dict[str, Any]:
        """Flush all tokens to the disk and return the progress as JSON."""
        counts = {"size": self.size, "broken": self.broken, "last_broken": self.last_broken}
        statistics = self.statistics.as_json()
        return {"writer": self.writer.sync(), **counts, "statistics": statistics}


@dataclass
class Corpus:
    """Progress of all documents.

    Attributes:
        splits: by name.
        position: position up to which the inputs have been read.
        skipped: number of bad records that were skipped.
    """

    splits: dict[str, Split]
    position: ReadPosition = field(default_factory=ReadPosition)
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
        self.position = batch[-1].end

    def journal(self) -> dict[str, Any]:
        """Flush all tokens to the disk and return the progress as JSON."""
        splits = {name: split.journal() for name, split in self.splits.items()}
        return {"splits": splits, "place": self.position, "skipped": self.skipped}


def ingest(
    inputs: Sequence[Input],
    tokenizer: Tokenizer,
    options: Options,
    destination: AtomicDirectory,
    *,
    tokenizer_name: str,
    workers: int = 1,
    isolate: bool = False,
    show: Callable[[Corpus], None] = lambda _: None,
) -> Corpus:
    """Write `train/`, and `validation/` if documents are held out; resume from the journal.

    Args:
        inputs: in order.
        tokenizer: has an EOS; lies in `destination.out / "tokenizer"`.
        options: see `Options`.
        destination: output directory.
        tokenizer_name: name of the tokenizer in the manifest.
        workers: number of encoding processes; with 1, this process encodes.
        isolate: encode in another process even so, if the tokenizer is risky.
        show: called with the progress after each batch.

    Raises:
        UserError: an input cannot be read, a shard cannot be written, a worker died, or a split
            has no document.
    """
    with ExitStack() as stack:
        corpus = open_corpus(destination.out, destination.journal, tokenizer, options)
        stack.enter_context(corpus)
        fill(
            corpus,
            inputs,
            tokenizer,
            destination.out / "tokenizer",
            options,
            commit=destination.commit,
            workers=workers,
            isolate=isolate,
            show=show,
        )
        _finish(corpus, tokenizer, tokenizer_name, options)
    return corpus


def fill(
    corpus: Corpus,
    inputs: Sequence[Input],
    tokenizer: Tokenizer,
    directory: Path,
    options: Options,
    *,
    commit: Callable[[dict[str, Any]], None],
    is_whole: bool = True,
    workers: int = 1,
    isolate: bool = False,
    show: Callable[[Corpus], None] = lambda _: None,
) -> None:
    """Read the inputs from the corpus's position to their end, and add their tokens.

    Args:
        corpus: progress so far.
        inputs: in order.
        tokenizer: has an EOS.
        directory: files of the tokenizer, which worker processes read.
        options: see `Options`.
        commit: called with `Corpus.journal` every few seconds.
        is_whole: the inputs are all inputs of the corpus.
        workers: see `ingest`.
        isolate: see `ingest`.
        show: see `ingest`.

    Raises:
        UserError: as `ingest`.
    """
    show(corpus)
    with ExitStack() as stack:
        read = batches(
            text_parts(
                inputs,
                validation_fraction=options.validation_fraction,
                max_bytes=options.max_bytes,
                skip_bad=options.skip_bad,
                start=corpus.position,
                before=corpus.size,
                is_whole=is_whole,
            )
        )
        committed = time.monotonic()
        isolate = isolate and tokenizer.is_risky
        encoded = _encoded(read, tokenizer, directory, options, workers, isolate=isolate)
        # One thread reads, writes and commits, so a journal entry is consistent: the position in
        # the inputs is exactly that of the tokens that `sync` has flushed.
        for batch, arrived in stack.enter_context(closing(encoded)):
            if options.validation_tokens:
                arrived = _hold_out(corpus, batch, arrived, options, tokenizer)
            corpus.add(batch, arrived)
            show(corpus)
            if time.monotonic() - committed >= COMMIT_SECONDS:
                commit(corpus.journal())
                committed = time.monotonic()


def open_corpus(
    out: Path,
    journal: dict[str, Any] | None,
    tokenizer: Tokenizer,
    options: Options,
    unit: int | None = None,
    lengths: Callable[[str], Path] | None = None,
) -> Corpus:
    """Return the progress that a journal records, or an empty corpus.

    Args:
        out: directory of the splits.
        journal: the last `Corpus.journal`.
        tokenizer: the tokenizer.
        options: see `Options`.
        unit: number of the unit of work; None if there is only one.
        lengths: returns the file of the conversations' lengths of a split.

    Raises:
        UserError: bad records were skipped before, and are errors now; or the journal is damaged.
    """
    try:
        return _open_corpus(out, journal or EMPTY_JOURNAL, tokenizer, options, unit, lengths)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"the progress in {out.parent} is damaged ({error!r}): remove that directory, and "
            "repeat the command"
        ) from error


def _open_corpus(
    out: Path,
    journal: dict[str, Any],
    tokenizer: Tokenizer,
    options: Options,
    unit: int | None,
    lengths: Callable[[str], Path] | None,
) -> Corpus:
    if journal["skipped"] and not options.skip_bad:
        raise UserError(
            f"the interrupted run skipped {journal['skipped']} bad records; pass "
            f"--skip-bad again, or remove {out.parent}"
        )
    splits = {}
    for name in options.splits:
        state = journal["splits"].get(name, {"writer": None, "statistics": {}})
        writer = ShardWriter(
            out / name,
            vocab_size=tokenizer.vocab_size,
            dtype=options.dtype,
            file_format=options.file_format,
            shard_tokens=options.shard_tokens,
            conversations=options.conversations,
            state=state["writer"],
            unit=unit,
            lengths=lengths and lengths(name),
        )
        statistics = Statistics(**state["statistics"])
        splits[name] = Split(**{**state, "writer": writer, "statistics": statistics})
    return Corpus(splits, ReadPosition(*journal["place"]), journal["skipped"])


def _finish(corpus: Corpus, tokenizer: Tokenizer, name: str, options: Options) -> None:
    counts = {name: split.writer.documents for name, split in corpus.splits.items()}
    check_documents(counts, corpus.skipped, options)
    for split in corpus.splits.values():
        split.writer.finish(
            eos_id=tokenizer.eos_id,
            bos_ids=tokenizer.prefix,
            tokenizer=name,
            tokenizer_sha256=tokenizer.fingerprint,
            statistics=split.statistics.summary(options.rules),
            version=options.version,
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


def batches(chunks: Iterable[TextPart]) -> Iterator[Batch]:
    """Group parts of documents into batches of about a MiB."""
    batch: list[TextPart] = []
    size = 0
    for chunk in chunks:
        batch.append(chunk)
        size += chunk.size
        if size >= BATCH_BYTES or len(batch) == BATCH_PARTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encoded(
    batches: Iterator[Batch],
    tokenizer: Tokenizer,
    directory: Path,
    options: Options,
    workers: int,
    *,
    isolate: bool,
) -> Generator[tuple[Batch, Encoded]]:
    """Yield batches with their tokens, in order."""
    first = list(islice(batches, _FEW_BATCHES + 1))
    if not isolate and (workers == 1 or len(first) <= _FEW_BATCHES):
        for batch in chain(first, batches):
            yield batch, _encode(tokenizer, texts_of(batch), options)
        return
    n = workers if len(first) > _FEW_BATCHES else 1
    with Workers[list[Text], Encoded](n, encode_batches, directory, options, n, isolate) as pool:
        # First in, first out: results leave in the order of submission, whichever worker is done
        # first. At most 2 * workers + 1 batches wait, so memory is bounded, and each worker has a
        # next batch while this thread writes.
        waiting: deque[tuple[Batch, Future[Encoded]]] = deque()
        for batch in chain(first, batches):
            waiting.append((batch, pool.submit(texts_of(batch))))
            if len(waiting) > 2 * workers:
                batch, future = waiting.popleft()
                yield batch, future.result()
        for batch, future in waiting:
            yield batch, future.result()


def encode_batches(
    connection: Connection, directory: Path, options: Options, n: int, is_silent: bool
) -> None:
    """Run one of `n` workers; if `is_silent`, discard the messages of Rust panics on stderr."""
    if n > 1:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    if is_silent:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    tokenizer = load_tokenizer(directory, is_checked=True)
    serve(connection, lambda texts: _encode(tokenizer, texts, options))


def _encode(tokenizer: Tokenizer, texts: Sequence[Text], options: Options) -> Encoded:
    if options.preferences:
        return encode_preferences(tokenizer, texts, options.dtype)
    if options.conversations:
        return conversation_lengths(encode_conversations(tokenizer, texts, options.dtype))
    return encode(tokenizer, texts, options.dtype)


def _hold_out(
    corpus: Corpus, batch: Batch, encoded: Encoded, options: Options, tokenizer: Tokenizer
) -> Encoded:
    """Add the first tokens to "validation" until it is complete; return the tokens to train on."""
    train, held_out = corpus.splits["train"], corpus.splits["validation"]
    missing = options.validation_tokens - held_out.writer.tokens
    if missing <= 0 or "train" not in encoded.tokens:
        return encoded
    arrived, eos = encoded.tokens["train"], tokenizer.eos_id
    lengths, other_lengths = split_tokens(arrived, encoded.lengths["train"], missing)
    first, others = arrived[:missing], arrived[missing:]
    documents = int(np.count_nonzero(first == eos))
    is_cut = len(first) == missing and int(first[-1]) != eos  # the document counts in both splits
    if is_cut:
        first = np.append(first, np.asarray(eos, first.dtype))
        others = np.append(np.asarray(tokenizer.prefix, others.dtype), others)
    chunks = [chunk for chunk in batch if not chunk.skipped]
    size = _count_held_out(corpus, chunks, lengths, other_lengths, (is_cut, len(tokenizer.prefix)))
    held_out.writer.add(first, documents + is_cut)
    held_out.size, train.size = held_out.size + size, train.size - size
    train.writer.documents -= documents
    return Encoded({"train": others}, {})


def _count_held_out(
    corpus: Corpus,
    chunks: Sequence[TextPart],
    lengths: Int[np.ndarray, "chunks"],
    other_lengths: Int[np.ndarray, "chunks"],
    cut: tuple[bool, int],
) -> int:
    """Count parts of documents in the statistics of both splits; return the bytes held out.

    Args:
        corpus: the progress.
        chunks: the parts of a batch.
        lengths: tokens of each part that are held out.
        other_lengths: tokens of each part to train on.
        cut: True if a document is cut, which adds an EOS here and a prefix there; length of that.
    """
    is_cut, prefix = cut
    train, held_out = (corpus.splits[name].statistics for name in ("train", "validation"))
    last = int(np.flatnonzero(lengths)[-1]) if lengths.any() else -1
    size = 0
    for i, (chunk, first, other) in enumerate(
        zip(chunks, lengths.tolist(), other_lengths.tolist(), strict=True)
    ):
        held = chunk.size * first // (first + other) if first else 0
        ends_here = is_cut and i == last
        if first:
            size += held
            is_end = ends_here or (chunk.last and not other)
            held_out.add_text(chunk.source, first + ends_here, held, is_end=is_end)
        if other or ends_here:
            tokens = other + prefix * ends_here
            train.add_text(chunk.source, tokens, chunk.size - held, is_end=chunk.last)
    return size
