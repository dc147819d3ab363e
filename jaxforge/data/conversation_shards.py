"""Windows of whole conversations, read from shards.

Index spaces, in addition to those of `tokens`:
    conversation: number in the directory, in the order of `manifest.LENGTHS`.
    window: S + 1 entries (`packing`): conversations that fit together, and padding.

Which conversations share a window depends on their lengths and S alone. A pair of answers is two
conversations that always share a window: chosen, rejected.
"""

import logging
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxforge.config.data import Overlong
from jaxforge.data.corpus.manifest import FILE_NAME, LENGTHS, Manifest
from jaxforge.data.packing import Packed, fill_window
from jaxforge.data.tokens import TokenFiles, TokenSpan
from jaxforge.errors import UserError

log = logging.getLogger(__name__)


class ConversationShards(TokenFiles):
    """Windows of a directory of conversations that `prepare` has written.

    Args:
        directory: see `TokenFiles`.
        pattern: see `TokenFiles`.
        seq_len: S; a window holds S + 1 entries.
        overlong: `data.overlong`.
        options: see `TokenFiles`.

    Raises:
        UserError: as `TokenFiles`; or lengths and shards do not match, or no conversation fits.
    """

    together = 1
    """Consecutive conversations that share a window."""
    noun = "conversations"
    """Name of a group of conversations in messages."""

    def __init__(
        self,
        directory: str | Path,
        pattern: str,
        seq_len: int,
        overlong: Overlong,
        **options: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(directory, pattern, **options)
        assert self.manifest is not None
        self.window = seq_len + 1
        lengths = _read_lengths(self.directory, self.manifest)
        spans = self._window_spans(self.manifest, lengths)
        # Each [n // together, together]: a row is what must share a window.
        self._file, self._start, lengths = (x.reshape(-1, self.together) for x in spans)
        self._packed = Packed(lengths.sum(axis=1), self.window, overlong, self.noun)
        self._length = self.truncate(lengths)
        if not len(self):
            raise UserError(f"{self.directory}: {self._packed.summary}; raise train.seq_len")
        log.info(
            "%s: %s %s in %s sequences, which are %.1f%% full",
            self.directory, f"{len(lengths):,}", self.noun, f"{len(self):,}",
            100 * self._packed.fill,
        )  # fmt: skip
        if self._packed.overlong:
            log.warning("%s: %s", self.directory, self._packed.summary)

    def __len__(self) -> int:
        return len(self._packed)

    def batch(self, indices: Sequence[int]) -> Int[np.ndarray, "n S+1"]:
        """Return the windows `indices`, all below `len(self)`, int32 [n, S + 1]."""
        spans = [[span for i in self._packed[n] for span in self._spans(i)] for n in indices]
        # All spans in one call, so that blocks of a bucket share requests.
        parts = iter(self.read_spans([span for row in spans for span in row]))
        rows = [fill_window([np.asarray(next(parts)) for _ in row], self.window) for row in spans]
        windows = np.stack(rows)
        self.check_ids(windows, spans)
        return windows

    def truncate(self, lengths: Int[np.ndarray, "n k"]) -> Int[np.ndarray, "n k"]:
        """Return lengths after truncation: each row fits into a window."""
        return np.minimum(lengths, self.window)

    def __repr__(self) -> str:
        windows = f"{len(self)} windows of {self.window} entries"
        return f"{type(self).__name__}({str(self.directory)!r}: {windows})"

    def _window_spans(
        self, manifest: Manifest, lengths: Int[np.ndarray, "n"]
    ) -> tuple[Int[np.ndarray, "n"], Int[np.ndarray, "n"], Int[np.ndarray, "n"]]:
        """Return file number, first token and length of each conversation in the opened files."""
        numbers = {file.path.name: number for number, file in enumerate(self.files)}
        ends = np.cumsum([shard.tokens for shard in manifest.shards])
        starts = np.cumsum(lengths) - lengths
        # [n]: a conversation is in one shard, whose end is the first beyond its start.
        shard = np.searchsorted(ends, starts, side="right")
        # [shards]: -1 for those that the pattern of files leaves out.
        number_of = np.array([numbers.get(shard.file, -1) for shard in manifest.shards])
        files, starts = number_of[shard], starts - (ends[shard] - np.diff(ends, prepend=0)[shard])
        read = files >= 0
        # The answers of a pair may be in two shards: only whole pairs are read.
        read = np.repeat(read.reshape(-1, self.together).all(axis=1), self.together)
        return files[read], starts[read], lengths[read]

    def _spans(self, i: int) -> list[TokenSpan]:
        """Return the conversations of a record after truncation."""
        parts = zip(self._file[i], self._start[i], self._length[i], strict=True)
        return [TokenSpan(int(file), int(start), int(start + n)) for file, start, n in parts]


class PreferenceShards(ConversationShards):
    """Windows of a directory of pairs of answers that `prepare --preferences` has written.

    Arguments are those of `ConversationShards`. A pair longer than a window is dropped, or both
    answers are cut at their end (`truncate`), by `data.overlong`.
    """

    together, noun = 2, "pairs"

    def truncate(self, lengths: Int[np.ndarray, "n 2"]) -> Int[np.ndarray, "n 2"]:
        """Return lengths after truncation: each pair fits into a window.

        Each answer of an overlong pair, with its prompt, has half of the window, and the part of
        the other half that the other answer does not need.
        """
        half = self.window // 2
        chosen, rejected = lengths.T
        kept_chosen = np.minimum(chosen, np.maximum(half, self.window - rejected))
        kept_rejected = np.minimum(rejected, self.window - kept_chosen)
        return np.stack([kept_chosen, kept_rejected], axis=1)


def _read_lengths(directory: Path, manifest: Manifest) -> Int[np.ndarray, "n"]:
    """Read the number of entries of each conversation, int64."""
    path = directory / LENGTHS
    try:
        data = path.read_bytes()
        lengths = np.frombuffer(data, "<u4").astype(np.int64)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}; copy or prepare it again") from error
    if (len(lengths), lengths.sum()) != (manifest.documents, manifest.tokens):
        raise UserError(
            f"{path} has {len(lengths)} conversations of {lengths.sum()} tokens where {FILE_NAME} "
            f"says {manifest.documents} of {manifest.tokens}; copy or prepare it again"
        )
    if manifest.lengths_crc32 not in (None, zlib.crc32(data)):
        raise UserError(
            f"{path} is damaged: it is not what prepare wrote, by its hash in {FILE_NAME}; copy or "
            "prepare it again"
        )
    return lengths
