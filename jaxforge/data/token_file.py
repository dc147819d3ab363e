"""One file of token ids: header, size, type and tokens.

`.npy` files hold one 1-D array of integers. `.bin` files hold little-endian integers, either bare
(the type comes from manifest or config, or is guessed as in KempnerForge) or after the header of
llm.c, which modded-nanoGPT writes too. Those of Megatron-LM have an index (`foreign_layouts`).
"""

import io
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
from jaxtyping import Int

from jaxforge.data.corpus.manifest import FILE_NAME, BlockHashes, EncodedHashes, Manifest
from jaxforge.data.foreign_layouts import SUFFIX, MegatronIndex, tokens_path
from jaxforge.errors import UserError
from jaxforge.storage import urls

if TYPE_CHECKING:
    from jaxforge.data.remote_tokens import RemoteTokens
    from jaxforge.storage.block_cache import BlockCache

log = logging.getLogger(__name__)

_HEADER = 4096  # bytes that hold the header of any .npy file
_NPY_PREFIX = 10  # bytes before the text of a header of version 1: magic, version, length

_LLM_C_HEADER = 256 * 4
"""Bytes of the header of llm.c (`dev/data/data_common.py`): 256 int32, which are magic, version,
number of tokens, zeros."""
_LLM_C_TYPES = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
"""(magic, version) -> type of the tokens: of GPT-2's tokenizer, and of Llama 3's."""


@dataclass(frozen=True, eq=False)
class TokenFile:
    """A file of tokens; equal only to itself, as another file may have taken its path.

    Attributes:
        path: its path, on this machine or in a bucket.
        dtype: type of the tokens.
        tokens: number of tokens.
        offset: bytes before the first token.
        hashes: hashes of its blocks; None where no manifest has them.
        index: index of Megatron-LM; None for files of other programs.
    """

    path: Path
    dtype: np.dtype
    tokens: int
    offset: int
    hashes: BlockHashes | None = None
    index: MegatronIndex | None = None

    def map(self, cache: "BlockCache | None" = None) -> "Int[np.ndarray, 'tokens'] | RemoteTokens":
        """Return the tokens as an array, or as an array-like for a file in a bucket.

        Args:
            cache: cache of blocks of files in buckets.
        """
        if urls.in_bucket(self.path):
            from jaxforge.data.remote_tokens import RemoteTokens

            return RemoteTokens(self.path, self.dtype, self.offset, self.tokens, self.hashes, cache)
        # As a plain array: slicing a memmap takes several times longer.
        return np.asarray(np.memmap(self.path, self.dtype, "r", self.offset, (self.tokens,)))

    def describe_location(self, number: int) -> str:
        """Return the place of a token in words, for messages."""
        return f"place {number} (byte {self.offset + number * self.dtype.itemsize})"


def inspect(path: Path, token_dtype: str, manifest: Manifest | None) -> TokenFile:
    """Read the header of a file and compare it with its size and the manifest.

    Args:
        path: a `.npy` or `.bin` file, or an index of Megatron-LM (`.idx`) for its `.bin` file.
        token_dtype: numpy name of the type of bare `.bin` files.
        manifest: manifest of the directory.

    Raises:
        UserError: the file is empty, cut short, of another type, or not the manifest's.
    """
    if path.suffix == SUFFIX:
        return _inspect_megatron(path, token_dtype)
    if path.suffix not in (".npy", ".bin"):
        raise UserError(f"{path} is neither .npy nor .bin; narrow data.file_pattern")
    try:
        if not urls.in_bucket(path) and path.stat().st_size == 0:
            raise UserError(f"{path} is empty (0 bytes); remove it or prepare it again")
        if path.suffix == ".npy":
            return _with_hashes(_inspect_npy(path), manifest)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    return _with_hashes(_inspect_bin(path, token_dtype, manifest), manifest)


def guess_type(paths: Sequence[Path]) -> str:
    """Return the type of bare `.bin` files, guessed by the size of the first as in KempnerForge."""
    first = next((path for path in paths if path.suffix == ".bin" and not _llm_c(path)), None)
    if first is None or urls.in_bucket(first):
        return ""
    size = first.stat().st_size
    guess = "uint16" if size % 4 else "uint32"
    log.warning(
        "%s is read as %s, KempnerForge's guess by its %d bytes; data.token_dtype says otherwise",
        first, guess, size,
    )  # fmt: skip
    return guess


def _with_hashes(file: TokenFile, manifest: Manifest | None) -> TokenFile:
    """Return the file with its hashes in the manifest."""
    shard = manifest and manifest.by_file.get(file.path.name)
    if manifest is None or not shard or not shard.crc32:
        return file
    written = np.dtype(manifest.dtype).newbyteorder("<")
    if (file.tokens, file.dtype) != (shard.tokens, written):
        raise UserError(
            f"{file.path} holds {file.tokens:,} tokens of {file.dtype.str} where {FILE_NAME} says "
            f"{shard.tokens:,} of {written.str}: it is another file, or damaged; copy or prepare "
            "it again"
        )
    hashes = BlockHashes(file.path, file.offset, written, EncodedHashes(shard.crc32))
    return replace(file, hashes=hashes)


