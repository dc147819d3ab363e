"""Token shards on disk or in a bucket, read as windows.

Index spaces:
    token: number of a token in one file, 0 … tokens-1.
    window: number of a window in the whole directory. A window is S + 1 consecutive tokens of one
        file (S = `train.seq_len`; the extra token is the label of the last position). Windows are
        adjacent, and the remainder of each file is not read. Files are sorted by name.

`token_file` reads the headers. Blocks are verified against the hashes in the manifest
(`manifest.BlockHashes`) when they are read. Tokens outside the vocabulary are refused.

Local files are mapped into memory. Files in a bucket are read in blocks (`remote_tokens`), and all
windows of a batch are requested before the first is used.
"""

import logging
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from jaxtyping import Int
from numpy.typing import ArrayLike

from jaxforge.cli.suggestions import path_hint
from jaxforge.config.data import Verify
from jaxforge.data.corpus.formats import how_to_prepare
from jaxforge.data.corpus.manifest import FILE_NAME, FIRST, PADDING, UNLEARNED, Manifest
from jaxforge.data.foreign_layouts import (
    ForeignLayout,
    Split,
    find_layout,
    prefix_hint,
    with_indices,
)
from jaxforge.data.token_file import TokenFile, guess_type, inspect
from jaxforge.errors import UserError
from jaxforge.storage import urls

if TYPE_CHECKING:
    from jaxforge.data.remote_tokens import RemoteTokens
    from jaxforge.storage.block_cache import BlockCache

log = logging.getLogger(__name__)

_OPEN_FILES = 256
"""Maps held by a process. Each holds a file descriptor; many systems allow 1,024 of them, and all
datasets of a mixture together may have any number of files."""
CHUNK = 1 << 20  # tokens scanned at a time


class TokenSpan(NamedTuple):
    """Consecutive tokens of a file.

    Attributes:
        file: number of the file in the directory.
        start: first token.
        end: token after the last.
    """

    file: int
    start: int
    end: int


