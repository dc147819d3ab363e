import json
from pathlib import Path

import numpy as np

from jaxforge.data.packing import IGNORE, split_packed, split_window

GOLDEN = json.loads((Path(__file__).parent / "golden_small.json").read_text())


def test_packing_matches_kempnerforge():
    window = np.array(GOLDEN["packed_tokens"], np.uint16)
    parts = split_packed(window, GOLDEN["packed_eos"])
    theirs = GOLDEN["packed"]
    theirs["segment_ids"] = theirs.pop("doc_ids")
    assert {name: part.tolist() for name, part in parts.items()} == theirs
    assert {part.dtype for part in parts.values()} == {np.dtype(np.int32)}


def test_labels_are_the_next_inputs():
    parts = split_window(np.arange(9, dtype=np.uint32))
    assert parts["input_ids"].tolist() == list(range(8))
    assert parts["labels"].tolist() == list(range(1, 9))
    assert {part.dtype for part in parts.values()} == {np.dtype(np.int32)}


def test_packing_matches_definition():
    rng = np.random.default_rng(0)
    for _ in range(50):
        window = rng.integers(0, 4, 33)
        parts = split_packed(window, 0)
        for i, doc in enumerate(parts["segment_ids"]):
            assert doc == (window[:i] == 0).sum()
            assert parts["labels"][i] == (IGNORE if window[i] == 0 else window[i + 1])
        assert (parts["input_ids"] == window[:-1]).all()


def test_window_without_eos_masks_nothing():
    parts = split_packed(np.arange(1, 10), 0)
    assert (parts["segment_ids"] == 0).all()
    assert (parts["labels"] != IGNORE).all()
