"""Format of a directory of token shards: `manifest.json`, and entries of conversations.

An entry is a token id with two flag bits for the loss.
"""

import base64
import functools
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from jaxtyping import Int, UInt32
from pydantic import FailFast, TypeAdapter, ValidationError

from jaxforge.data.corpus.statistics import CorpusStatistics
from jaxforge.errors import UserError
from jaxforge.storage.safe_files import read_regular
from jaxforge.storage.untrusted_json import first_problem

FIRST = 1 << 30
"""Bit of the first entry of a conversation."""

UNLEARNED = 1 << 29
"""Bit of entries without loss."""

ID = UNLEARNED - 1
"""Mask of the token id in an entry."""

PADDING = -(1 << 31) | UNLEARNED
"""Entry (int32) of the unused tail of a window; it is never on disk."""

ENTRY_DTYPE = "uint32"
"""NumPy name of the type of entries on disk."""

FILE_NAME = "manifest.json"
VERSION = 1
CONVERSATIONS = 2
"""Version of directories with conversation entries instead of tokens."""
PREFERENCES = 3
"""Version of directories with pairs of conversations: chosen and rejected in turn."""

LENGTHS = "lengths.uint32"
"""File of the number of entries of each conversation: little-endian uint32, in order."""

BLOCK_BYTES = 1 << 16
"""Bytes of tokens per hash. A random window costs the hash of a block, about 40 us."""


@dataclass(frozen=True)
class Options:
    """Options that the shards depend on, in addition to inputs and tokenizer.

    Attributes:
        dtype: numpy name of the type on disk.
        file_format: "npy" or "bin".
        shard_tokens: tokens per shard.
        validation_fraction: fraction of the documents to hold out.
        validation_tokens: number of first tokens to hold out instead.
        max_bytes: bytes of text after which to stop.
        skip_bad: skip records without text.
        conversations: documents are conversations (`Conversations.document`).
        preferences: documents are pairs of conversations (`Preferences.document`).
        rules: names of the maps, in order.
    """

    dtype: str
    file_format: str = "npy"
    shard_tokens: int = 100_000_000
    validation_fraction: float = 0.0
    validation_tokens: int = 0
    max_bytes: int | None = None
    skip_bad: bool = False
    conversations: bool = False
    preferences: bool = False
    rules: tuple[str, ...] = ()

    @property
    def version(self) -> int:
        """The version of the manifest."""
        if self.preferences:
            return PREFERENCES
        return CONVERSATIONS if self.conversations else VERSION

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits to write."""
        holds_out = self.validation_fraction or self.validation_tokens
        return ("train", "validation") if holds_out else ("train",)


@dataclass(frozen=True)
class Shard:
    """One token file.

    Attributes:
        file: name within the directory.
        tokens: tokens in the file.
        max_token: largest token id in the file.
        crc32: CRC-32 of each `BLOCK_BYTES` of its tokens, without the header of a .npy file, as
            little-endian uint32 in Base64; "" in manifests of versions that computed none.
    """

    file: str
    tokens: int
    max_token: int
    crc32: str = ""

    def block_hashes(self) -> UInt32[np.ndarray, "blocks"] | None:
        """Return the hash of each block of tokens; None where the manifest has none.

        Raises:
            ValueError: `crc32` is not the Base64 of whole numbers.
        """
        if not self.crc32:
            return None
        return np.frombuffer(base64.b64decode(self.crc32, validate=True), "<u4")


class EncodedHashes:
    """`Shard.crc32` as a sequence of numbers that decodes each hash when it is read.

    A terabyte of tokens has 15 million hashes, and a process reads few of them.

    Args:
        crc32: the Base64 of whole numbers.
    """

    def __init__(self, crc32: str) -> None:
        self._crc32 = crc32

    def __len__(self) -> int:
        # Base64: 4 characters for 3 bytes, less one for each final "="; 4 bytes for a hash.
        return (len(self._crc32) // 4 * 3 - self._crc32.count("=", -2)) // 4

    def __getitem__(self, block: int) -> int:
        # Four characters hold three bytes: the four bytes of a hash are in two of these groups.
        group, within = divmod(4 * block, 3)
        data = base64.b64decode(self._crc32[4 * group : 4 * group + 8])
        return int.from_bytes(data[within : within + 4], "little")


def extend_hashes(crc32: str, size: int, more: bytes) -> str:
    """Return `Shard.crc32` after bytes were appended to a shard.

    Args:
        crc32: `Shard.crc32` before.
        size: bytes of tokens so far.
        more: bytes appended.
    """
    hashes, data = bytearray(base64.b64decode(crc32)), memoryview(more)
    while data:
        filled = size % BLOCK_BYTES
        # The last block may be incomplete: its CRC continues from the one that is stored.
        begun = int.from_bytes(hashes[-4:], "little") if filled else 0
        part = data[: BLOCK_BYTES - filled]
        hashes[len(hashes) - 4 * bool(filled) :] = zlib.crc32(part, begun).to_bytes(4, "little")
        size, data = size + len(part), data[len(part) :]
    return base64.b64encode(hashes).decode()


class BlockHashes:
    """Block hashes of one file that is read, with a record of the verified blocks.

    A window costs the hash of one or two blocks, once per process.

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
                # Without a lock: two threads that check the same block only repeat work.
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


