"""Text files as documents, and documents as pieces of text.

A document is one file. A piece is a document, or some whole lines of a long one, so that no more
than a piece is in memory. Where a tokenizer looks across line ends, a token at the seam of two
pieces may differ from what it makes of the document in one go; once per MiB at most.
"""

import hashlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import accumulate
from pathlib import Path
from typing import NoReturn

from jaxforge.errors import UserError

_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Document:
    """One text file.

    Attributes:
        path: where it is.
        name: its path below the input that it was found in; decides its place and its split.
        size: bytes.
        split: "train" or "validation".
    """

    path: Path
    name: str
    size: int
    split: str


@dataclass(frozen=True)
class Piece:
    """Some whole lines of a document.

    Attributes:
        document: whose.
        text: the lines.
        size: bytes that they were.
        valid: they were UTF-8.
        last: the document ends here.
    """

    document: Document
    text: str
    size: int
    valid: bool
    last: bool


def find_documents(
    inputs: Sequence[Path],
    globs: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    validation_fraction: float = 0.0,
) -> list[Document]:
    """Finds the files to read, each once, sorted by name; empty ones are left out.

    Args:
        inputs: files and directories; directories are searched in depth, but not those that are
            symbolic links.
        globs: which file names to take from directories.
        exclude: which document names to leave out ("*" matches "/" too).
        validation_fraction: part of the documents to call "validation"; which, depends on their
            names only.

    Raises:
        UserError: an input does not exist or cannot be read, or no file is left.
    """
    found: dict[Path, Document] = {}
    for path, name in _walk(inputs, globs):
        size = path.stat().st_size
        if size and not any(fnmatch(name, pattern) for pattern in exclude):
            split = "validation" if _hash(name) < validation_fraction else "train"
            found.setdefault(path.resolve(), Document(path, name, size, split))
    if not found:
        places = ", ".join(map(str, inputs))
        kept = " and no --exclude" if exclude else ""
        raise UserError(f"no text in {places}: no file matches --glob {','.join(globs)}{kept}")
    return sorted(found.values(), key=lambda document: document.name)


def _walk(inputs: Iterable[Path], globs: Sequence[str]) -> Iterator[tuple[Path, str]]:
    """Files, and their names below their inputs."""
    for root in inputs:
        if not root.exists():
            raise UserError(f"INPUT {root.absolute()} does not exist")
        if root.is_file():
            yield root, root.name
            continue
        for directory, _, names in os.walk(root, onerror=_unreadable):
            for path in (Path(directory, name) for name in names):
                if path.is_file() and any(fnmatch(path.name, pattern) for pattern in globs):
                    yield path, path.relative_to(root).as_posix()


def _unreadable(error: OSError) -> NoReturn:
    raise UserError(f"cannot read {error.filename}: {error.strerror}") from error


def _hash(text: str) -> float:
    """A number in [0, 1) that looks random and is the same everywhere."""
    return int.from_bytes(hashlib.sha256(os.fsencode(text)).digest()[:6], "big") / 2**48


def shuffled(documents: Iterable[Document], seed: int) -> list[Document]:
    """`documents` in an order that depends on their names and `seed` only."""
    return sorted(documents, key=lambda document: _hash(f"{seed} {document.name}"))


def first_bytes(documents: Sequence[Document], max_bytes: int | None) -> list[Document]:
    """The documents at the front that reach `max_bytes` together, or all."""
    before = accumulate((document.size for document in documents), initial=0)
    limit = max_bytes or sys.maxsize
    return [document for document, start in zip(documents, before, strict=False) if start < limit]


def pieces(documents: Iterable[Document], max_bytes: int | None = None) -> Iterator[Piece]:
    """Reads documents in pieces of about a MiB; what is not UTF-8 becomes U+FFFD.

    Args:
        documents: the files.
        max_bytes: stop with the line that reaches so many bytes.

    Raises:
        UserError: a file cannot be read.
    """
    left = max_bytes or sys.maxsize
    for document in first_bytes(list(documents), max_bytes):
        try:
            for data, last in _lines(document.path, left):
                left -= len(data)
                yield _piece(document, data, last)
        except OSError as error:
            raise UserError(f"cannot read {document.path}: {error.strerror}") from error


def _lines(path: Path, limit: int) -> Iterator[tuple[bytes, bool]]:
    """Whole lines of a file, about a MiB at a time, and whether they are the last."""
    with path.open("rb") as file:
        data = b"".join(file.readlines(min(limit, _PIECE_BYTES)))
        while data:
            limit -= len(data)
            rest = b"".join(file.readlines(min(limit, _PIECE_BYTES))) if limit > 0 else b""
            yield data, not rest
            data = rest


def _piece(document: Document, data: bytes, last: bool) -> Piece:
    # No byte of a multi-byte character equals a line end: lines decode on their own.
    try:
        return Piece(document, data.decode("utf-8"), len(data), True, last)
    except UnicodeDecodeError:
        return Piece(document, data.decode("utf-8", errors="replace"), len(data), False, last)
