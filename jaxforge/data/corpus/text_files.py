"""Text files: names, encodings, and detection of binary files."""

import codecs
import io
import itertools
import re
import shlex
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import BinaryIO

from jaxforge.data.corpus.remote_input import Location
from jaxforge.errors import UserError, unreadable

TEXTS = ("*.txt", "*.md", "*.py")
_PACKABLE = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
_TABLES = (".parquet", ".arrow", ".feather")
PACKINGS = ("", ".gz", ".zst")
"""Suffixes of files of records, plain and compressed."""

TARS = (*(f"*.tar{end}" for end in PACKINGS), "*.tgz")
"""Names of tar archives."""

RECORDS = (*(f"*{kind}{end}" for kind in _PACKABLE for end in PACKINGS),
           *(f"*{kind}" for kind in _TABLES), *TARS)  # fmt: skip
"""Default names of files to read in directories, in upper or lower case."""

EXCLUDE = "exclude it with --exclude"
"""Advice on an input that cannot be read."""

_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",  # a prefix of the mark of UTF-32 little-endian
    codecs.BOM_UTF16_BE: "UTF-16",
}
_JSON = re.compile(rb'\s*(\[\s*)?\{\s*"(\\.|[^"\\\n])*"\s*:')  # the first key of an object
HEAD = 8000
"""Bytes in which a NUL marks a binary file, as in git."""

_MAX_FILES = 10_000  # searched in a directory without shards


def encoding_of(head: bytes) -> str:
    """Return the encoding that a byte-order mark announces if it is not UTF-8, else ""."""
    return next((name for mark, name in _MARKS.items() if head.startswith(mark)), "")


def utf8(file: BinaryIO) -> BinaryIO:
    """Return the file, or its text in UTF-8 if a byte-order mark announces another encoding."""
    encoding = encoding_of(file.read(4))
    file.seek(0)
    if not encoding:
        return file
    return io.BytesIO(file.read().decode(encoding, errors="replace").encode())


def is_named(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a file name matches a glob; lower-case globs match upper case, too."""
    return any(fnmatch(name, pattern) or fnmatch(name.lower(), pattern) for pattern in patterns)


def in_words(patterns: Sequence[str]) -> str:
    """Return the value of `--glob` in words, with kinds of records by their suffixes."""
    others = ",".join(pattern for pattern in patterns if pattern not in RECORDS)
    if not set(RECORDS).issubset(patterns):
        return ",".join(patterns)
    kinds = ", ".join((*_PACKABLE, *_TABLES, ".tar"))
    return f"{others}, or of records: {kinds}" if others else f"of records: {kinds}"


def check_text(files: Iterable[tuple[Path, bool]]) -> None:
    """Check that files hold text before they are read.

    Args:
        files: paths, each with True for a plain text file and False for a file of records.

    Raises:
        UserError: a text has NUL bytes or is JSON, or records are not in UTF-8.
    """
    check_heads((path, is_text, _head(path)) for path, is_text in files)


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(HEAD)
    except OSError as error:
        raise unreadable(path, error, EXCLUDE) from error


def check_heads(files: Iterable[tuple[Location, bool, bytes]]) -> None:
    """Check files as `check_text` does, by their first `HEAD` bytes.

    Raises:
        UserError: as `check_text`.
    """
    binary = []
    for path, is_text, head in files:
        if is_text and b"\0" in head and not encoding_of(head):
            binary.append(path)
        elif is_text and _JSON.match(head.removeprefix(codecs.BOM_UTF8)):
            raise UserError(
                f"{path} holds JSON, whose syntax would be learned: name it .jsonl (an object a "
                "line) or .json to have its records read, or exclude it with --exclude"
            )
        elif not is_text and (encoding := encoding_of(head)):
            raise UserError(
                f"{path} is in {encoding}, and records are read as UTF-8: make it so with "
                f"iconv -f {encoding} -t UTF-8"
            )
    if binary:
        named = ", ".join(map(str, binary[:3])) + (", ..." if len(binary) > 3 else "")
        kinds = dict.fromkeys(f"*{path.suffix}" if path.suffix else path.name for path in binary)
        options = " ".join(f"--exclude {shlex.quote(kind)}" for kind in kinds)
        raise UserError(
            f"{len(binary)} file(s) hold NUL bytes, and so no text: {named}; leave them out with "
            f"{options}, or take others alone with --glob (of UTF-16 without a byte-order mark, "
            "make UTF-8: iconv -f UTF-16LE -t UTF-8)"
        )


def how_to_prepare(path: Path) -> str:
    """Return advice, appended to a path that holds text instead of shards; "" if it holds no text.

    Args:
        path: a file or directory, without shards.
    """
    every = itertools.islice(path.rglob("*"), _MAX_FILES) if path.is_dir() else [path]
    first = next((file for file in every if is_named(file.name, (*TEXTS, *RECORDS))), None)
    if first is None:
        return ""
    output = path.with_name(f"{path.stem}_tokens")
    return (
        f"holds text ({first.name}), and training reads tokens; prepare it: jaxforge prepare "
        f"{shlex.quote(str(path))} --output {shlex.quote(str(output))} --tokenizer bpe "
        f"--validation-fraction 0.01, then train on {output / 'train'}, or with the config that it "
        f"writes: jaxforge train --config {shlex.quote(str(output / 'train.toml'))}"
    )
