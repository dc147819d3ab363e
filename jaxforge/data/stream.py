"""Streaming Hugging Face datasets: windows in an order that can be resumed at any position.

Index spaces:
    file      a file of the split. Stream g of G reads the files g, g + G, ..., in a new order
              each epoch. G is the largest common divisor of the number of files and the rows of
              a microbatch, up to 16.
    stream    the documents of its files, epoch after epoch, each ended by EOS. Streams
              are independent: each begins its next epoch when its own files end.
    window    S + 1 consecutive tokens of a stream, counted over its epochs; windows are
              adjacent, and the remainder of an epoch is not used.
    block     consecutive windows of an epoch, about a million tokens; with `data.shuffle`, the
              windows within a block are shuffled. Conversations are packed block by block.
    position  of the run, as in `loader`. The rows of a microbatch are split into G equal
              ranges, one per stream. The windows of a stream go to its rows in order.

So a batch is a function of (dataset, config, position), independent of hosts and devices. A host
reads only the streams of its own rows.

To resume without reading everything before a window, each stream writes anchors to `stream/` in
the run directory: positions in its files at which some blocks begin. Without anchors, the stream
is read from its beginning, with the same result.
"""

import hashlib
import json
import logging
import math
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Int

from jaxforge.config.data import Overlong
from jaxforge.data.corpus.conversations import Conversations, encode_conversations
from jaxforge.data.corpus.documents import ReadPosition, text_parts
from jaxforge.data.corpus.files import InputSpan
from jaxforge.data.corpus.huggingface import HuggingFace
from jaxforge.data.corpus.ingest import batches, encode, texts_of
from jaxforge.data.corpus.manifest import FIRST, ID
from jaxforge.data.corpus.records import Content
from jaxforge.data.corpus.tokenizer import Tokenizer, identity
from jaxforge.data.corpus.workers import Text
from jaxforge.data.packing import Packed, fill_window
from jaxforge.errors import UserError
from jaxforge.storage import safe_files

if TYPE_CHECKING:
    from datasets import IterableDataset

log = logging.getLogger(__name__)

_MAX_STREAMS = 16  # open at a time on a single host
BLOCK_TOKENS = 1 << 20  # range of the shuffle of windows
ANCHOR_SECONDS = 30.0  # between anchors: reading that a restart may repeat
_LAYOUT = "layout.json"


class Anchor(NamedTuple):
    """Position of a block of windows in the files of a stream.

    Attributes:
        window: number of the first window of the block.
        epoch: epoch of the stream.
        file: position of the file in the order of the epoch.
        record: records of the file to skip.
        offset: bytes of the next record to skip.
        drop: tokens after that position to skip.
    """

    window: int = 0
    epoch: int = 0
    file: int = 0
    record: int = 0
    offset: int = 0
    drop: int = 0