@dataclass(frozen=True)
class Manifest:
    """Metadata of a shard directory, so that readers need not scan the tokens.

    Attributes:
        version: `VERSION`, or `CONVERSATIONS` or `PREFERENCES`: then each document is a
            conversation, no shard holds a part of one, and `LENGTHS` lies next to them.
        dtype: numpy name of the token type, the same in all shards ("uint16").
        tokens: tokens in all shards together, end-of-text tokens included.
        documents: documents in all shards together.
        max_token: largest token id in any shard.
        eos_id: token that ends each document.
        vocab_size: size of the tokenizer's vocabulary.
        tokenizer: name that the user gave ("byte", "bpe" or a path); `../tokenizer` has a copy.
        tokenizer_sha256: `Tokenizer.fingerprint` of that tokenizer.
        shards: the files, in order.
        lengths_crc32: CRC-32 of `LENGTHS`; None without the file, and in older versions.
        bos_ids: tokens that each document begins with; for conversations, only those without a
            chat template.
        statistics: lengths and sources of the documents; None in older versions.
    """

    version: int
    dtype: str
    tokens: int
    documents: int
    max_token: int
    eos_id: int | None
    vocab_size: int
    tokenizer: str
    tokenizer_sha256: str
    shards: Annotated[tuple[Shard, ...], FailFast()]
    lengths_crc32: int | None = None
    bos_ids: tuple[int, ...] = ()
    statistics: CorpusStatistics | None = None

    @classmethod
    def of_shards(cls, shards: Iterable[Shard], **fields: Any) -> "Manifest":  # noqa: ANN401
        """Return the manifest of shards; `fields` are those that do not follow from them."""
        shards = tuple(shards)
        return cls(
            shards=shards,
            tokens=sum(shard.tokens for shard in shards),
            max_token=max((shard.max_token for shard in shards), default=0),
            **fields,
        )

    @property
    def conversations(self) -> bool:
        """True if shards hold conversation entries instead of plain tokens."""
        return self.version in (CONVERSATIONS, PREFERENCES)

    @property
    def preferences(self) -> bool:
        """True if conversations are pairs of answers."""
        return self.version == PREFERENCES

    @functools.cached_property  # a reader looks up each of perhaps 100,000 files
    def by_file(self) -> Mapping[str, Shard]:
        """The shards, by file name."""
        return {shard.file: shard for shard in self.shards}

    def write(self, directory: Path) -> None:
        """Write `directory/manifest.json`."""
        (directory / FILE_NAME).write_bytes(_JSON.dump_json(self, indent=2) + b"\n")

    @classmethod
    def read(cls, directory: Path) -> "Manifest | None":
        """Read `directory/manifest.json`; return None if it does not exist.

        Raises:
            UserError: the file is damaged, is not a manifest, or has an unknown version.
        """
        path = directory / FILE_NAME
        try:
            content = read_regular(path, _MOST_BYTES)
            # Before the parser, which makes an object of each brace.
            if _SHARD_BYTES * content.count(b"{") > len(content) + 1000:
                raise UserError(_not_a_manifest(path, "its tables are too small for shards"))
            manifest = _JSON.validate_json(content, strict=True)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        except ValidationError as error:
            raise UserError(_not_a_manifest(path, first_problem(error))) from error
        if manifest.version not in (VERSION, CONVERSATIONS, PREFERENCES):
            known = f"{VERSION}, {CONVERSATIONS} and {PREFERENCES}"
            reason = f"version is {manifest.version}, this jaxforge knows {known}"
            raise UserError(_not_a_manifest(path, reason))
        _check_hashes(path, manifest)
        return manifest


_JSON = TypeAdapter(Manifest)
_MOST_BYTES = 1 << 30  # 12 TB of tokens
_SHARD_BYTES = 30  # minimum size of a shard in JSON: a megabyte of {} would take a gigabyte


def _check_hashes(path: Path, manifest: Manifest) -> None:
    """Raise if a shard has another number of hashes than of blocks."""
    for shard in manifest.shards:
        try:
            hashes = shard.block_hashes()
            # Rounded up: the last block may be shorter, and has a hash, too.
            blocks = -(-shard.tokens * np.dtype(manifest.dtype).itemsize // BLOCK_BYTES)
        except (TypeError, ValueError) as error:
            raise UserError(_not_a_manifest(path, f"{shard.file}: {error}")) from error
        if hashes is not None and len(hashes) != blocks:
            reason = f"crc32 of {shard.file} has {len(hashes)} hashes for {blocks} blocks"
            raise UserError(_not_a_manifest(path, reason))


def _not_a_manifest(path: Path, reason: str) -> str:
    return (
        f"{path} is not a manifest of token shards ({reason}); run jaxforge.prepare again, or "
        "remove the file to have the shards themselves read instead"
    )
