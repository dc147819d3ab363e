"""Tokenization of documents to shards: read in order, encode in parallel, write in order.

inputs ─► parts  ─► batches ─► worker processes ─► in order ─► one ShardWriter per split
 (one reader)                  text ─► tokens

Tokens depend on the parts of the text alone. So the shards do not depend on the number of workers.
"""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from itertools import chain, islice
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from jaxtyping import Int

from jaxforge.data.corpus.conversations import encode_conversations, encode_preferences
from jaxforge.data.corpus.documents import TextPart, text_parts
from jaxforge.data.corpus.manifest import FIRST, Options
from jaxforge.data.corpus.records import Input
from jaxforge.data.corpus.tokenizer import Tokenizer, with_prefix
from jaxforge.data.corpus.tokenizer_files import load_tokenizer
from jaxforge.data.corpus.workers import Encoded, Text, Tokens, Workers, serve
from jaxforge.data.corpus.writer import Batch, Corpus

BATCH_BYTES = 1 << 20  # of text per call of a tokenizer, whose results take up to 50 times as much
BATCH_PARTS = 4096
_FEW_BATCHES = 4  # starting processes for them does not pay


def texts_of(batch: Batch) -> list[Text]:
    """Return the fields of a batch that a worker needs."""
    return [(p.split, p.text, p.first, p.last) for p in batch if not p.skipped]


def fill(
    corpus: Corpus,
    inputs: Sequence[Input],
    tokenizer: Tokenizer,
    directory: Path,
    options: Options,
    *,
    is_whole: bool,
    workers: int,
    isolate: bool,
    show: Callable[[Corpus], None],
) -> None:
    """Read the inputs to their end, and add their tokens.

    Args:
        corpus: an empty corpus.
        inputs: in order.
        tokenizer: has an EOS.
        directory: files of the tokenizer, which worker processes read.
        options: see `Options`.
        is_whole: the inputs are all inputs of the corpus.
        workers: number of encoding processes; with 1, this process encodes.
        isolate: encode in another process even so, if the tokenizer is risky.
        show: called with the progress after each batch.

    Raises:
        UserError: an input cannot be read, a shard cannot be written, or a worker died.
    """
    show(corpus)
    with ExitStack() as stack:
        read = batches(
            text_parts(
                inputs,
                validation_fraction=options.validation_fraction,
                max_bytes=options.max_bytes,
                skip_bad=options.skip_bad,
                is_whole=is_whole,
            )
        )
        # In another process, which a panic or an endless pattern may end.
        isolate = isolate and tokenizer.is_risky
        encoded = _encoded(read, tokenizer, directory, options, workers, isolate=isolate)
        for batch, arrived in stack.enter_context(closing(encoded)):
            if options.validation_tokens:
                arrived = _hold_out(corpus, batch, arrived, options, tokenizer)
            corpus.add(batch, arrived)
            show(corpus)


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
    # The parent has loaded this file, so it need not be tried in a child process again.
    tokenizer = load_tokenizer(directory, is_checked=True)
    serve(connection, lambda texts: _encode(tokenizer, texts, options))


def _encode(tokenizer: Tokenizer, texts: Sequence[Text], options: Options) -> Encoded:
    if options.preferences:
        return encode_preferences(tokenizer, texts, options.dtype)
    if options.conversations:
        return conversation_lengths(encode_conversations(tokenizer, texts, options.dtype))
    return encode(tokenizer, texts, options.dtype)


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
        # Some tokenizers have one token for BOS and EOS: the prefix of a document does not end it.
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
        # The first entry has FIRST: differences of the starts cover all entries.
        split: np.diff(np.flatnonzero(array & FIRST), append=len(array))
        for split, array in entries.items()
    }
    return Encoded(entries, lengths)


def split_tokens(
    tokens: Int[np.ndarray, "_"], lengths: Int[np.ndarray, "texts"], count: int
) -> tuple[Int[np.ndarray, "texts"], Int[np.ndarray, "texts"]]:
    """Return the lengths of the texts' parts in `tokens[:count]` and in the other tokens."""
    # [texts]: the end of each text within the first `count` tokens.
    ends = np.minimum(np.cumsum(lengths), min(count, len(tokens)))
    first = np.diff(ends, prepend=0)
    return first, lengths - first


def _hold_out(
    corpus: Corpus, batch: Batch, encoded: Encoded, options: Options, tokenizer: Tokenizer
) -> Encoded:
    """Add the first tokens to "validation" until it is complete; return the tokens to train on."""
    train, held_out = corpus.splits["train"], corpus.splits["validation"]
    missing = options.validation_tokens - held_out.writer.tokens
    if missing <= 0 or "train" not in encoded.tokens:
        return encoded
    arrived, eos = encoded.tokens["train"], tokenizer.eos_id
    # Lengths by text: [texts], the sum of both is the length of each text.
    lengths, other_lengths = split_tokens(arrived, encoded.lengths["train"], missing)
    first, later = arrived[:missing], arrived[missing:]
    documents = int(np.count_nonzero(first == eos))
    is_cut = len(first) == missing and int(first[-1]) != eos  # the document counts in both splits
    # The cut document is complete in both splits: EOS ends it here, its prefix begins it there.
    if is_cut:
        first = np.append(first, np.asarray(eos, first.dtype))
        later = np.append(np.asarray(tokenizer.prefix, later.dtype), later)
    chunks = [chunk for chunk in batch if not chunk.skipped]
    _count_held_out(corpus, chunks, lengths, other_lengths, (is_cut, len(tokenizer.prefix)))
    held_out.writer.add(first, documents + is_cut)
    # `Split.add` will count every document that ends in this batch for the training split.
    train.writer.documents -= documents
    return Encoded({"train": later}, {})


def _count_held_out(
    corpus: Corpus,
    chunks: Sequence[TextPart],
    lengths: Int[np.ndarray, "chunks"],
    other_lengths: Int[np.ndarray, "chunks"],
    cut: tuple[bool, int],
) -> None:
    """Count parts of documents in the statistics of both splits.

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
    for i, (chunk, first, other) in enumerate(
        zip(chunks, lengths.tolist(), other_lengths.tolist(), strict=True)
    ):
        # Bytes of a cut part are divided by tokens, as its bytes per token are not known.
        held = chunk.size * first // (first + other) if first else 0
        ends_here = is_cut and i == last
        if first:
            is_end = ends_here or (chunk.last and not other)
            held_out.add_text(chunk.source, first + ends_here, held, is_end=is_end)
        if other or ends_here:
            tokens = other + prefix * ends_here
            train.add_text(chunk.source, tokens, chunk.size - held, is_end=chunk.last)
