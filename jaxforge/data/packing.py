"""Windows of tokens to model inputs.

S is `train.seq_len`; a window holds S + 1 tokens, so that every input has its next token.
"""

import numpy as np
from jaxtyping import Int

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
        `input_ids`, `labels` and `doc_ids`, int32 [..., S]. Document ids count up from 0 in each
        window; labels that belong to another document than their input are `IGNORE`.
    """
    ends = window == eos_id
    doc_ids = (np.cumsum(ends, axis=-1) - ends).astype(np.int32)
    parts = split_window(window)
    same = doc_ids[..., :-1] == doc_ids[..., 1:]
    labels = np.where(same, parts["labels"], np.int32(IGNORE))
    return {**parts, "labels": labels, "doc_ids": doc_ids[..., :-1]}
