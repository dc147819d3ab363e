"""Files of text: which names they have, how they are encoded, and which are none."""

import codecs
import itertools
import shlex
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path

from jaxforge.errors import UserError

TEXTS = ("*.txt", "*.md", "*.py")
RECORDS = ("*.jsonl", "*.jsonl.gz", "*.jsonl.zst", "*.parquet")
"""Names of files that are taken from directories, unless the user names others."""

_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",  # with which the first begins
    codecs.BOM_UTF16_BE: "UTF-16",
}
_HEAD = 8000  # bytes of a file in which NUL tells that it is no text, as for git
_LOOKED_AT = 10_000  # files of a directory without shards


def encoding_of(head: bytes) -> str:
    """What a file that begins so is in, if a byte-order mark says that it is not UTF-8; or ""."""
    return next((name for mark, name in _MARKS.items() if head.startswith(mark)), "")


def check_text(files: Iterable[tuple[Path, bool]]) -> None:
    """Refuses what is no text before anything is read.

    Args:
        files: and whether each is a text as a whole; others may be JSON lines.

    Raises:
        UserError: a text has NUL bytes, or JSON lines are not in UTF-8.
    """
    binary = []
    for path, is_text in files:
        if is_text and _is_binary(_head(path)):
            binary.append(path)
        elif path.suffix == ".jsonl" and (encoding := encoding_of(_head(path))):
            raise UserError(
                f"{path} is in {encoding}, and JSON lines are read as UTF-8: make it so with "
                f"iconv -f {encoding} -t UTF-8"
            )
    if binary:
        raise UserError(_no_text(binary))


def _is_binary(head: bytes) -> bool:
    return b"\0" in head and not encoding_of(head)


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_HEAD)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def _no_text(paths: Sequence[Path]) -> str:
    named = ", ".join(map(str, paths[:3])) + (", ..." if len(paths) > 3 else "")
    kinds = dict.fromkeys(f"*{path.suffix}" if path.suffix else path.name for path in paths)
    options = " ".join(f"--exclude {shlex.quote(kind)}" for kind in kinds)
    return (
        f"{len(paths)} file(s) hold NUL bytes, and so no text: {named}; leave them out with "
        f"{options}, or take others alone with --glob (of UTF-16 without a byte-order mark, make "
        "UTF-8: iconv -f UTF-16LE -t UTF-8)"
    )


def how_to_prepare(place: Path) -> str:
    """What to do where shards are wanted and text is found, to follow its path; "" if none is.

    Args:
        place: a file or directory, without shards.
    """
    every = itertools.islice(place.rglob("*"), _LOOKED_AT) if place.is_dir() else [place]
    found = next((path for path in every if _is_text(path.name)), None)
    if found is None:
        return ""
    output = place.with_name(f"{place.stem}_tokens")
    return (
        f"holds text ({found.name}), and training reads tokens; prepare it: jaxforge prepare "
        f"{shlex.quote(str(place))} --output {shlex.quote(str(output))} --tokenizer bpe "
        f"--validation-fraction 0.01, then train on {output / 'train'}, or with the config that it "
        f"writes: jaxforge train --config {shlex.quote(str(output / 'train.toml'))}"
    )


def _is_text(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in (*TEXTS, *RECORDS))
