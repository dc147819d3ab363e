"""Directories of token files that other programs wrote, recognised by their names.

- Megatron-LM: `PREFIX.idx` and `PREFIX.bin`, as a prefix or a directory;
- nanoGPT: `train.bin` and `val.bin`, bare uint16;
- llm.c: `*_train_*.bin` and `*_val_*.bin`, with a header.

They are read if a directory has no file of the default pattern, and no `manifest.json`.

Megatron-Core's `IndexedDatasetBuilder` writes the index `PREFIX.idx`, little-endian:

    9 bytes     magic "MMIDIDX", two zeros
    uint64      version, 1
    uint8       code of the token type (`_TYPES`)
    uint64      n, the number of sequences
    uint64      m, the length of the document index
    int32 [n]   tokens of each sequence
    int64 [n]   first byte of each sequence in PREFIX.bin
    int64 [m]   first sequence of each document; at the end n
    int8 [n]    mode of each sequence; only of multimodal data
"""

import logging
import mmap
import struct
import zlib
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int, Int64

from jaxforge.config.data import DataConfig
from jaxforge.errors import UserError
from jaxforge.storage import urls

log = logging.getLogger(__name__)

Split = Literal["train", "val"]
_DEFAULT = DataConfig.model_fields["file_pattern"].default
MAGIC = b"MMIDIDX\x00\x00"
SUFFIX = ".idx"

_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {4: "int32", 8: "uint16"}
"""Code -> type: the types that Megatron chooses for vocabularies."""
_OTHER_TYPES = {1: "uint8", 2: "int8", 3: "int16", 5: "int64", 6: "float64", 7: "float32"}
_CHUNK = 1 << 20  # entries that are checked at a time


class ForeignLayout(NamedTuple):
    """Token files of a program.

    Attributes:
        paths: `.bin` files, or the `.idx` of Megatron's, sorted.
        dtype: NumPy name of the type of bare files; "" if each file says it.
    """

    paths: list[Path]
    dtype: str = ""


def find_layout(directory: Path, pattern: str, split: Split) -> ForeignLayout | None:
    """Return the token files of another program; None if there are none.

    Args:
        directory: a directory, or the prefix of Megatron's files.
        pattern: `data.file_pattern`. Another than the default one selects files by itself.
        split: the part to read of directories that hold both.
    """
    if is_prefix(directory):
        return ForeignLayout([directory.with_name(directory.name + SUFFIX)])
    if pattern != _DEFAULT or next(directory.glob(pattern), None) is not None:
        return None
    for glob, dtype, name in (
        (f"*{SUFFIX}", "", "Megatron-LM"),
        (f"{split}.bin", "uint16", "nanoGPT"),
        (f"*_{split}_*.bin", "", "llm.c"),
    ):
        if paths := sorted(directory.glob(glob)):
            log.info("%s: reading %d file(s) %s of %s", directory, len(paths), glob, name)
            return ForeignLayout(paths, dtype)
    return None


def with_indices(paths: Sequence[Path]) -> list[Path]:
    """Replace each `.bin` file by its index, if Megatron wrote one next to it."""
    indices = (path.suffix == ".bin" and index_of(path) for path in paths)
    # A pattern may match both PREFIX.bin and PREFIX.idx: each file is read once.
    return list(dict.fromkeys(index or path for index, path in zip(indices, paths, strict=True)))


def is_prefix(path: Path) -> bool:
    """Return whether a path is the prefix of Megatron's token files."""
    return not path.is_dir() and path.with_name(path.name + SUFFIX).exists()


def prefix_hint(path: Path) -> str:
    """Return advice, appended to a path, for a file of Megatron instead of its prefix; else ""."""
    prefix = path.with_suffix("")
    if path.suffix not in (".bin", SUFFIX) or not is_prefix(prefix):
        return ""
    return f"is a file; name the prefix of Megatron's files instead: {prefix}"