class TokenFiles(ABC):
    """Base of directories of token files that are read as windows.

    Errors in the files are found by the constructor, before the first step.

    Args:
        directory: `data.dataset_path`.
        pattern: glob of the files to read ("*.npy").
        vocab_size: `model.vocab_size`; all tokens are below.
        token_dtype: NumPy name of the type in `.bin` files; by default the manifest's or a guess.
        verify: `data.verify`.
        keys: config keys of directory and pattern, for error messages.
        manifest: the directory's manifest, if it was read before.
        cache: cache of blocks of files in buckets.
        split: the part to read of directories of nanoGPT and llm.c.

    Attributes:
        directory: the directory.
        manifest: its `manifest.json`, or None.
        files: the files, sorted by name.
        tokens: tokens in all files together.

    Raises:
        UserError: directory or files do not exist; a file is empty, cut short, of another type, or
            holds tokens outside the vocabulary.
    """

    def __init__(
        self,
        directory: str | Path,
        pattern: str,
        *,
        vocab_size: int,
        token_dtype: str | None = None,
        verify: Verify = "read",
        keys: tuple[str, str] = ("data.dataset_path", "data.file_pattern"),
        manifest: Manifest | None = None,
        cache: "BlockCache | None" = None,
        split: Split = "train",
    ) -> None:
        self._cache = cache
        self.directory = urls.path(directory, keys[0])
        if urls.in_bucket(self.directory):
            from jaxforge.storage.atomic_directory import check_complete

            # An interrupted `prepare` leaves objects under their final names.
            check_complete(self.directory)
        is_readable = urls.in_bucket(self.directory) or self.directory.is_dir()
        self.manifest = manifest or (Manifest.read(self.directory) if is_readable else None)
        layout = None if self.manifest else find_layout(self.directory, pattern, split)
        if layout is None:
            layout = ForeignLayout(_matches(self.directory, pattern, keys))
        paths = layout.paths if self.manifest else with_indices(layout.paths)
        bare = token_dtype or layout.dtype
        bare = bare or (self.manifest.dtype if self.manifest else guess_type(paths))
        self.files = [inspect(path, bare, self.manifest) for path in paths]
        self.tokens = sum(file.tokens for file in self.files)
        self._vocab_size = vocab_size
        for file in self.files:
            _check_vocabulary(file, vocab_size, self.manifest)
        if verify == "start":
            self._check_all_blocks()

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of windows."""

    @property
    def is_remote(self) -> bool:
        """True if the files are in a bucket."""
        return urls.in_bucket(self.directory)

    @abstractmethod
    def batch(self, indices: Sequence[int]) -> Int[np.ndarray, "n S+1"]:
        """Return the windows `indices`, all below `len(self)`, int32 [n, S + 1]."""

    def __getitem__(self, index: int) -> Int[np.ndarray, "S+1"]:
        """Return window `index`, int32 [S + 1]."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        return self.batch([index])[0]

    def read_span(self, span: TokenSpan) -> ArrayLike:
        """Return tokens of a file; for a file in a bucket, a pending request.

        Raises:
            UserError: they are not the tokens that `prepare` wrote.
        """
        file, start, end = span
        tokens, hashes = self._map(self.files[file]), self.files[file].hashes
        # Blocks from a bucket are verified on arrival (`remote_tokens`).
        if hashes and isinstance(tokens, np.ndarray):
            hashes.check_once(tokens, start, end)
        return tokens[start:end]

    def read_spans(self, spans: Sequence[TokenSpan]) -> Sequence[ArrayLike]:
        """Return tokens of several spans, as `read_span` does, with shared requests.

        Raises:
            UserError: they are not the tokens that `prepare` wrote.
        """
        if not self.is_remote:
            return [self.read_span(span) for span in spans]
        # By file, because only blocks of the same file can share a request.
        numbers: dict[int, list[int]] = {}
        for number, span in enumerate(spans):
            numbers.setdefault(span.file, []).append(number)
        parts: dict[int, ArrayLike] = {}
        for file, of_file in numbers.items():
            tokens = cast("RemoteTokens", self._map(self.files[file]))
            parts.update(zip(of_file, tokens.read([spans[n][1:] for n in of_file]), strict=True))
        return [parts[number] for number in range(len(spans))]

    def check_ids(
        self, windows: Int[np.ndarray, "n S+1"], spans: Sequence[Iterable[TokenSpan]]
    ) -> None:
        """Raise if a token of the windows, read from these spans, is outside the vocabulary.

        When files are opened, only their manifest is checked. This check of the tokens themselves
        costs 0.3 ms per million tokens.

        Raises:
            UserError: a token is outside; the message names file and place.
        """
        # Unsigned, a negative id is a large one: one comparison finds both kinds.
        ids = windows.view(np.uint32)
        if self.manifest and self.manifest.conversations:
            is_padding = windows & ~FIRST == PADDING  # its first entry begins a document
            ids = np.where(is_padding, 0, ids & ~np.uint32(FIRST | UNLEARNED))
        if ids.max() < self._vocab_size:
            return
        row, column = (int(i) for i in np.argwhere(ids >= self._vocab_size)[0])
        indices = [(span.file, number) for span in spans[row] for number in range(*span[1:])]
        number, token = indices[column]
        file = self.files[number]
        raise UserError(
            f"{file.path}: token {ids[row, column]} at {file.describe_location(token)} is outside "
            f"the vocabulary of {self._vocab_size}, and was not there when the file was prepared, "
            "or opened: it is damaged; copy or prepare it again"
        )

    def warn_without(self, eos: int) -> None:
        """Log a warning if the EOS is not among the first tokens."""
        first = TokenSpan(0, 0, min(CHUNK, self.files[0].tokens))
        if not np.any(np.asarray(self.read_span(first)) == eos):
            log.warning(
                "data.pack_sequences: token %d, which ends documents, is not among the first %s "
                "tokens of %s; without it documents leak into one another: look at "
                "data.eos_token_id", eos, f"{first.end:,}", self.files[0].path,
            )  # fmt: skip

    def _check_all_blocks(self) -> None:
        """Verify every block of every file."""
        for number, file in enumerate(self.files):
            if file.hashes:
                for at in range(0, file.tokens, CHUNK):
                    # The conversion waits for blocks of a bucket, which are verified on arrival.
                    np.asarray(self.read_span(TokenSpan(number, at, min(at + CHUNK, file.tokens))))
            else:
                log.warning(
                    "data.verify: %s has no hashes in a %s; prepare it again to have some",
                    file.path, FILE_NAME,
                )  # fmt: skip

    def _map(self, file: TokenFile) -> "Int[np.ndarray, 'tokens'] | RemoteTokens":
        try:
            return _map_file(file, self._cache)
        except (OSError, ValueError) as error:  # ValueError: the file has become shorter
            raise UserError(
                f"{file.path} was whole when the run started and cannot be read now "
                f"({error}); bring it back, then run the same command to resume"
            ) from error


