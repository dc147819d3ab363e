"""Documents to token shards: read in order, encoded in parallel, written in order.

inputs ─► pieces ─► batches ─► worker processes ─► in order ─► one ShardWriter per split
 (one reader)                  text ─► tokens         │
                                                      └─► every few seconds: sync, journal

Tokens depend on pieces alone, so the shards are the same whatever the number of workers, and
however often the work was interrupted.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import chain, islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxforge.data.corpus.conversations import encode_conversations
from jaxforge.data.corpus.documents import ReadPosition, TextPart, text_parts
from jaxforge.data.corpus.records import Input
from jaxforge.data.corpus.tokenizer import Tokenizer, load_tokenizer, with_prefix
from jaxforge.data.corpus.workers import Text, Tokens, Workers, serve
from jaxforge.data.corpus.writer import ShardWriter
from jaxforge.errors import UserError
from jaxforge.storage.atomic_directory import AtomicDirectory

_BATCH_BYTES = 4 << 20  # of text that a tokenizer gets at a time
_BATCH_PIECES = 4096
_COMMIT_SECONDS = 5.0  # of work that a killed run may lose


@dataclass(frozen=True)
class Options:
    """Options that the shards depend on, next to inputs and tokenizer.

    Attributes:
        dtype: numpy name of the type on disk.
        file_format: "npy" or "bin".
        shard_tokens: tokens per shard.
        validation_fraction: part of the documents to hold out.
        validation_tokens: tokens to hold out instead, the first of the text.
        max_bytes: stop after so much text.
        skip_bad: leave out records that hold no text.
        conversations: documents are those of `Conversations`.
    """

    dtype: str
    file_format: str = "npy"
    shard_tokens: int = 100_000_000
    validation_fraction: float = 0.0
    validation_tokens: int = 0
    max_bytes: int | None = None
    skip_bad: bool = False
    conversations: bool = False

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits that are written."""
        holds_out = self.validation_fraction or self.validation_tokens
        return ("train", "validation") if holds_out else ("train",)


Batch = list[TextPart]
"""Consecutive pieces, which a tokenizer gets together."""


def texts_of(batch: Batch) -> list[Text]:
    """Return what a worker needs of a batch."""
    return [(p.split, p.text, p.first, p.last) for p in batch if not p.skipped]


@dataclass
class Split:
    """Progress of one split, "train" or "validation".

    Attributes:
        writer: its shards.
        size: bytes of text.
        broken: documents that were not UTF-8.
        last_broken: name of the last of them.
    """

    writer: ShardWriter
    size: int = 0
    broken: int = 0
    last_broken: str = ""

    def add(self, chunks: Sequence[TextPart], tokens: Int[np.ndarray, "_"]) -> None:
        """Appends pieces and their tokens."""
        self.writer.add(tokens, sum(chunk.last for chunk in chunks))
        self.size += sum(chunk.size for chunk in chunks)
        for chunk in chunks:
            if not chunk.valid and chunk.document != self.last_broken:
                self.broken, self.last_broken = self.broken + 1, chunk.document

    def journal(self) -> dict[str, Any]:
        """Brings all tokens to the disk; returns the fields, as JSON has them."""
        counts = {"size": self.size, "broken": self.broken, "last_broken": self.last_broken}
        return {"writer": self.writer.sync(), **counts}


