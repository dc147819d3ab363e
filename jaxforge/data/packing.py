"""Conversion of token windows to model inputs, and packing of conversations into windows.

S is `train.seq_len`; a window holds S + 1 tokens, so that every input has its next token.

A text window may begin and end inside a document. Conversations are packed whole, as entries
(`corpus.manifest`).
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from jaxforge.config.data import Overlong
from jaxforge.data.corpus.manifest import FIRST, ID, PADDING

IGNORE = -100
"""Label of a position that carries no loss (torch's `ignore_index`)."""


def split_window(window: Int[np.ndarray, "... S+1"]) -> dict[str, Int[np.ndarray, "... S"]]:
    """Split windows into inputs and next-token labels.

    Returns:
        `input_ids` and `labels`, int32 [..., S].
    """
    tokens = window.astype(np.int32, copy=False)
    return {"input_ids": tokens[..., :-1], "labels": tokens[..., 1:]}


def split_packed(
    window: Int[np.ndarray, "... S+1"], eos_id: int
) -> dict[str, Int[np.ndarray, "... S"]]:
    """Split windows of packed documents, each ended by `eos_id`.

    EOS is predicted. The first token of the next document is not.

    Returns:
        `input_ids`, `labels` and `segment_ids`, int32 [..., S]. Segment ids count
        documents from 0 in each window. A label is `IGNORE` where its document is not the input's.
    """
    # Example with S = 4 (a window of five tokens):
    #   window       a    b   EOS   c    d
    #   segment_ids  0    0    0    1    1     an EOS belongs to the document that it ends
    #   input_ids    a    b   EOS   c
    #   labels       b   EOS IGNORE d          EOS -> c would cross a document boundary
    ends = window == eos_id
    segment_ids = (np.cumsum(ends, axis=-1) - ends).astype(np.int32)
    parts = split_window(window)
    same = segment_ids[..., :-1] == segment_ids[..., 1:]
    labels = np.where(same, parts["labels"], np.int32(IGNORE))
    return {**parts, "labels": labels, "segment_ids": segment_ids[..., :-1]}


def split_documents(
    window: Int[np.ndarray, "... S+1"],
) -> dict[str, Int[np.ndarray, "... S"]]:
    """Split windows of packed documents whose first tokens are marked with `FIRST`.

    Returns:
        as `split_packed`.
    """
    is_first = (window & FIRST) != 0
    is_first[..., 0] = False  # segment ids count from 0
    segment_ids = np.cumsum(is_first, axis=-1, dtype=np.int32)
    parts = split_window(window & ID)
    labels = np.where(is_first[..., 1:], np.int32(IGNORE), parts["labels"])
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
    """Split windows of packed conversations.

    Returns:
        `input_ids`, `labels`, `segment_ids` and `is_padding`, int32 [..., S]. Segment ids
        count conversations from 0 in each window; padding is the last segment. A label is `IGNORE`
        where its entry is not learned or begins another conversation. `is_padding` is 1 where the
        next entry is padding: the last entry of a window is only a label, never an input.
    """
    # Bits of an entry (`corpus.manifest`), here as int32:
    #   31 padding | 30 FIRST | 29 UNLEARNED | 28 ... 0 token id
    # Padding has the sign bit, so it is negative. A nonnegative entry above ID has FIRST or
    # UNLEARNED; the label of either is ignored. `& ID` turns padding into token 0.
    parts, is_padding = split_window(window & ID), window[..., 1:] < 0
    is_ignored = is_padding | (window[..., 1:] > ID)
    labels = np.where(is_ignored, np.int32(IGNORE), parts["labels"])
    # The first entry of every window has FIRST (`fill_window`), so the ids start at 0.
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
    """Concatenate conversations, int32, followed by `PADDING` as a document of its own."""
    window = np.full(width, PADDING, np.int32)
    end = 0
    for entries in conversations:
        window[end : end + len(entries)] = entries
        end += len(entries)
    window[end : end + 1] |= FIRST  # an empty slice where the window is full
    return window


class Packed:
    """Assignment of conversations to windows.

    Args:
        lengths: entries of each conversation, at least 1.
        width: entries of a window.
        overlong: treatment of longer conversations, as `data.overlong`.
        noun: name of conversations in `summary`.

    Attributes:
        lengths: entries of each conversation after truncation.
        overlong: number of conversations that are longer than a window.
    """

    def __init__(
        self,
        lengths: Int[np.ndarray, "n"],
        width: int,
        overlong: Overlong,
        noun: str = "conversations",
    ) -> None:
        self._noun = noun
        too_long = lengths > width
        fitting = np.flatnonzero(~too_long | (overlong == "truncate"))
        self.lengths, self.overlong = np.minimum(lengths, width), int(too_long.sum())
        self._width, self._treatment = width, "cut there" if overlong == "truncate" else "left out"
        members, self._ends = best_fit(self.lengths[fitting], width)
        self._members = fitting[members]

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, window: int) -> list[int]:
        """Return the numbers of the conversations in a window."""
        start = self._ends[window - 1] if window else 0
        return self._members[start : self._ends[window]].tolist()

    @property
    def fill(self) -> float:
        """Fraction of all window entries that is not padding."""
        return float(self.lengths[self._members].sum()) / max(1, len(self) * self._width)

    @property
    def summary(self) -> str:
        """Describe the overlong conversations and their treatment."""
        return (
            f"{self.overlong:,} of {len(self.lengths):,} {self._noun} are longer than the "
            f"{self._width} tokens of a sequence and {self._treatment} (data.overlong)"
        )


def best_fit(
    lengths: Int[np.ndarray, "n"], width: int
) -> tuple[Int[np.ndarray, "n"], Int[np.ndarray, "windows"]]:
    """Pack conversations into windows by best-fit decreasing.

    The longest conversations come first. Each goes into the window that it leaves the least room
    in, as in "Fewer Truncations Improve Language Modeling" (Ding et al., 2024).

    Args:
        lengths: entries of each conversation, from 1 to `width`.
        width: entries of a window.

    Returns:
        The numbers of the conversations, window by window, and the end of each window in that
        list. Windows are sorted by their first conversation, and conversations within a window
        by number.
    """
    # Invariant: `rooms` holds, sorted, each r > 0 for which `windows_with[r]` is not empty. So
    # the best fit is one bisection, and there are at most `width` rooms however many windows
    # there are. Full windows are in neither list.
    windows_with: list[list[int]] = [[] for _ in range(width + 1)]  # by room
    rooms: list[int] = []
    window_of, n_windows = np.empty(len(lengths), np.int64), 0
    # A stable sort: the packing is a function of the lengths and the width alone.
    longest_first = np.argsort(-lengths.astype(np.int64), kind="stable")
    for number, length in zip(longest_first.tolist(), lengths[longest_first].tolist(), strict=True):
        at = bisect_left(rooms, length)
        if at == len(rooms):  # no window has enough room
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
    # Renumber windows by their lowest conversation: argsort of argsort gives ranks.
    firsts = np.unique(window_of, return_index=True)[1]
    window_of = np.argsort(np.argsort(firsts))[window_of]
    return np.argsort(window_of, kind="stable"), np.cumsum(np.bincount(window_of))