class MegatronIndex:
    """Sequences and documents of a token file.

    Args:
        path: the `.idx` file. On this machine, the file is mapped into memory. In a bucket, it is
            read whole: 20 bytes for each document.

    Attributes:
        path: the file.
        dtype: type of the tokens.
        tokens: number of tokens.
        crc32: CRC-32 of the file.

    Raises:
        UserError: the file is something else, of another version, or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        data = self._read()
        if data[: len(MAGIC)] != MAGIC:
            raise self._error('does not begin with "MMIDIDX": is it an index of Megatron-Core?')
        if len(data) < _HEADER.size:
            raise self._error("is cut short in its header")
        _, version, code, n, m = _HEADER.unpack(data[: _HEADER.size])
        if version != 1:
            raise self._error(f"has version {version}, and this jaxforge reads version 1")
        if code not in _TYPES:
            name = _OTHER_TYPES.get(code, "unknown")
            raise self._error(f"has tokens of type {code} ({name}); uint16 and int32 are supported")
        self.dtype = np.dtype(_TYPES[code]).newbyteorder("<")
        # int32 and int64 for each sequence, int64 for each entry of the document index.
        expected = _HEADER.size + 12 * n + 8 * m
        if len(data) not in (expected, expected + n):  # with modes
            raise self._error(
                f"has {len(data):,} bytes, not the {expected:,} of {n:,} sequences and "
                f"{max(m - 1, 0):,} documents"
            )
        at = _HEADER.size
        lengths: Int[np.ndarray, "n"] = np.frombuffer(data, "<i4", n, at)
        self._pointers: Int64[np.ndarray, "n"] = np.frombuffer(data, "<i8", n, at + 4 * n)
        self._documents: Int64[np.ndarray, "m"] = np.frombuffer(data, "<i8", m, at + 12 * n)
        self.tokens = self._check_sequences(lengths)
        self._check_documents(n)
        self.crc32 = zlib.crc32(data)

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self._documents) - 1

    def document_starts(self, start: int, end: int) -> Int64[np.ndarray, "_"]:
        """Return the tokens from `start` to `end` at which documents begin, ascending."""
        # `bisect` reads a few entries; `np.searchsorted` would copy the unaligned arrays whole.
        size, documents = self.dtype.itemsize, self._documents
        first, last = (bisect_left(self._pointers, token * size) for token in (start, end))
        # The last entry, n, is never below `last`: it ends the documents and begins none.
        sequences = documents[bisect_left(documents, first) : bisect_left(documents, last)]
        return self._pointers[sequences] // size

    def __reduce__(self) -> tuple:
        # A memory map cannot be pickled: the other process opens the file again.
        return MegatronIndex, (self.path,)

    def _read(self) -> memoryview:
        try:
            # An empty file cannot be mapped.
            if urls.in_bucket(self.path) or self.path.stat().st_size == 0:
                return memoryview(self.path.read_bytes())
            with self.path.open("rb") as file:
                return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror or error}") from error

    def _check_sequences(self, lengths: Int[np.ndarray, "n"]) -> int:
        """Return the number of tokens.

        Raises:
            UserError: lengths are negative, or sequences do not follow one another.
        """
        tokens = 0
        for at in range(0, len(lengths), _CHUNK):
            # In int64: a sum of int32 lengths may exceed 2^31.
            part = lengths[at : at + _CHUNK].astype(np.int64)
            ends = tokens + np.cumsum(part)
            pointers = self._pointers[at : at + _CHUNK]
            is_wrong = (part < 0) | (pointers != (ends - part) * self.dtype.itemsize)
            if is_wrong.any():
                i = int(np.argmax(is_wrong))
                raise self._error(
                    f"is damaged: sequence {at + i:,} has {part[i]:,} tokens from byte "
                    f"{pointers[i]:,} on, and the ones before it end at byte "
                    f"{(ends[i] - part[i]) * self.dtype.itemsize:,}"
                )
            tokens = int(ends[-1])
        return tokens

    def _check_documents(self, sequences: int) -> None:
        documents = self._documents
        before = 0
        for at in range(0, len(documents), _CHUNK):
            part = documents[at : at + _CHUNK].astype(np.int64)
            is_wrong = np.diff(part, prepend=before) < 0
            if is_wrong.any():
                i = at + int(np.argmax(is_wrong))
                raise self._error(
                    f"is damaged: document {i:,} begins before its predecessor, at sequence "
                    f"{documents[i]:,}"
                )
            before = int(part[-1])
        if len(documents) == 0 or documents[0] != 0 or documents[-1] != sequences:
            raise self._error(
                f"is damaged: its documents do not extend from sequence 0 to {sequences:,}"
            )

    def _error(self, problem: str) -> UserError:
        return UserError(f"{self.path} {problem}; copy it again, with its .bin file, or preprocess "
                         "the data again")  # fmt: skip


def tokens_path(index: Path) -> Path:
    """Return the `.bin` file of an index."""
    return index.with_name(index.name.removesuffix(SUFFIX) + ".bin")


def index_of(tokens: Path) -> Path | None:
    """Return the index of a `.bin` file; None without one that Megatron wrote."""
    path = tokens.with_suffix(SUFFIX)
    try:
        # By its first bytes, as any program may write a .idx next to a .bin.
        if urls.in_bucket(path):
            from jaxforge.storage import files

            is_index = path.exists() and files.head(path, len(MAGIC)) == MAGIC
        else:
            with path.open("rb") as file:
                is_index = file.read(len(MAGIC)) == MAGIC
    except OSError:
        return None
    return path if is_index else None