@dataclass
class Corpus:
    """Progress of all documents.

    Attributes:
        splits: by name.
        place: how far the inputs are read.
        skipped: bad records left out.
    """

    splits: dict[str, Split]
    position: ReadPosition = field(default_factory=ReadPosition)
    skipped: int = 0

    @property
    def size(self) -> int:
        """Bytes of text."""
        return sum(split.size for split in self.splits.values())

    def add(self, batch: Batch, tokens: Tokens) -> None:
        """Append a batch and its tokens by split."""
        for name, arrived in tokens.items():
            chunks = [p for p in batch if p.split == name and not p.skipped]
            self.splits[name].add(chunks, arrived)
        self.skipped += sum(chunk.skipped for chunk in batch)
        self.position = batch[-1].end

    def journal(self) -> dict[str, Any]:
        """Bring all tokens to the disk, and return the fields as JSON has them."""
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
    """Writes `train/`, and `validation/` if a part is held out, from where the journal ends.

    Args:
        inputs: in order.
        tokenizer: has an EOS; lies in `destination.out / "tokenizer"`.
        options: see there.
        destination: where to.
        tokenizer_name: for the manifest.
        workers: processes that encode; 1 encodes in this one.
        isolate: encode in other processes at any rate, if the tokenizer is risky.
        show: called after each batch.

    Raises:
        UserError: an input cannot be read, a shard cannot be written, a worker died, or a split
            has no document.
    """
    with ExitStack() as stack:
        corpus = _open(destination, tokenizer, options)
        for split in corpus.splits.values():
            stack.enter_context(split.writer)
        read = batches(
            text_parts(
                inputs,
                validation_fraction=options.validation_fraction,
                max_bytes=options.max_bytes,
                skip_bad=options.skip_bad,
                start=corpus.position,
                before=corpus.size,
            )
        )
        committed = time.monotonic()
        directory = destination.out / "tokenizer"
        isolate = isolate and tokenizer.is_risky
        encoded = _encoded(read, tokenizer, directory, options, workers, isolate=isolate)
        for batch, tokens in stack.enter_context(closing(encoded)):
            if options.validation_tokens:
                tokens = _hold_out(corpus, batch, tokens, options, tokenizer)
            corpus.add(batch, tokens)
            show(corpus)
            if time.monotonic() - committed >= _COMMIT_SECONDS:
                destination.commit(corpus.journal())
                committed = time.monotonic()
        _finish(corpus, tokenizer, tokenizer_name, options)
    return corpus


def _open(destination: AtomicDirectory, tokenizer: Tokenizer, options: Options) -> Corpus:
    """The corpus as the journal left it, or an empty one."""
    journal = destination.journal or {"splits": {}, "place": ReadPosition(), "skipped": 0}
    if journal["skipped"] and not options.skip_bad:
        raise UserError(
            f"the run that this one goes on with left {journal['skipped']} bad records out; pass "
            f"--skip-bad again, or remove {destination.out.parent}"
        )
    splits = {}
    for name in options.splits:
        state = journal["splits"].get(name, {"writer": None})
        writer = ShardWriter(
            destination.out / name,
            vocab_size=tokenizer.vocab_size,
            dtype=options.dtype,
            file_format=options.file_format,
            shard_tokens=options.shard_tokens,
            conversations=options.conversations,
            state=state["writer"],
        )
        splits[name] = Split(**{**state, "writer": writer})
    return Corpus(splits, ReadPosition(*journal["place"]), journal["skipped"])


def _finish(corpus: Corpus, tokenizer: Tokenizer, name: str, options: Options) -> None:
    counts = {name: split.writer.documents for name, split in corpus.splits.items()}
    if options.validation_tokens and not counts["train"] and counts["validation"]:
        raise UserError(
            f"--validation-tokens {options.validation_tokens} leaves nothing to train on: the text "
            "has no more; hold fewer out"
        )
    if corpus.skipped and not any(counts.values()):
        raise UserError(
            f"the inputs hold no text: --skip-bad left out all {corpus.skipped} records; without "
            "it, the first is named with what is wrong"
        )
    if not all(counts.values()):
        check_split(counts["train"], counts.get("validation", 0), options.validation_fraction)
    for split in corpus.splits.values():
        split.writer.finish(
            eos_id=tokenizer.eos_id,
            bos_ids=tokenizer.prefix,
            tokenizer=name,
            tokenizer_sha256=tokenizer.fingerprint,
        )


