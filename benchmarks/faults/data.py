"""Tokens for the drill; every batch has a token that no other batch has."""

from collections.abc import Collection
from pathlib import Path

import numpy as np

TRAINING, SECOND, HELD_OUT = "training", "second", "held_out"
MARKS = 256
"""Token MARKS + i stands in batch i alone."""

N_BATCHES, ROWS, LENGTH = 240, 8, 32
VOCABULARY = MARKS + N_BATCHES
BATCHES_PER_FILE = 30
MARKED_ROW = 5
"""Of each batch; with two processes it is the second one's."""


def write(directory: Path, left_out: Collection[int] = ()) -> None:
    """Write `training/`, `second/` and `held_out/` with rows of tokens that follow a rule.

    Args:
        directory: destination.
        left_out: batches to leave out; later batches move up.
    """
    rng = np.random.default_rng(0)
    start, stride = rng.integers(0, 256, (2, N_BATCHES, ROWS, 1))
    tokens = (start + (stride % 8) * np.arange(LENGTH + 1)) % 256
    tokens[:, MARKED_ROW, 7] = MARKS + np.arange(N_BATCHES)
    rows = np.delete(tokens, list(left_out), axis=0).astype(np.uint16)
    for i in range(0, len(rows), BATCHES_PER_FILE):
        path = directory / TRAINING / f"{i:04}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, rows[i : i + BATCHES_PER_FILE].reshape(-1))
    for name in (SECOND, HELD_OUT):
        (directory / name).mkdir()
    np.save(directory / SECOND / "0000.npy", rows[::-1].reshape(-1))
    np.save(directory / HELD_OUT / "0000.npy", tokens[:6].reshape(-1).astype(np.uint16))
