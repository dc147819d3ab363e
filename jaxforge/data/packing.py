"""Windows of tokens to model inputs.

S is `train.seq_len`; a window holds S + 1 tokens, so that every input has its next token.

Text is cut into windows wherever they end. Conversations are packed whole, as entries
(`corpus.entries`).
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from jaxforge.config.data import Overlong
from jaxforge.data.corpus.entries import FIRST, ID, PADDING

IGNORE = -100
"""Label of a position that carries no loss (torch's `ignore_index`)."""


def split_window(window: Int[np.ndarray, "... S+1"]) -> dict[str, Int[np.ndarray, "... S"]]:
    """Splits windows into inputs and next-token labels.

    Returns:
        `input_ids` and `labels`, int32 [..., S].
    """
    tokens = window.astype(np.int32, copy=False)
    return {"input_ids": tokens[..., :-1], "labels": tokens[..., 1:]}


def split_packed(
    window: Int[np.ndarray, "... S+1"], eos_id: int
) -> dict[str, Int[np.ndarray, "... S"]]:
    """Splits windows of packed documents, each ended by `eos_id`.

    The EOS itself is predicted; what follows it, the first token of another document, is not.

    Returns:
        `input_ids`, `labels` and `segment_ids`, int32 [..., S]. Documents count up from 0 in each
        window; labels that belong to another document than their input are `IGNORE`.
    """
    ends = window == eos_id
    segment_ids = (np.cumsum(ends, axis=-1) - ends).astype(np.int32)
    parts = split_window(window)
    same = segment_ids[..., :-1] == segment_ids[..., 1:]
    labels = np.where(same, parts["labels"], np.int32(IGNORE))
    return {**parts, "labels": labels, "segment_ids": segment_ids[..., :-1]}


def as_conversations(
    example: dict[str, Int[np.ndarray, "... S"]],
) -> dict[str, Int[np.ndarray, "... S"]]:
    """Add the fields of `split_entries` to an example of text: one document, without padding."""
    zeros = np.zeros_like(example["input_ids"])
    return {"segment_ids": zeros, "is_padding": zeros, **example}


def split_entries(
    window: Int[np.ndarray, "... S+1"],
) -> dict[str, Int[np.ndarray, "... S"]]:
    """Splits windows of packed conversations.

    Returns:
        `input_ids`, `labels`, `segment_ids` and `is_padding`, int32 [..., S]. Ids of conversations,
        and of the padding after them, count up from 0 in each window; labels are `IGNORE` where
        their entry is not learned, or begins another conversation. `is_padding` is 1 where the next
        entry is padding: the last entry of a window is a label and no input, padded or not.
    """
    parts, is_padding = split_window(window & ID), window[..., 1:] < 0
    is_ignored = is_padding | (window[..., 1:] > ID)
    labels = np.where(is_ignored, np.int32(IGNORE), parts["labels"])
    segment_ids = np.cumsum(window & FIRST != 0, axis=-1, dtype=np.int32) - 1
    return {
        **parts,
        "labels": labels,
        "segment_ids": segment_ids[..., :-1],
        "is_padding": is_padding.astype(np.int32),
    }


def fill_window(
    conversations: Sequence[Int[np.ndarray, "_"]], width: int
) -> Int[np.ndarray, "width"]:
    """Lay conversations one after another, int32; `PADDING`, a document of its own, follows."""
    window = np.full(width, PADDING, np.int32)
    end = 0
    for entries in conversations:
        window[end : end + len(entries)] = entries
        end += len(entries)
    window[end : end + 1] |= FIRST
    return window


class Packed:
    """Assignment of conversations to windows.

    Args:
        lengths: entries of each conversation, at least 1.
        width: entries of a window.
        overlong: what becomes of longer conversations: `data.overlong`.

    Attributes:
        lengths: entries of each as it is packed.
        overlong: how many are longer than a window.
    """

    def __init__(self, lengths: Int[np.ndarray, "n"], width: int, overlong: Overlong) -> None:
        too_long = lengths > width
        fitting = np.flatnonzero(~too_long | (overlong == "truncate"))
        self.lengths, self.overlong = np.minimum(lengths, width), int(too_long.sum())
        self._width, self._what = width, "cut there" if overlong == "truncate" else "left out"
        members, self._ends = best_fit(self.lengths[fitting], width)
        self._members = fitting[members]

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, window: int) -> list[int]:
        """The numbers of a window's conversations."""
        start = self._ends[window - 1] if window else 0
        return self._members[start : self._ends[window]].tolist()

    @property
    def fill(self) -> float:
        """Part of the windows that is no padding."""
        return float(self.lengths[self._members].sum()) / max(1, len(self) * self._width)

    @property
    def in_words(self) -> str:
        """Describe the overlong conversations and their treatment."""
        return (
            f"{self.overlong:,} of {len(self.lengths):,} conversations are longer than the "
            f"{self._width} tokens of a sequence and {self._what} (data.overlong)"
        )


def best_fit(
    lengths: Int[np.ndarray, "n"], width: int
) -> tuple[Int[np.ndarray, "n"], Int[np.ndarray, "windows"]]:
    """Packs conversations into windows: longest first, each where it leaves the least room.

    Args:
        lengths: of each, from 1 to `width`.
        width: of a window.

    Returns:
        The numbers of the conversations, window by window, and where each window's end among them.
        Windows are in the order of their first conversations, and so are conversations within one.
    """
    windows_with: list[list[int]] = [[] for _ in range(width + 1)]  # so much room
    rooms: list[int] = []  # those that some window has, sorted
    window_of, n_windows = np.empty(len(lengths), np.int64), 0
    longest_first = np.argsort(-lengths.astype(np.int64), kind="stable")
    for number, length in zip(longest_first.tolist(), lengths[longest_first].tolist(), strict=True):
        at = bisect_left(rooms, length)
        if at == len(rooms):
            window, room, n_windows = n_windows, width, n_windows + 1
        else:
            room = rooms[at]
            window = windows_with[room].pop()
            if not windows_with[room]:
                del rooms[at]
        window_of[number] = window
        if room == length:
            continue
        if not windows_with[room - length]:
            insort(rooms, room - length)
        windows_with[room - length].append(window)
    firsts = np.unique(window_of, return_index=True)[1]
    window_of = np.argsort(np.argsort(firsts))[window_of]
    return np.argsort(window_of, kind="stable"), np.cumsum(np.bincount(window_of))
