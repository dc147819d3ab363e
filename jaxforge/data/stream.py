"""A Hugging Face dataset as it streams: windows in an order that can be taken up anywhere.

Index spaces:
    file      one of the dataset's split; they are dealt out to the streams: stream g of G has
              the files g, g + G, ..., in an order of its own each epoch. G is as large as the
              files and the rows of a microbatch divide by, up to 16.
    stream    the documents of its files, epoch after epoch, each ended by EOS. Streams know
              nothing of each other: each begins its next epoch when its own files are through.
    window    S + 1 consecutive tokens of a stream, counted over its epochs; the next begins where
              it ends, and what remains of an epoch is not used.
    block     consecutive windows of an epoch, about a million tokens; with `data.shuffle`, the
              windows within a block change places. Conversations are packed block by block.
    position  of the run, as in `loader`. The rows of a microbatch are dealt out to the streams in
              G equal runs, and each stream's windows go to its rows one after the other.

So a batch is a function of (dataset, config, position), and of neither hosts nor devices; a host
reads the streams whose rows it holds, and no others.

To find a window again without reading all before it, each stream leaves anchors in the run
directory, `stream/`: the places in its files at which some blocks begin. Without them, all is read
again up to the window, with the same result.
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
from jaxforge.data.corpus.entries import FIRST, ID
from jaxforge.data.corpus.ingest import batches, encode, texts_of
from jaxforge.data.corpus.inputs import HuggingFace
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
_BLOCK_TOKENS = 1 << 20  # within which windows change places
_ANCHOR_SECONDS = 30.0  # of reading that may have to be repeated
_LAYOUT = "layout.json"


class Anchor(NamedTuple):
    """Position of a block of windows in the files of a stream.

    Attributes:
        window: the first of the block.
        epoch: of the stream.
        file: place in the order of this epoch.
        record: records of the file before the block.
        offset: bytes of the next record before it.
        drop: tokens from there that are still before it.
    """

    window: int = 0
    epoch: int = 0
    file: int = 0
    record: int = 0
    offset: int = 0
    drop: int = 0


@dataclass(frozen=True)
class StreamedTokens:
    """The windows of a streaming dataset, to be started somewhere.

    Attributes:
        name: of the dataset, for messages.
        dataset: its rows.
        content: of its rows.
        tokenizer: has an EOS.
        window: S + 1.
        vocab_size: all tokens are below.
        seed: of the order.
        shuffle: False reads files and windows in their own order.
        directory: of layout and anchors, shared by all processes.
        overlong: what becomes of conversations that are longer than a window: `data.overlong`.
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
        """Opens the streams of some rows.

        Args:
            first: position to begin with, the first of a microbatch.
            rows: of a microbatch.
            local_rows: those that will be asked for.

        Raises:
            UserError: `rows` do not divide by the streams that the run began with.
        """
        n_streams = self._n_streams(rows)
        per_stream = rows // n_streams
        needed = sorted({row // per_stream for row in local_rows})
        readers = {
            g: _Reader(
                self._stream(g, n_streams, writes=g * per_stream in local_rows),
                first // n_streams,
                per_stream,
                {row % per_stream for row in local_rows if row // per_stream == g},
            )
            for g in needed
        }
        return Streams(first, rows, per_stream, readers)

    def file(self, index: int) -> HuggingFace:
        """One file of the dataset."""
        n_files = self.dataset.num_shards
        rows = self.dataset.shard(n_files, index, contiguous=False)
        return HuggingFace(f"{self.name}, file {index} of {n_files}", rows, self.content)

    @property
    def conversations(self) -> bool:
        """True if windows consist of conversation entries."""
        return isinstance(self.content, Conversations)

    def encode(self, texts: Sequence[Text]) -> Int[np.ndarray, "_"]:
        """Tokens or entries of documents of a file.

        Raises:
            UserError: the model does not know some.
        """
        function = encode_conversations if self.conversations else encode
        tokens = function(self.tokenizer, texts, "int32")["train"]
        self.check(tokens & ID)
        return tokens

    def check(self, tokens: Int[np.ndarray, "_"]) -> None:
        """Refuses tokens that the model does not know.

        Raises:
            UserError: there are such.
        """
        if tokens.max() >= self.vocab_size:
            raise UserError(
                f"{self.name}: token {tokens.max()} is outside the vocabulary of "
                f"{self.vocab_size}; set model.vocab_size to {self.tokenizer.vocab_size}"
            )

    def _n_streams(self, rows: int) -> int:
        """G: the run's, as its first start left it, or else the largest that divides."""
        path = self.directory / _LAYOUT
        if not path.exists():
            common = math.gcd(self.dataset.num_shards, rows)
            n_streams = max(n for n in range(1, _MAX_STREAMS + 1) if common % n == 0)
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
        settings = [*source, self.dataset.num_shards, self.seed, self.shuffle, n_streams]
        key = json.dumps([*settings, self.overlong] if self.conversations else settings)
        name = f"{hashlib.sha256(key.encode()).hexdigest()[:8]}-{index:02d}.jsonl"
        return _Stream(self, index, files, self.directory / name, writes)


class Streams:
    """Started streams, as a source of windows; safe to ask from many threads, once for each."""

    def __init__(
        self, first: int, rows: int, per_stream: int, readers: "dict[int, _Reader]"
    ) -> None:
        self._first, self._rows, self._per_stream = first, rows, per_stream
        self._readers = readers

    def __len__(self) -> int:
        return sys.maxsize  # there is always another epoch

    def __getitem__(self, position: int) -> Int[np.ndarray, "S+1"]:
        """The window at a position of a local row, int32 [S + 1]."""
        microbatch, row = divmod(position - self._first, self._rows)
        stream, index = divmod(row, self._per_stream)
        return self._readers[stream].take(microbatch * self._per_stream + index)

    def batch(self, positions: Sequence[int]) -> Int[np.ndarray, "n S+1"]:
        """The windows at some positions, int32 [n, S + 1]."""
        return np.stack([self[position] for position in positions])


class _Reader:
    """Windows of a stream in about the order in which they are asked for.

    Args:
        stream: the stream.
        first: its window that is number 0 here.
        rows: of a microbatch that are this stream's.
        local: those of them that are asked for here; windows of the others are dropped.
    """

    def __init__(self, stream: "_Stream", first: int, rows: int, local: Collection[int]) -> None:
        self._windows = enumerate(stream.windows(first))
        self._rows, self._local = rows, local
        self._read: dict[int, Int[np.ndarray, "S+1"]] = {}
        self._lock = Lock()

    def take(self, number: int) -> Int[np.ndarray, "S+1"]:
        """Window `number`, once."""
        with self._lock:
            while number not in self._read:
                i, window = next(self._windows)
                if i % self._rows in self._local:
                    self._read[i] = window
            return self._read.pop(number)


class _Stream:
    """One stream: every G-th file, for ever.

    Args:
        source: the dataset.
        index: g.
        files: its files.
        path: of its anchors.
        writes: this process leaves them.
    """

    def __init__(
        self, source: StreamedTokens, index: int, files: range, path: Path, writes: bool
    ) -> None:
        self._source, self._index, self._files = source, index, files
        self._path, self._writes = path, writes
        self._anchored = time.monotonic()
        self._warned = False  # that some conversations are too long

    def windows(self, first: int) -> Iterator[Int[np.ndarray, "S+1"]]:
        """The windows from `first` on; the next block is read while one is used."""
        anchors = [anchor for anchor in self._anchors() if anchor.window <= first]
        start = max(anchors, default=Anchor())
        blocks = _ahead(self._blocks(start))
        return islice((window for block in blocks for window in block), first - start.window, None)

    def _blocks(self, start: Anchor) -> Iterator[Int[np.ndarray, "windows S+1"]]:
        window = start.window
        of_epoch = self._packed if self._source.conversations else self._of_epoch
        while True:
            for anchor, block in of_epoch(start):
                self._leave(anchor)
                window = anchor.window + len(block)
                yield block[self._permutation(len(block), 1, anchor.window)]
            if start == Anchor(window, start.epoch):
                too_little = (
                    "no conversation that fits into a sequence"
                    if self._source.conversations
                    else f"less text than the {self._source.window} tokens of a sequence"
                )
                files = list(self._files)
                raise UserError(f"{self._source.name}: files {files} hold {too_little}")
            start = Anchor(window, start.epoch + 1)

    def _of_epoch(self, start: Anchor) -> Iterator[tuple[Anchor, Int[np.ndarray, "windows S+1"]]]:
        """The rest of an epoch in blocks; what remains after its last window is not used."""
        width = self._source.window
        full = max(1, _BLOCK_TOKENS // width)
        held: list[tuple[_InFile, Int[np.ndarray, "_"]]] = []
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

    def _packed(self, start: Anchor) -> Iterator[tuple[Anchor, Int[np.ndarray, "windows S+1"]]]:
        """The rest of an epoch in blocks of packed conversations."""
        window, size = start.window, 0
        held: list[tuple[_InFile, Int[np.ndarray, "_"]]] = []
        for chunk in chain(self._chunks(start), [None]):
            if chunk is not None:
                held.append(chunk)
                size += len(chunk[1])
            if held and (chunk is None or size >= _BLOCK_TOKENS):
                block = self._pack(np.concatenate([entries for _, entries in held]))
                yield Anchor(window, start.epoch, *held[0][0]), block
                window, held, size = window + len(block), [], 0

    def _pack(self, entries: Int[np.ndarray, "_"]) -> Int[np.ndarray, "windows S+1"]:
        starts = np.flatnonzero(entries & FIRST)
        lengths = np.diff(starts, append=len(entries))
        packed = Packed(lengths, self._source.window, self._source.overlong)
        if packed.overlong and not self._warned:
            self._warned = True
            log.warning("%s: %s", self._source.name, packed.in_words)
        windows = [
            fill_window(
                [entries[starts[i] : starts[i] + packed.lengths[i]] for i in packed[window]],
                self._source.window,
            )
            for window in range(len(packed))
        ]
        return np.stack(windows) if windows else np.empty((0, self._source.window), np.int32)

    def _chunks(self, start: Anchor) -> "Iterator[tuple[_InFile, Int[np.ndarray, '_']]]":
        """Tokens from `start` to the end of its epoch, with the place where each chunk begins."""
        source, position = self._source, ReadPosition(0, start.record, start.offset)
        order = self._permutation(len(self._files), 0, start.epoch)
        for i, file in enumerate(order[start.file :].tolist(), start.file):
            rows = source.file(self._files[file])
            for batch in batches(text_parts([rows], start=position)):
                yield _InFile(i, position.record, position.offset), source.encode(texts_of(batch))
                position = batch[-1].end
            position = ReadPosition()

    def _permutation(self, n: int, kind: int, number: int) -> Int[np.ndarray, "n"]:
        """0 ... n-1, shuffled if asked for: by raw words, as numpy may change its shuffles."""
        if not self._source.shuffle:
            return np.arange(n)
        counter = [0, self._index, kind, number]
        words = np.random.Philox(key=self._source.seed % 2**128, counter=counter).random_raw(n)
        return np.argsort(words, kind="stable")

    def _anchors(self) -> list[Anchor]:
        if not self._path.exists():
            return []
        return [Anchor(*json.loads(line)) for line in self._path.read_text().splitlines()]

    def _leave(self, anchor: Anchor) -> None:
        if not self._writes or time.monotonic() - self._anchored < _ANCHOR_SECONDS:
            return
        self._anchored = time.monotonic()
        known = {*self._anchors(), anchor}
        safe_files.replace_text(
            self._path, "".join(f"{json.dumps(position)}\n" for position in sorted(known))
        )


class _InFile(NamedTuple):
    """A place in a stream's epoch: `Anchor`'s."""

    file: int
    record: int
    offset: int


_T = TypeVar("_T")


def _ahead(items: Iterator[_T]) -> Iterator[_T]:
    """Yield endless `items`; a thread prepares the next one while one is used."""
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(next, items)
        while True:
            item = following.result()
            following = pool.submit(next, items)
            yield item