@dataclass(frozen=True)
class StreamedTokens:
    """Windows of a streaming dataset, before it is started at a position.

    Attributes:
        name: name of the dataset in messages.
        dataset: the rows.
        content: selects the text of a row.
        tokenizer: a tokenizer with an EOS.
        window: S + 1.
        vocab_size: all tokens are below.
        seed: seed of the order.
        shuffle: False reads files and windows in order.
        directory: directory of layout and anchors, shared by all processes.
        overlong: treatment of conversations longer than a window: `data.overlong`.
    """

    name: str
    dataset: "IterableDataset"
    content: Content
    tokenizer: Tokenizer
    window: int
    vocab_size: int
    seed: int
    shuffle: bool
    directory: Path
    overlong: Overlong = "truncate"

    def start(self, first: int, rows: int, local_rows: Sequence[int]) -> "Streams":
        """Open the streams of some rows.

        Args:
            first: first position; begins a microbatch.
            rows: rows of a microbatch.
            local_rows: the rows that will be read.

        Raises:
            UserError: `rows` do not divide by the streams that the run began with.
        """
        n_streams = self._n_streams(rows)
        # Row r of a microbatch belongs to stream r // per_stream.
        per_stream = rows // n_streams
        needed = sorted({row // per_stream for row in local_rows})
        readers = {
            g: _Reader(
                # The anchors of a stream are written where its first row is read.
                self._stream(g, n_streams, writes=g * per_stream in local_rows),
                # Each stream has filled the same number of rows before `first`.
                first // n_streams,
                per_stream,
                {row % per_stream for row in local_rows if row // per_stream == g},
            )
            for g in needed
        }
        return Streams(first, rows, per_stream, readers)

    def file(self, index: int, first: int = 0) -> HuggingFace:
        """Return one file of the dataset, from row `first` on."""
        n_files = self.dataset.num_shards
        rows = self.dataset.shard(n_files, index, contiguous=False)
        name, span = f"{self.name}, file {index} of {n_files}", InputSpan(first, sys.maxsize)
        return HuggingFace(name, rows, self.content, span)

    @property
    def conversations(self) -> bool:
        """True if windows consist of conversation entries."""
        return isinstance(self.content, Conversations)

    def encode(self, texts: Sequence[Text]) -> Int[np.ndarray, "_"]:
        """Return the tokens, or conversation entries, of documents.

        Raises:
            UserError: a token is outside the vocabulary of the model.
        """
        if self.conversations:
            by_split = encode_conversations(self.tokenizer, texts, "int32")
        else:
            by_split = encode(self.tokenizer, texts, "int32").tokens
        tokens = by_split["train"]
        # Entries have flag bits above the id, which text leaves 0.
        self.check(tokens & ID)
        return tokens

    def check(self, tokens: Int[np.ndarray, "_"]) -> None:
        """Refuse tokens outside the vocabulary of the model.

        Raises:
            UserError: there is such a token.
        """
        if tokens.max() >= self.vocab_size:
            raise UserError(
                f"{self.name}: token {tokens.max()} is outside the vocabulary of "
                f"{self.vocab_size}; set model.vocab_size to {self.tokenizer.vocab_size}"
            )

    def _n_streams(self, rows: int) -> int:
        """Return G: as recorded by the first start of the run, else the largest common divisor."""
        path = self.directory / _LAYOUT
        if not path.exists():
            common = math.gcd(self.dataset.num_shards, rows)
            n_streams = max(n for n in range(1, _MAX_STREAMS + 1) if common % n == 0)
            # Recorded, because the run may resume with another number of rows.
            self.directory.mkdir(parents=True, exist_ok=True)
            safe_files.replace_text(
                path, json.dumps({"streams": n_streams}) + "\n"
            )  # each process, the same
            return n_streams
        n_streams = json.loads(path.read_text())["streams"]
        if rows % n_streams:
            raise UserError(
                f"this run reads {n_streams} streams ({path}), by which the {rows} sequences of a "
                f"microbatch must divide: change train.batch_size or train.global_batch_size"
            )
        return n_streams

    def _stream(self, index: int, n_streams: int, *, writes: bool) -> "_Stream":
        files = range(index, self.dataset.num_shards, n_streams)
        source = [self.name, *self.content.identity, *identity(self.tokenizer)]
        # Anchors are valid for the same tokens in the same order: all that determines these.
        settings = [*source, self.dataset.num_shards, self.seed, self.shuffle, n_streams]
        key = json.dumps([*settings, self.overlong] if self.conversations else settings)
        name = f"{hashlib.sha256(key.encode()).hexdigest()[:8]}-{index:02d}.jsonl"
        return _Stream(self, index, files, self.directory / name, writes)


class Streams:
    """Started streams as a source of windows. Thread-safe; each window can be read once."""

    def __init__(
        self, first: int, rows: int, per_stream: int, readers: "dict[int, _Reader]"
    ) -> None:
        self._first, self._rows, self._per_stream = first, rows, per_stream
        self._readers = readers

    def __len__(self) -> int:
        return sys.maxsize  # epochs never end

    def __getitem__(self, position: int) -> Int[np.ndarray, "S+1"]:
        """Return the window at a position of a local row, int32 [S + 1]."""
        microbatch, row = divmod(position - self._first, self._rows)
        stream, index = divmod(row, self._per_stream)
        return self._readers[stream].take(microbatch * self._per_stream + index)

    def batch(self, positions: Sequence[int]) -> Int[np.ndarray, "n S+1"]:
        """Return the windows at some positions, int32 [n, S + 1]."""
        return np.stack([self[position] for position in positions])


class _Reader:
    """Buffer that returns the windows of a stream in the order of requests.

    Args:
        stream: the stream.
        first: window of the stream that has number 0 here.
        rows: number of rows of a microbatch that the stream fills.
        local: the rows that this process reads; other windows are dropped.
    """

    def __init__(self, stream: "_Stream", first: int, rows: int, local: Collection[int]) -> None:
        self._windows = enumerate(stream.windows(first))
        self._rows, self._local = rows, local
        self._read: dict[int, Int[np.ndarray, "S+1"]] = {}
        self._lock = Lock()

    def take(self, number: int) -> Int[np.ndarray, "S+1"]:
        """Return window `number` and drop it from the buffer."""
        with self._lock:
            # Threads ask out of order: windows that are read before they are asked for are held.
            while number not in self._read:
                i, window = next(self._windows)
                if i % self._rows in self._local:
                    self._read[i] = window
            return self._read.pop(number)


class _Stream:
    """One stream: every G-th file, in endless epochs.

    Args:
        source: the dataset.
        index: g.
        files: numbers of the files.
        path: file of the anchors.
        writes: True if this process writes the anchors.
    """

    def __init__(
        self, source: StreamedTokens, index: int, files: range, path: Path, writes: bool
    ) -> None:
        self._source, self._index, self._files = source, index, files
        self._path, self._writes = path, writes
        self._anchored = time.monotonic()
        self._warned = False  # of conversations that are too long

    def windows(self, first: int) -> Iterator[Int[np.ndarray, "S+1"]]:
        """Return the windows from `first` on; one block is read ahead."""
        anchors = [anchor for anchor in self._anchors() if anchor.window <= first]
        # Anchors compare by their window first.
        start = max(anchors, default=Anchor())
        blocks = _prefetched(self._blocks(start))
        return islice((window for block in blocks for window in block), first - start.window, None)

    def _blocks(self, start: Anchor) -> Iterator[Int[np.ndarray, "windows S+1"]]:
        window = start.window
        of_epoch = self._conversation_blocks if self._source.conversations else self._text_blocks
        while True:
            for anchor, block in of_epoch(start):
                self._write_anchor(anchor)
                window = anchor.window + len(block)
                # Seeded by the first window: a restart shuffles a block in the same way.
                yield block[self._permutation(len(block), 1, anchor.window)]
            # A whole epoch without a window: the next ones would be as empty, without end.
            if start == Anchor(window, start.epoch):
                too_little = (
                    "no conversation that fits into a sequence"
                    if self._source.conversations
                    else f"less text than the {self._source.window} tokens of a sequence"
                )
                files = list(self._files)
                raise UserError(f"{self._source.name}: files {files} hold {too_little}")
            start = Anchor(window, start.epoch + 1)

    def _text_blocks(
        self, start: Anchor
    ) -> Iterator[tuple[Anchor, Int[np.ndarray, "windows S+1"]]]:
        """Yield the remaining epoch in blocks; tokens after the last window are not used."""
        width = self._source.window
        full = max(1, BLOCK_TOKENS // width)
        held: list[tuple[_ChunkPosition, Int[np.ndarray, "_"]]] = []
        # Invariant: `held` has the chunks from the first unused token on, `drop` is the number of
        # used tokens in its first chunk, and `size` counts the unused tokens.
        window, drop, size = start.window, start.drop, -start.drop
        for chunk in chain(self._chunks(start), [None]):
            if chunk is not None:
                held.append(chunk)
                size += len(chunk[1])
            while size >= (full if chunk is not None else 1) * width:
                n = min(full, size // width)
                tokens = np.concatenate([tokens for _, tokens in held])[drop:]
                yield (
                    Anchor(window, start.epoch, *held[0][0], drop),
                    tokens[: n * width].reshape(n, width),
                )
                window, drop, size = window + n, drop + n * width, size - n * width
                while held and drop >= len(held[0][1]):
                    drop -= len(held.pop(0)[1])

    def _conversation_blocks(
        self, start: Anchor
    ) -> Iterator[tuple[Anchor, Int[np.ndarray, "windows S+1"]]]:
        """Yield the remaining epoch in blocks of packed conversations."""
        window, size = start.window, 0
        # A block ends with a chunk, so that its anchor drops no tokens (`Anchor.drop` is 0).
        held: list[tuple[_ChunkPosition, Int[np.ndarray, "_"]]] = []
        for chunk in chain(self._chunks(start), [None]):
            if chunk is not None:
                held.append(chunk)
                size += len(chunk[1])
            if held and (chunk is None or size >= BLOCK_TOKENS):
                block = self._pack(np.concatenate([entries for _, entries in held]))
                yield Anchor(window, start.epoch, *held[0][0]), block
                window, held, size = window + len(block), [], 0

    def _pack(self, entries: Int[np.ndarray, "_"]) -> Int[np.ndarray, "windows S+1"]:
        starts = np.flatnonzero(entries & FIRST)
        lengths = np.diff(starts, append=len(entries))
        packed = Packed(lengths, self._source.window, self._source.overlong)
        if packed.overlong and not self._warned:
            self._warned = True
            log.warning("%s: %s", self._source.name, packed.summary)
        windows = [
            fill_window(
                [entries[starts[i] : starts[i] + packed.lengths[i]] for i in packed[window]],
                self._source.window,
            )
            for window in range(len(packed))
        ]
        return np.stack(windows) if windows else np.empty((0, self._source.window), np.int32)

    def _chunks(self, start: Anchor) -> "Iterator[tuple[_ChunkPosition, Int[np.ndarray, '_']]]":
        """Yield the tokens from `start` to the end of the epoch with the position of each chunk."""
        source, position = self._source, ReadPosition(start.record, start.offset)
        order = self._permutation(len(self._files), 0, start.epoch)
        for i, file in enumerate(order[start.file :].tolist(), start.file):
            rows = source.file(self._files[file], position.record)
            for batch in batches(text_parts([rows], offset=position.offset)):
                yield (
                    _ChunkPosition(i, position.record, position.offset),
                    source.encode(texts_of(batch)),
                )
                position = batch[-1].end
            # Only the first file is resumed in its middle.
            position = ReadPosition()

    def _permutation(self, n: int, kind: int, number: int) -> Int[np.ndarray, "n"]:
        """Return 0 ... n-1, shuffled by raw random words: NumPy's own shuffles may change."""
        if not self._source.shuffle:
            return np.arange(n)
        counter = [0, self._index, kind, number]
        words = np.random.Philox(key=self._source.seed % 2**128, counter=counter).random_raw(n)
        return np.argsort(words, kind="stable")

    def _anchors(self) -> list[Anchor]:
        if not self._path.exists():
            return []
        return [Anchor(*json.loads(line)) for line in self._path.read_text().splitlines()]

    def _write_anchor(self, anchor: Anchor) -> None:
        if not self._writes or time.monotonic() - self._anchored < ANCHOR_SECONDS:
            return
        self._anchored = time.monotonic()
        # Anchors of earlier starts stay valid, and may lie beyond this one.
        known = {*self._anchors(), anchor}
        safe_files.replace_text(
            self._path, "".join(f"{json.dumps(position)}\n" for position in sorted(known))
        )


class _ChunkPosition(NamedTuple):
    """Position in an epoch of a stream; fields as of `Anchor`."""

    file: int
    record: int
    offset: int


_T = TypeVar("_T")


def _prefetched(items: Iterator[_T]) -> Iterator[_T]:
    """Yield endless `items`; a thread prepares the next item while the current one is used."""
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(next, items)
        while True:
            item = following.result()
            following = pool.submit(next, items)
            yield item