@lru_cache(_OPEN_FILES)
def _map_file(
    file: TokenFile, cache: "BlockCache | None"
) -> "Int[np.ndarray, 'tokens'] | RemoteTokens":
    return file.map(cache)


class TokenShards(TokenFiles):
    """Windows of a directory of token files: a Grain `RandomAccessDataSource`.

    Args:
        directory: see `TokenFiles`.
        pattern: see `TokenFiles`.
        seq_len: S; a window holds S + 1 tokens.
        options: see `TokenFiles`.

    Attributes:
        marks_documents: mark the first token of each document; requires `has_documents`.

    Raises:
        UserError: as `TokenFiles`; or no file is as long as a window.
    """

    def __init__(
        self,
        directory: str | Path,
        pattern: str,
        seq_len: int,
        **options: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(directory, pattern, **options)
        self.window = seq_len + 1
        self.marks_documents = False
        # [files]: number of the window after the last of each file.
        self._ends = list(accumulate(file.tokens // self.window for file in self.files))
        if not len(self):
            key = options.get("keys", ("data.dataset_path",))[0]
            longest = max(self.files, key=lambda file: file.tokens)
            raise UserError(
                f"no file holds a window of train.seq_len + 1 = {self.window} tokens: the longest "
                f"of {len(self.files)}, {longest.path}, has {longest.tokens}; lower train.seq_len "
                f"or set {key} to more tokens"
            )

    def __len__(self) -> int:
        return self._ends[-1]

    def batch(self, indices: Sequence[int]) -> Int[np.ndarray, "n S+1"]:
        """Return the windows `indices`, all below `len(self)`, int32 [n, S + 1].

        With `marks_documents`, the first token of each document has `entries.FIRST`.
        """
        windows = np.empty((len(indices), self.window), np.int32)
        # Files without a window share the end of their predecessor: bisect_right skips them.
        files = [bisect_right(self._ends, index) for index in indices]
        firsts = [self._ends[file - 1] if file else 0 for file in files]
        starts = [(i - first) * self.window for i, first in zip(indices, firsts, strict=True)]
        spans = [TokenSpan(n, at, at + self.window) for n, at in zip(files, starts, strict=True)]
        parts = self.read_spans(spans)  # files in a bucket: starts all requests
        for row, part in zip(windows, parts, strict=True):
            # Waits for a request, and converts the type on disk to int32.
            row[:] = part
        self.check_ids(windows, [[span] for span in spans])
        # After `check_ids`, for which a token with FIRST is outside the vocabulary.
        if self.marks_documents:
            for row, span in zip(windows, spans, strict=True):
                row[self._document_starts(span)] |= FIRST
        return windows

    @property
    def has_documents(self) -> bool:
        """True if an index of each file says where documents begin."""
        return all(file.index for file in self.files)

    def _document_starts(self, span: TokenSpan) -> Int[np.ndarray, "_"]:
        """Return the tokens of a span, counted from its start, at which documents begin."""
        index = self.files[span.file].index
        assert index is not None
        return index.document_starts(span.start, span.end) - span.start

    def __repr__(self) -> str:
        files = f"{len(self.files)} files, {len(self)} windows of {self.window} tokens"
        return f"TokenShards({str(self.directory)!r}: {files})"


def manifest_of(directory: str | Path, key: str) -> Manifest | None:
    """Return the manifest of a directory of shards; None if it has none or does not exist.

    Args:
        directory: the directory.
        key: config key of the directory, for error messages.

    Raises:
        UserError: its manifest cannot be read.
    """
    path = urls.path(directory, key)
    return Manifest.read(path) if path.is_dir() else None


class SyntheticTokens:
    """Practically endless windows of random tokens.

    Window i is a pure function of (seed, i): words of a Philox generator with counter i, modulo
    the vocabulary.

    Args:
        vocab_size: tokens are 0 … vocab_size-1, equally likely.
        seq_len: S; a window holds S + 1 tokens.
        seed: any integer.
    """

    def __init__(self, vocab_size: int, seq_len: int, seed: int) -> None:
        self.vocab_size, self.window, self.seed = vocab_size, seq_len + 1, seed

    def __len__(self) -> int:
        return 2**31 - 1

    def __getitem__(self, index: int) -> Int[np.ndarray, "S+1"]:
        """Return window `index`, int32 [S + 1]."""
        # Raw words: NumPy may change its sampling of bounded integers.
        # The generator advances the low 64 bits of the counter: windows never overlap.
        words = np.random.Philox(key=self.seed % 2**128, counter=index << 64)
        return (words.random_raw(self.window) % self.vocab_size).astype(np.int32)

    def batch(self, indices: Sequence[int]) -> Int[np.ndarray, "n S+1"]:
        """Return the windows `indices`, int32 [n, S + 1]."""
        return np.stack([self[index] for index in indices])

    def __repr__(self) -> str:
        return f"SyntheticTokens({self.vocab_size}, {self.window - 1}, {self.seed})"


def _matches(directory: Path, pattern: str, keys: tuple[str, str]) -> list[Path]:
    """Return the files that match `pattern`, sorted."""
    of_directory, of_pattern = keys
    if not directory.is_dir():
        file = directory.exists() and (
            how_to_prepare(directory) or prefix_hint(directory) or "is a file, not a directory"
        )
        what = file or f"does not exist{path_hint(directory)}"
        raise UserError(f"{of_directory}: {directory.absolute()} {what}")
    try:
        matches = (path for path in directory.glob(pattern) if not path.is_dir())
        paths = sorted(matches, key=lambda path: path.parts)  # faster than comparing paths
    except (ValueError, NotImplementedError, IndexError) as error:  # as pathlib says it
        raise UserError(
            f"{of_pattern} = {pattern!r} is not a pattern of files below {of_directory} ({error}): "
            "give one such as '*.npy'"
        ) from error
    if paths:
        return paths
    prepared = next(directory.glob(f"*/{FILE_NAME}"), None)
    if prepared:
        raise UserError(
            f"no file matches {pattern!r} in {directory}, but {prepared.parent} holds shards; "
            f"set {of_directory} to it"
        )
    if not urls.in_bucket(directory) and (advice := how_to_prepare(directory)):
        raise UserError(f"{of_directory}: {directory} {advice}")
    names = sorted(path.name for path in directory.iterdir())
    there = ", ".join(names[:5]) + (", …" if len(names) > 5 else "") or "nothing"
    raise UserError(f"no file matches {of_pattern} = {pattern!r} in {directory} (it holds {there})")


def _check_vocabulary(file: TokenFile, vocab_size: int, manifest: Manifest | None) -> None:
    shard = manifest and manifest.by_file.get(file.path.name)
    if shard and shard.tokens == file.tokens:
        # `prepare` has seen every token.
        low, high = 0, shard.max_token
    elif manifest and manifest.conversations:
        raise UserError(
            f"{file.path} is not what {FILE_NAME} beside it says; copy or prepare it again"
        )
    elif file.dtype.kind == "u" and np.iinfo(file.dtype).max < vocab_size:
        return  # the type cannot hold a token outside the vocabulary
    else:
        # Only the first tokens of buckets and large corpora; the others when they are read.
        n_chunks = 1 if file.index or urls.in_bucket(file.path) else None
        chunks = islice(token_chunks(file), n_chunks)
        extremes = [(int(chunk.min()), int(chunk.max())) for chunk in chunks]
        low, high = min(low for low, _ in extremes), max(high for _, high in extremes)
    if low < 0:
        raise UserError(
            f"{file.path}: token {low} is negative; its type is perhaps not {file.dtype}"
            f"{_where(file, low)}"
        )
    if high >= vocab_size:
        raise UserError(
            f"{file.path}: token {high} is outside the vocabulary of {vocab_size}; set "
            f"model.vocab_size to {high + 1} or more, or prepare the data with the model's "
            f"tokenizer (.bin files of another type than {file.dtype} look like this too: set "
            f"data.token_dtype){_where(file, high)}"
        )


def token_chunks(file: TokenFile) -> Iterator[Int[np.ndarray, "_"]]:
    """Yield the tokens of a file in pieces of `CHUNK`."""
    tokens = file.map()
    for at in range(0, file.tokens, CHUNK):
        yield np.asarray(tokens[at : min(at + CHUNK, file.tokens)])


def _where(file: TokenFile, value: int) -> str:
    """Return the first place of a token in a file, as the end of an error message."""
    before = 0
    for chunk in token_chunks(file):
        if len(indices := np.flatnonzero(chunk == value)):
            return f"; it is first at {file.describe_location(before + int(indices[0]))}"
        before += len(chunk)
    return ""  # the manifest has it, but the file does not
