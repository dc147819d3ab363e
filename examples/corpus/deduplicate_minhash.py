"""Drop documents that nearly repeat an earlier one: `--map FILE:similar_text`.

    pip install datasketch
    jaxforge prepare texts/ --output data --map examples/corpus/deduplicate_minhash.py:similar_text

MinHash estimates the share of word 5-grams that two texts have in common (Jaccard similarity).
Locality-sensitive hashing compares bands of the hashes: a document is dropped if it shares a band
with an earlier document. `datasketch` chooses bands for which this is likely above a similarity of
0.8 and unlikely below. Two texts of similarity s share a band with probability
1 - (1 - s^rows)^bands, so some pairs are missed and some dropped documents are less similar.
An extra pass reads all inputs. It needs about 28 bytes of disk for each band and document.
"""

import re
from typing import Any

from datasketch import MinHash, MinHashLSH

from jaxforge.data.corpus.maps import drop_repeated

TEXT = "text"
"""Field of the text."""

THRESHOLD = 0.8
"""Similarity from which documents are repetitions."""

PERMUTATIONS = 128
WORDS = 5
"""Words of an n-gram."""

_BANDS = MinHashLSH(threshold=THRESHOLD, num_perm=PERMUTATIONS)
_WORD = re.compile(r"\w+")


@drop_repeated
def similar_text(record: dict[str, Any]) -> list[bytes]:
    """Return the bands of the text's MinHash as keys; texts without words stay."""
    words = _WORD.findall(record[TEXT].lower())
    if not words:
        return []
    grams = {" ".join(words[i : i + WORDS]) for i in range(max(1, len(words) - WORDS + 1))}
    sketch = MinHash(num_perm=PERMUTATIONS)
    sketch.update_batch([gram.encode("utf-8", errors="replace") for gram in grams])
    rows, values = _BANDS.r, sketch.hashvalues.astype("<u8")
    return [
        band.to_bytes(2, "big") + values[band * rows : (band + 1) * rows].tobytes()
        for band in range(_BANDS.b)
    ]
