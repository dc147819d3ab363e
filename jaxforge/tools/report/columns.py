"""Columns of numbers inside of JSON."""

import base64

import numpy as np


def encoded(values: np.ndarray, kind: str) -> str:
    """Numbers as `drawing.js` reads them: their kind, then little-endian bytes in base64.

    Args:
        values: [n].
        kind: "f4", "f8" or "i4".
    """
    data = np.ascontiguousarray(values, f"<{kind}").tobytes()
    return f"{kind}:{base64.b64encode(data).decode()}"


class Pool:
    """Columns that several curves share, each kept once.

    Attributes:
        columns: all of them, encoded.
    """

    def __init__(self) -> None:
        self._places: dict[str, int] = {}

    def add(self, values: np.ndarray, kind: str) -> int:
        """The place of a column among `columns`; args as of `encoded`."""
        return self._places.setdefault(encoded(values, kind), len(self._places))

    @property
    def columns(self) -> list[str]:
        """All of them, encoded."""
        return list(self._places)
