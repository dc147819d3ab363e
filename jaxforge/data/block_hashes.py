"""Verification of token files against the hashes in their manifest while they are read.

A file is hashed in blocks of 64 KiB (`manifest.BLOCK_BYTES`). So a window costs the hash of one or
two blocks, once per process.
"""

import os
import zlib

import numpy as np
from jaxtyping import Int, UInt32

from jaxforge.data.corpus.manifest import BLOCK_BYTES, FILE_NAME, EncodedHashes
from jaxforge.errors import UserError


class BlockHashes:
    """Block hashes of one file, with a record of the verified blocks.

    Args:
        path: the file.
        offset: bytes before its first token.
        dtype: type of the tokens.
        hashes: CRC-32 of each block.
    """

    def __init__(
        self,
        path: os.PathLike,
        offset: int,
        dtype: np.dtype,
        hashes: UInt32[np.ndarray, "blocks"] | EncodedHashes,
    ) -> None:
        self._path, self._offset, self._hashes = path, offset, hashes
        self._tokens = BLOCK_BYTES // dtype.itemsize  # of a block
        self._is_checked = bytearray(len(hashes))

    def of_block(self, block: int) -> int:
        """Return the CRC-32 that a block must have."""
        return int(self._hashes[block])

    def check_once(self, tokens: Int[np.ndarray, "tokens"], start: int, end: int) -> None:
        """Verify the blocks that contain a range, unless this process has verified them before.

        Args:
            tokens: all tokens of the file.
            start: first token of the range.
            end: token after its last.

        Raises:
            UserError: a block has other bytes than `prepare` wrote.
        """
        for block in range(start // self._tokens, -(-end // self._tokens)):
            if not self._is_checked[block]:
                self.check(tokens[block * self._tokens : (block + 1) * self._tokens], block)
                self._is_checked[block] = True

    def check_from(self, tokens: Int[np.ndarray, "_"], first: int) -> None:
        """Verify whole blocks; `first` is the index of the first token.

        Raises:
            UserError: a block has other bytes than `prepare` wrote.
        """
        for at in range(0, len(tokens), self._tokens):
            self.check(tokens[at : at + self._tokens], (first + at) // self._tokens)

    def check(self, tokens: Int[np.ndarray, "_"], block: int) -> None:
        """Verify one block.

        Raises:
            UserError: the block has other bytes than `prepare` wrote.
        """
        if zlib.crc32(tokens.data) == self._hashes[block]:
            return
        first, size = block * self._tokens, tokens.itemsize
        raise UserError(
            f"{os.fspath(self._path)} is damaged: bytes {self._offset + first * size:,} to "
            f"{self._offset + (first + len(tokens)) * size - 1:,} (tokens {first:,} to "
            f"{first + len(tokens) - 1:,}) are not what prepare wrote, by their hash in "
            f"{FILE_NAME}; copy or prepare the file again"
        )
