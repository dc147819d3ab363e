"""Pictures of few colours as PNG files."""

import struct
import zlib
from collections.abc import Sequence

import numpy as np

COLOURS = 16
"""Most colours of a picture: a pixel takes half a byte, before compression."""


def png(pixels: np.ndarray, palette: Sequence[tuple[int, int, int]]) -> bytes:
    """A PNG file (the W3C's specification, third edition) whose colours are those of a palette.

    Args:
        pixels: [height, width], numbers of colours, below `COLOURS`. The one after the palette's
            last is transparent.
        palette: red, green and blue, 0 to 255; fewer than `COLOURS`.
    """
    height, width = pixels.shape
    colours = bytes(channel for colour in (*palette, (0, 0, 0)) for channel in colour)
    opacities = b"\xff" * len(palette) + b"\x00"
    padded = np.pad(pixels.astype(np.uint8), ((0, 0), (0, width % 2)))
    rows = padded[:, ::2] << 4 | padded[:, 1::2]  # two pixels a byte, the left one in its high bits
    unfiltered = np.pad(rows, ((0, 0), (1, 0)))  # each row's filter, 0, stands before it
    depth, indexed = 4, 3
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        (
            _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, indexed, 0, 0, 0)),
            _chunk(b"PLTE", colours),
            _chunk(b"tRNS", opacities),
            _chunk(b"IDAT", zlib.compress(unfiltered.tobytes(), 9)),
            _chunk(b"IEND", b""),
        )
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
