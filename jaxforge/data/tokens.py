"""Token shards on disk: files of token ids, read as windows.

Index spaces:
    token: place in one file, 0 … tokens-1.
    window: place in the whole directory. A window is S + 1 consecutive tokens of one file
        (S = `train.seq_len`; the extra one is the last position's label), the next begins where it
        ends, and what remains of each file is not read. Files count in the order of their names.

`.npy` files hold one 1-D array of integers; `.bin` files hold little-endian integers and nothing
else, so that their type has to be told, or is guessed as KempnerForge does.

Files of this machine are mapped into memory. From a bucket, each window is a request of its own for
its bytes, many at a time, and nothing is kept on a disk.
"""

import io
import logging
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int
from numpy.typing import ArrayLike

from jaxforge import storage
from jaxforge.corpus.manifest import FILE_NAME, Manifest
from jaxforge.corpus.text_files import how_to_prepare
from jaxforge.errors import UserError
from jaxforge.near import path_hint

if TYPE_CHECKING:
    from jaxforge.data.remote_tokens import RemoteTokens

log = logging.getLogger(__name__)

_OPEN_FILES = (
    64  # maps held at a time: each holds a file descriptor, and a corpus may be many files
)
_CHUNK = 1 << 20  # tokens scanned at a time
_HEADER = 4096  # bytes that hold the header of any .npy file


@dataclass(frozen=True)
class TokenFile:
    """A file of tokens.

    Attributes:
        path: where it is.
        dtype: of the tokens.
        tokens: how many.
        offset: bytes before the first token.
    """

    path: Path
    dtype: np.dtype
    tokens: int
    offset: int

    def map(self) -> "Int[np.ndarray, 'tokens'] | RemoteTokens":
        """The tokens, as an array or what stands for one."""
        if storage.in_bucket(self.path):
            from jaxforge.data.remote_tokens import RemoteTokens

            return RemoteTokens(self.path, self.dtype, self.offset)
        # As a plain array: cutting a piece out of a memmap takes several times longer.
        return np.asarray(np.memmap(self.path, self.dtype, "r", self.offset, (self.tokens,)))