def _llm_c(path: Path) -> TokenFile | None:
    """Return the file that a header of llm.c describes; None without such a header.

    Raises:
        UserError: the header is of another version, or names another number of tokens.
    """
    with _open_head(path) as file:
        head = file.read(_LLM_C_HEADER)
    if len(head) < _LLM_C_HEADER:
        return None
    header = np.frombuffer(head, "<i4")
    magics = [magic for magic, _ in _LLM_C_TYPES]
    # Tokens of a bare file may equal the magic by chance, but hardly 253 zeros after it.
    if header[0] not in magics or np.any(header[3:]):
        return None
    name = _LLM_C_TYPES.get((int(header[0]), int(header[1])))
    if name is None:
        raise UserError(
            f"{path} has a header of llm.c of version {header[1]}, which this jaxforge does not "
            "read; write it as version 1 (GPT-2) or 7 (Llama 3)"
        )
    dtype, tokens = np.dtype(name).newbyteorder("<"), int(header[2])
    _check_size(path, _LLM_C_HEADER + tokens * dtype.itemsize, "its header of llm.c")
    return TokenFile(path, dtype, tokens, _LLM_C_HEADER)


def _inspect_npy(path: Path) -> TokenFile:
    try:
        with _open_head(path) as file:
            head = file.read(_HEADER)
        # Without the tokens after them, equal headers share an entry of the cache.
        size = _NPY_PREFIX + int.from_bytes(head[_NPY_PREFIX - 2 : _NPY_PREFIX], "little")
        shape, dtype, offset = _npy_layout(head[:size] if head[6:8] == b"\1\0" else head)
    except OSError:
        raise
    except Exception as error:  # NumPy reads the header as Python code, which may raise anything
        reason = str(error) or type(error).__name__
        raise UserError(f"{path} is not a .npy file, or cut short ({reason:.200})") from error
    if len(shape) != 1 or dtype.kind not in "iu":
        raise UserError(
            f"{path} holds {dtype} of shape {shape}; token files hold one 1-D array of integers "
            "(uint16 or uint32)"
        )
    _check_size(path, offset + shape[0] * dtype.itemsize, "its header")
    if not shape[0]:
        raise UserError(f"{path} is empty (0 tokens); remove it or prepare it again")
    return TokenFile(path, dtype, shape[0], offset)


@lru_cache(8)  # the shards of a corpus have the same header, and NumPy parses it as Python code
def _npy_layout(head: bytes) -> tuple[tuple[int, ...], np.dtype, int]:
    """Return shape, type and size of the header of a .npy file that begins with `head`."""
    file = io.BytesIO(head)
    v1 = np.lib.format.read_magic(file) == (1, 0)
    read = np.lib.format.read_array_header_1_0 if v1 else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    return shape, dtype, file.tell()


def _inspect_megatron(index_path: Path, name: str) -> TokenFile:
    index, path = MegatronIndex(index_path), tokens_path(index_path)
    if not path.exists():
        raise UserError(f"{index_path} has no {path.name} next to it; copy that too")
    _check_type(name, index.dtype, index_path)
    _check_size(path, index.tokens * index.dtype.itemsize, index_path.name)
    if not index.tokens:
        raise UserError(f"{path} is empty (0 tokens); remove it with {index_path.name}")
    return TokenFile(path, index.dtype, index.tokens, 0, index=index)


def _check_type(name: str, dtype: np.dtype, source: Path) -> None:
    """Raise if `data.token_dtype` is set to another type than that of a header."""
    if name and np.dtype(name) != dtype:
        raise UserError(
            f"data.token_dtype is {name!r}, but the header of {source} says {dtype}; remove "
            "data.token_dtype"
        )


def _inspect_bin(path: Path, name: str, manifest: Manifest | None) -> TokenFile:
    shard = manifest and manifest.by_file.get(path.name)
    # Files of a manifest are bare: their tokens must not be taken for a header.
    if not shard and (header := _llm_c(path)):
        _check_type(name, header.dtype, path)
        return header
    if manifest and name != manifest.dtype:
        raise UserError(
            f"data.token_dtype is {name!r}, but {path.parent / FILE_NAME} says {manifest.dtype!r}; "
            "remove data.token_dtype"
        )
    if urls.in_bucket(path) and not shard and (manifest or not name):
        raise UserError(
            f"{path}: a .bin file in a bucket needs its type and size in a {FILE_NAME} next to it, "
            "as `jaxforge.prepare` writes it. Add it, set data.token_dtype if there is no "
            f"{FILE_NAME}, or copy the file to this machine"
        )
    # Refused below, like every type but integers, if NumPy does not know the name.
    dtype = np.dtype("V")
    with suppress(TypeError):
        dtype = np.dtype(name).newbyteorder("<")
    if dtype.kind not in "iu":
        raise UserError(
            f'data.token_dtype = {name!r} is not an integer type; try "uint16" or "uint32"'
        )
    if shard:
        _check_size(path, shard.tokens * dtype.itemsize, FILE_NAME)
        return TokenFile(path, dtype, shard.tokens, 0)
    size = _size(path)
    if size % dtype.itemsize:
        raise UserError(
            f"{path} has {size} bytes, which is not a multiple of the size of {name}: it is cut "
            "short, or data.token_dtype is another"
        )
    return TokenFile(path, dtype, size // dtype.itemsize, 0)


def _size(path: Path) -> int:
    if not urls.in_bucket(path):
        return path.stat().st_size
    from jaxforge.storage import files

    return files.stat(path).size


def _open_head(path: Path) -> IO[bytes]:
    if not urls.in_bucket(path):
        return path.open("rb")
    from jaxforge.storage import files

    return io.BytesIO(files.head(path, _HEADER))


def _check_size(path: Path, expected: int, source: str) -> None:
    size = _size(path)
    if size != expected:
        problem = "is cut short" if size < expected else "is too long"
        raise UserError(
            f"{path} {problem}: it has {size} bytes where {source} says {expected}; copy or "
            "prepare it again"
        )