def check_split(train: int, validation: int, fraction: float) -> None:
    """Refuses a split without documents.

    Raises:
        UserError: there is one.
    """
    if not train + validation:
        raise UserError("the inputs hold no text")
    if not train or (fraction and not validation):
        raise UserError(
            f"--validation-fraction {fraction} puts {validation} of {train + validation} "
            "documents into validation; change it, or split the text into more documents"
        )


def batches(chunks: Iterable[TextPart]) -> Iterator[Batch]:
    """Pieces by the few MiB."""
    batch: list[TextPart] = []
    size = 0
    for chunk in chunks:
        batch.append(chunk)
        size += chunk.size
        if size >= _BATCH_BYTES or len(batch) == _BATCH_PIECES:
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
) -> Generator[tuple[Batch, Tokens]]:
    """Batches with their tokens, in order."""
    first = list(islice(batches, 2))
    if not isolate and (workers == 1 or len(first) < 2):
        for batch in chain(first, batches):
            yield batch, _encode(tokenizer, texts_of(batch), options)
        return
    n = workers if len(first) > 1 else 1
    with Workers(n, _encode_batches, directory, options, n, isolate) as pool:
        waiting: deque[tuple[Batch, Future[Tokens]]] = deque()
        for batch in chain(first, batches):
            waiting.append((batch, pool.submit(texts_of(batch))))
            if len(waiting) > 2 * workers:
                batch, future = waiting.popleft()
                yield batch, future.result()
        for batch, future in waiting:
            yield batch, future.result()


def _encode_batches(
    connection: Connection, directory: Path, options: Options, n: int, is_silent: bool
) -> None:
    """One of `n` workers; if `is_silent`, Rust's words on its panics are not shown."""
    if n > 1:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    if is_silent:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    tokenizer = load_tokenizer(directory, is_checked=True)
    serve(connection, lambda texts: _encode(tokenizer, texts, options))


def _encode(tokenizer: Tokenizer, texts: Sequence[Text], options: Options) -> Tokens:
    function = encode_conversations if options.conversations else encode
    return function(tokenizer, texts, options.dtype)


def encode(tokenizer: Tokenizer, texts: Sequence[Text], dtype: str) -> Tokens:
    """Tokens by split.

    Args:
        tokenizer: has an EOS.
        texts: of a batch.
        dtype: numpy name of the type to return.
    """
    parts: dict[str, list[Int[np.ndarray, "_"]]] = {}
    end = np.asarray([tokenizer.eos_id], dtype)
    encoded = tokenizer.encode_batch([text for _, text, *_ in texts])
    for (split, _, first, last), ids in zip(texts, encoded, strict=True):
        begun = with_prefix(tokenizer, ids) if first else ids
        parts.setdefault(split, []).append(np.asarray(begun, dtype))
        if last:
            parts[split].append(end)
    return {split: np.concatenate(arrays) for split, arrays in parts.items()}


def _hold_out(
    corpus: Corpus, batch: Batch, tokens: Tokens, options: Options, tokenizer: Tokenizer
) -> Tokens:
    """Adds to "validation" what it needs of the first tokens; what is left to train on."""
    train, held_out = corpus.splits["train"], corpus.splits["validation"]
    missing = options.validation_tokens - held_out.writer.tokens
    if missing <= 0 or "train" not in tokens:
        return tokens
    arrived, eos = tokens["train"], tokenizer.eos_id
    first, others = arrived[:missing], arrived[missing:]
    documents = int(np.count_nonzero(first == eos))
    size = sum(chunk.size for chunk in batch) * len(first) // len(arrived)
    is_cut = len(first) == missing and int(first[-1]) != eos  # and is a document in either split
    if is_cut:
        first = np.append(first, np.asarray(eos, first.dtype))
        others = np.append(np.asarray(tokenizer.prefix, others.dtype), others)
    held_out.writer.add(first, documents + is_cut)
    held_out.size, train.size = held_out.size + size, train.size - size
    train.writer.documents -= documents
    return {"train": others}