class TokenFiles:
    """A directory of token files.

    Everything that can be wrong with the files is found here, before the first step.

    Args:
        directory: `data.dataset_path`.
        pattern: which files of the directory, as a glob ("*.npy").
        vocab_size: `model.vocab_size`; all tokens are below.
        token_dtype: numpy name of the type in `.bin` files; by default the manifest's or a guess.
        keys: config keys of directory and pattern, for error messages.

    Attributes:
        directory: where they are.
        manifest: the directory's `manifest.json`, or None.
        files: in the order of their names.
        tokens: tokens in all files together.

    Raises:
        UserError: no such directory or files; a file is empty, cut short, of another type, or
            holds tokens outside the vocabulary.
    """

    def __init__(
        self,
        directory: str | Path,
        pattern: str,
        *,
        vocab_size: int,
        token_dtype: str | None = None,
        keys: tuple[str, str] = ("data.dataset_path", "data.file_pattern"),
    ) -> None:
        self.directory = storage.path(directory, keys[0])
        paths = _matches(self.directory, pattern, keys)
        self.manifest = Manifest.read(self.directory)
        told = token_dtype or (self.manifest.dtype if self.manifest else _guess(paths))
        self.files = [_inspect(path, told, self.manifest) for path in paths]
        self.tokens = sum(file.tokens for file in self.files)
        for file in self.files:
            _check_vocabulary(file, vocab_size, self.manifest)
        self._map = lru_cache(_OPEN_FILES)(self._map_file)

    def piece(self, file: int, start: int, end: int) -> ArrayLike:
        """Tokens of a file; of one in a bucket, on their way."""
        return self._map(file)[start:end]

    def _map_file(self, file: int) -> "Int[np.ndarray, 'tokens'] | RemoteTokens":
        try:
            return self.files[file].map()
        except (OSError, ValueError) as error:  # ValueError: shorter than it was
            raise UserError(
                f"{self.files[file].path} was whole when the run started and cannot be read now "
                f"({error}); bring it back, then run the same command to go on"
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_map"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map = lru_cache(_OPEN_FILES)(self._map_file)


class TokenShards(TokenFiles):
    """The windows of a directory of token files: a Grain `RandomAccessDataSource`.

    Args:
        directory: as of `TokenFiles`.
        pattern: likewise.
        seq_len: S; a window holds S + 1 tokens.
        options: as of `TokenFiles`.

    Raises:
        UserError: as `TokenFiles`; or no file is as long as a window.
    """

    def __init__(
        self,
        directory: str | Path,
        pattern: str,
        seq_len: int,
        **options: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(directory, pattern, **options)
        self.window = seq_len + 1
        self._ends = list(accumulate(file.tokens // self.window for file in self.files))
        if not len(self):
            key = options.get("keys", ("data.dataset_path",))[0]
            raise UserError(_too_short(self.files, self.window, key))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Int[np.ndarray, "S+1"]:
        """Window `index`, int32 [S + 1]."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        return self.batch([index])[0]

    def batch(self, indices: Sequence[int]) -> Int[np.ndarray, "n S+1"]:
        """The windows `indices`, all below `len(self)`, int32 [n, S + 1]."""
        windows = np.empty((len(indices), self.window), np.int32)
        pieces = [self._piece(index) for index in indices]  # of a bucket: all of them are asked for
        for row, piece in zip(windows, pieces, strict=True):
            row[:] = piece
        return windows

    def __repr__(self) -> str:
        files = f"{len(self.files)} files, {len(self)} windows of {self.window} tokens"
        return f"TokenShards({str(self.directory)!r}: {files})"

    def _piece(self, index: int) -> ArrayLike:
        file = bisect_right(self._ends, index)
        start = (index - (self._ends[file - 1] if file else 0)) * self.window
        return self.piece(file, start, start + self.window)


class SyntheticTokens:
    """Windows of random tokens, without end for all practical purposes.

    Window i is a pure function of (seed, i): words of a Philox generator, which counts in i,
    modulo the vocabulary.

    Args:
        vocab_size: tokens are 0 … vocab_size-1, equally likely.
        seq_len: S; a window holds S + 1 tokens.
        seed: any integer.
    """

    def __init__(self, vocab_size: int, seq_len: int, seed: int) -> None:
        self.vocab_size, self.window, self.seed = vocab_size, seq_len + 1, seed

    def __len__(self) -> int:
        return 2**31 - 1

    def __getitem__(self, index: int) -> Int[np.ndarray, "S+1"]:
        """Window `index`, int32 [S + 1]."""
        # Raw words, as numpy may change how it makes bounded integers of them.
        words = np.random.Philox(key=self.seed % 2**128, counter=index << 64)
        return (words.random_raw(self.window) % self.vocab_size).astype(np.int32)

    def batch(self, indices: Sequence[int]) -> Int[np.ndarray, "n S+1"]:
        """The windows `indices`, int32 [n, S + 1]."""
        return np.stack([self[index] for index in indices])

    def __repr__(self) -> str:
        return f"SyntheticTokens({self.vocab_size}, {self.window - 1}, {self.seed})"


def _matches(directory: Path, pattern: str, keys: tuple[str, str]) -> list[Path]:
    """The files that `pattern` names, sorted."""
    of_directory, of_pattern = keys
    if not directory.is_dir():
        file = directory.exists() and (how_to_prepare(directory) or "is a file, not a directory")
        what = file or f"does not exist{path_hint(directory)}"
        raise UserError(f"{of_directory}: {directory.absolute()} {what}")
    try:
        paths = sorted(path for path in directory.glob(pattern) if not path.is_dir())
    except (ValueError, NotImplementedError, IndexError) as error:  # as pathlib says it
        raise UserError(
            f"{of_pattern} = {pattern!r} is no pattern of files below {of_directory} ({error}): "
            "give one such as '*.npy'"
        ) from error
    if paths:
        return paths
    prepared = next(directory.glob(f"*/{FILE_NAME}"), None)
    if prepared:
        raise UserError(
            f"no file matches {pattern!r} in {directory}, but {prepared.parent} holds shards; "
            f"set {of_directory} to it"
        )
    if not storage.in_bucket(directory) and (advice := how_to_prepare(directory)):
        raise UserError(f"{of_directory}: {directory} {advice}")
    names = sorted(path.name for path in directory.iterdir())
    there = ", ".join(names[:5]) + (", …" if len(names) > 5 else "") or "nothing"
    raise UserError(f"no file matches {of_pattern} = {pattern!r} in {directory} (it holds {there})")


def _guess(paths: Sequence[Path]) -> str:
    """The type of `.bin` files by the size of the first, as KempnerForge guesses it."""
    first = next((path for path in paths if path.suffix == ".bin"), None)
    if first is None:
        return ""
    size = first.stat().st_size
    guess = "uint16" if size % 4 else "uint32"
    log.warning(
        "%s is read as %s, KempnerForge's guess by its %d bytes; data.token_dtype says otherwise",
        first, guess, size,
    )  # fmt: skip
    return guess


def _inspect(path: Path, token_dtype: str, manifest: Manifest | None) -> TokenFile:
    """Reads what a file says of itself and holds it against its size."""
    if path.suffix not in (".npy", ".bin"):
        raise UserError(f"{path} is neither .npy nor .bin; narrow data.file_pattern")
    try:
        if not storage.in_bucket(path) and path.stat().st_size == 0:
            raise UserError(f"{path} is empty (0 bytes); remove it or prepare it again")
        if path.suffix == ".npy":
            return _inspect_npy(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    return _inspect_bin(path, token_dtype, manifest)


def _inspect_npy(path: Path) -> TokenFile:
    try:
        with _header(path) as file:
            v1 = np.lib.format.read_magic(file) == (1, 0)
            read = (
                np.lib.format.read_array_header_1_0 if v1 else np.lib.format.read_array_header_2_0
            )
            shape, _, dtype = read(file)
            offset = file.tell()
    except ValueError as error:
        raise UserError(f"{path} is not a .npy file, or cut short ({error})") from error
    if len(shape) != 1 or dtype.kind not in "iu":
        raise UserError(
            f"{path} holds {dtype} of shape {shape}; token files hold one 1-D array of integers "
            "(uint16 or uint32)"
        )
    _check_size(path, offset + shape[0] * dtype.itemsize, "its header")
    if not shape[0]:
        raise UserError(f"{path} is empty (0 tokens); remove it or prepare it again")
    return TokenFile(path, dtype, shape[0], offset)


def _inspect_bin(path: Path, name: str, manifest: Manifest | None) -> TokenFile:
    if manifest and name != manifest.dtype:
        raise UserError(
            f"data.token_dtype is {name!r}, but {path.parent / FILE_NAME} says {manifest.dtype!r}; "
            "remove data.token_dtype"
        )
    dtype = _integer_type(name).newbyteorder("<")
    shard = manifest and manifest.by_file.get(path.name)
    if storage.in_bucket(path):
        if not shard:
            raise UserError(
                f"{path}: what a .bin file in a bucket holds has to be said in a {FILE_NAME} "
                "beside it, as `jaxforge.prepare` writes it; or copy it to this machine"
            )
        _check_size(path, shard.tokens * dtype.itemsize, FILE_NAME)
        return TokenFile(path, dtype, shard.tokens, 0)
    size = path.stat().st_size
    if shard:
        _check_size(path, shard.tokens * dtype.itemsize, FILE_NAME)
    elif size % dtype.itemsize:
        raise UserError(
            f"{path} has {size} bytes, which is no whole number of {name}: it is cut short, or "
            "data.token_dtype is another"
        )
    return TokenFile(path, dtype, size // dtype.itemsize, 0)


def _header(path: Path) -> IO[bytes]:
    if not storage.in_bucket(path):
        return path.open("rb")
    from jaxforge import buckets

    return io.BytesIO(buckets.head(path, _HEADER))


def _integer_type(name: str) -> np.dtype:
    with suppress(TypeError):
        dtype = np.dtype(name)
        if dtype.kind in "iu":
            return dtype
    raise UserError(f'data.token_dtype = {name!r} is no integer type; try "uint16" or "uint32"')


def _check_size(path: Path, expected: int, source: str) -> None:
    if storage.in_bucket(path):
        from jaxforge import buckets

        if wrong := buckets.other_length(path, expected):
            raise UserError(
                f"{path} {wrong} than the {expected} bytes that {source} says; copy or prepare it "
                "again"
            )
        return
    size = path.stat().st_size
    if size != expected:
        wrong = "is cut short" if size < expected else "is too long"
        raise UserError(
            f"{path} {wrong}: it has {size} bytes where {source} says {expected}; "
            "copy or prepare it again"
        )


def _too_short(files: list[TokenFile], window: int, key: str) -> str:
    longest = max(files, key=lambda file: file.tokens)
    return (
        f"no file holds a window of train.seq_len + 1 = {window} tokens: the longest of "
        f"{len(files)}, {longest.path}, has {longest.tokens}; lower train.seq_len or set "
        f"{key} to more tokens"
    )


def _check_vocabulary(file: TokenFile, vocab_size: int, manifest: Manifest | None) -> None:
    shard = manifest and manifest.by_file.get(file.path.name)
    if shard and shard.tokens == file.tokens:
        low, high = 0, shard.max_token
    elif manifest and manifest.conversations:
        raise UserError(
            f"{file.path} is not what {FILE_NAME} beside it says; copy or prepare it again"
        )
    else:
        low, high = _extremes(file, vocab_size)
    if low < 0:
        raise UserError(
            f"{file.path}: token {low} is negative; its type is perhaps not {file.dtype}"
        )
    if high >= vocab_size:
        raise UserError(
            f"{file.path}: token {high} is outside the vocabulary of {vocab_size}; set "
            f"model.vocab_size to {high + 1} or more, or prepare the data with the model's "
            f"tokenizer (.bin files of another type than {file.dtype} look like this too: set "
            "data.token_dtype)"
        )


def _extremes(file: TokenFile, vocab_size: int) -> tuple[int, int]:
    """Smallest and largest token of a file, read in chunks."""
    if file.dtype.kind == "u" and np.iinfo(file.dtype).max < vocab_size:
        return 0, 0  # such a type has no token to be afraid of
    tokens = file.map()
    starts = range(0, file.tokens, _CHUNK)
    chunks = (np.asarray(tokens[at : min(at + _CHUNK, file.tokens)]) for at in starts)
    lows, highs = zip(*((int(chunk.min()), int(chunk.max())) for chunk in chunks), strict=True)
    return min(lows), max(highs)
