"""Input formats of `prepare`, one file each.

A module of this package that defines a subclass of `File` with `suffixes` is a format. Names of
files, messages, `--help` and the table in docs/data.md follow from its class attributes:

    suffixes      ends of the lower-case names of its files
    packable      those that .gz or .zst may follow; `open` returns the decompressed bytes
    documents     its documents, for the table
    can_be_sliced, numbered_in_slice    division of a large file into units of work
    records       its records, in order
"""

import functools
import itertools
import pkgutil
import shlex
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path

from jaxforge.data.corpus.files import File
from jaxforge.data.corpus.remote_input import Location
from jaxforge.errors import UserError

PACKINGS = (".gz", ".zst")
"""Suffixes of compressed files."""

_UNREAD_PACKINGS = (".bz2", ".xz", ".zip", ".tar", ".tgz", ".7z", ".lz4")
_WEB_ARCHIVES = (".warc", ".wet", ".wat")
_MAX_FILES = 10_000  # searched in a directory without shards


@functools.cache
def by_suffix() -> Mapping[str, type[File]]:
    """Return the formats by suffix."""
    modules = [import_module(f"{__name__}.{each.name}") for each in pkgutil.iter_modules(__path__)]
    return {
        suffix: format_
        for module in modules
        for format_ in vars(module).values()
        # Defined in the module, and not imported from another format.
        if isinstance(format_, type) and format_.__module__ == module.__name__
        and issubclass(format_, File)
        for suffix in format_.suffixes
    }  # fmt: skip


def suffixes(*, text: bool = False, packed: bool = False) -> list[str]:
    """Return the suffixes of formats of records, or of text.

    Args:
        text: those of plain text instead.
        packed: with the suffixes of compressed files.
    """
    names = []
    for suffix, format_ in by_suffix().items():
        if format_.is_text == text:
            packings = PACKINGS if packed and suffix in format_.packable else ()
            names += [suffix + packing for packing in ("", *packings)]
    return names


def listed_suffixes() -> str:
    """Return the suffixes of formats of records in words, those of packable ones first."""
    packable = [suffix for suffix, each in by_suffix().items() if suffix in each.packable]
    plain = [suffix for suffix in suffixes() if suffix not in packable]
    return f"{', '.join(packable)} (also with .gz or .zst), {', '.join(plain)}"


def globs(*, text: bool) -> list[str]:
    """Return the default names of files of records to read in directories, perhaps also of text."""
    texts = suffixes(text=True) if text else []
    return [f"*{suffix}" for suffix in (*texts, *suffixes(packed=True))]


def is_named(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a file name matches a glob; lower-case globs match upper case, too."""
    return any(fnmatch(name, pattern) or fnmatch(name.lower(), pattern) for pattern in patterns)


def in_words(patterns: Sequence[str]) -> str:
    """Return the value of `--glob` in words, with formats of records by their suffixes."""
    records = globs(text=False)
    if not set(records).issubset(patterns):
        return ",".join(patterns)
    texts = ",".join(pattern for pattern in patterns if pattern not in records)
    kinds = ", ".join(suffixes())
    return f"{texts}, or of records: {kinds}" if texts else f"of records: {kinds}"


def format_of(path: Location) -> type[File] | None:
    """Return the format of records of a file by its name; None for plain text.

    Raises:
        UserError: files of this kind cannot be read.
    """
    name = path.name.lower()
    suffix = Path(name.removesuffix(".gz").removesuffix(".zst")).suffix
    if suffix in _WEB_ARCHIVES:
        raise UserError(
            f"cannot read {path}: WARC files hold web pages and not their text. Extract the text "
            "to JSON lines first, with datatrove or trafilatura, and prepare these; or exclude the "
            "file with --exclude"
        )
    format_ = by_suffix().get(suffix)
    is_packed = name.endswith(PACKINGS)
    is_read = format_ and (suffix in format_.packable or not is_packed)
    if name.endswith((*PACKINGS, *_UNREAD_PACKINGS)) and not is_read:
        packable = [s for s, each in by_suffix().items() if s in each.packable]
        raise UserError(
            f"cannot read {path}: of compressed files, only "
            f"{', '.join(f'{each}.gz' for each in packable)} are known, and the same with "
            ".zst; unpack it, or exclude it with --exclude"
        )
    return None if format_ is None or format_.is_text else format_


def how_to_prepare(path: Path) -> str:
    """Return advice, appended to a path that holds text instead of shards; "" if it holds no text.

    Args:
        path: a file or directory, without shards.
    """
    every = itertools.islice(path.rglob("*"), _MAX_FILES) if path.is_dir() else [path]
    first = next((file for file in every if is_named(file.name, globs(text=True))), None)
    if first is None:
        return ""
    output = path.with_name(f"{path.stem}_tokens")
    return (
        f"holds text ({first.name}), and training reads tokens; prepare it: jaxforge prepare "
        f"{shlex.quote(str(path))} --output {shlex.quote(str(output))} --tokenizer bpe "
        f"--validation-fraction 0.01, then train on {output / 'train'}, or with the config that it "
        f"writes: jaxforge train --config {shlex.quote(str(output / 'train.toml'))}"
    )
