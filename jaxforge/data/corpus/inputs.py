"""Inputs of `prepare`, and their division into units of work.

    paths, URLs ─► files by name, each in its format (`formats`)
    inputs in order   a.txt  b.txt  c.txt │ web.jsonl: bytes 0 to 250 M │ 250 to 500 M │ d.parquet
    unit              000000              │ 000001                      │ 000002       │ 000003

Units follow from names, sizes and options of the inputs alone, so they are the same for any engine
and number of workers. Each unit writes shards of its own.
"""

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

from jaxforge.cli.suggestions import path_hint
from jaxforge.data.corpus import formats
from jaxforge.data.corpus.files import EXCLUDE, File, FileState
from jaxforge.data.corpus.formats.text import SeparatedText, TextFile, check_text
from jaxforge.data.corpus.records import DEFAULT_FIELD, MAX_RECORD_BYTES, Content, Input
from jaxforge.data.corpus.remote_input import Location, list_files
from jaxforge.errors import UserError, quoted, unreadable

UNIT_BYTES = 256 << 20
"""Default of `--unit-bytes`."""

_MAX_INPUTS = 10_000  # of a unit: opening a file in a bucket takes a tenth of a second
_MAX_UNITS = 1_000_000  # which the names of shards count


def find_inputs(
    paths: Sequence[Path | str],
    globs: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    content: Content | None = None,
    max_record_bytes: int = MAX_RECORD_BYTES,
    separator: bytes = b"",
) -> list[File]:
    """Find the files to read, each once, sorted by name, without empty files.

    Args:
        paths: files and directories, or their URLs as str. Directories are searched recursively,
            without following symbolic links to directories.
        globs: names of files to read in directories.
        exclude: names of inputs to exclude ("*" matches "/" too).
        content: selects the text of a record; by default the field "text".
        max_record_bytes: see `File`.
        separator: separator of the documents in text files; empty if a text file is one document.

    Raises:
        UserError: a path does not exist or cannot be read, a file is of a kind that cannot be
            read or holds no text, or no file is left.
    """
    files: dict[Location, File] = {}
    for location, name, state in _walk(paths, globs, exclude):
        if state.size and not any(fnmatch(name, pattern) for pattern in exclude):
            text = partial(SeparatedText, separator=separator) if separator else TextFile
            read_as = formats.format_of(location) or text
            facts = location, name, state.size, state.modified, content or DEFAULT_FIELD
            file = read_as(*facts, max_record_bytes)
            # A file that is named twice is read once, under its first name.
            files.setdefault(location.resolve(), file)
    # URLs are checked when they are read: a request for each of them would take hours.
    check_text((file.path, file.is_text) for file in files.values() if isinstance(file.path, Path))
    if not files:
        # Empty files were dropped above: name one, because the message below would mislead.
        for path in paths:
            if isinstance(path, Path) and path.is_file() and not path.stat().st_size:
                raise UserError(f"INPUT {path} is empty: give a file with text, or a directory")
        where, exclusion = ", ".join(map(str, paths)), " and no --exclude" if exclude else ""
        raise UserError(
            f"no text in {where}: no file matches --glob {formats.in_words(globs)}{exclusion}"
        )
    if separator and not any(file.is_text for file in files.values()):
        raise UserError("--separator is for text files, and no INPUT is one: remove it")
    return sorted(files.values(), key=lambda file: file.name)


def _walk(
    paths: Iterable[Path | str], globs: Sequence[str], exclude: Sequence[str]
) -> Iterator[tuple[Location, str, FileState]]:
    """Yield files with their names relative to their input, and their states."""
    for root in paths:
        if isinstance(root, str):
            for file in list_files(root):
                # A file that the URL itself names is read whatever its suffix, as a local one is.
                if file.name == file.path.name == root.rpartition("/")[2] or formats.is_named(
                    file.path.name, globs
                ):
                    yield file.path, file.name, FileState(file.path.size, file.version)
            continue
        for local, name in _walk_local(root, globs, exclude):
            yield local, name, FileState.of(local)


def _walk_local(
    root: Path, globs: Sequence[str], exclude: Sequence[str]
) -> Iterator[tuple[Path, str]]:
    try:
        kind = root.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        name = quoted(root.absolute())
        raise UserError(f"INPUT {name} does not exist{path_hint(root)}") from error
    except OSError as error:
        raise unreadable(f"INPUT {root}", error, "remove it") from error
    if stat.S_ISREG(kind):
        yield root, root.name
        return
    if not stat.S_ISDIR(kind):
        raise UserError(
            f"INPUT {root} is neither a file nor a directory: write the text to a file first"
        )

    def fail(error: OSError) -> None:
        name = f"{Path(error.filename).relative_to(root).as_posix()}/"
        # An unreadable directory is not an error if --exclude covers it.
        if not any(fnmatch(name, pattern) for pattern in exclude):
            raise unreadable(error.filename, error, EXCLUDE) from error

    for directory, _, names in os.walk(root, onerror=fail):
        for path in (Path(directory, name) for name in names):
            if path.is_file() and formats.is_named(path.name, globs):
                yield path, path.relative_to(root).as_posix()


def links_out(paths: Iterable[Path | str], files: Iterable[Input]) -> list[Path]:
    """Return the files that are links to files outside of every searched directory.

    Args:
        paths: see `find_inputs`.
        files: its result.
    """
    roots = [path.resolve() for path in paths if isinstance(path, Path) and path.is_dir()]
    links = [
        file.path
        for file in files
        if isinstance(file, File) and isinstance(file.path, Path) and file.path.is_symlink()
    ]
    # A link that is named itself is intended.
    named = {path for path in paths if isinstance(path, Path)}
    return [
        link
        for link in links
        if link not in named and not any(link.resolve().is_relative_to(root) for root in roots)
    ]


@dataclass(frozen=True)
class Unit:
    """Inputs that are prepared together.

    Attributes:
        number: position among the units, from 0.
        inputs: the inputs, in order.
    """

    number: int
    inputs: tuple[Input, ...]

    @property
    def weight(self) -> int:
        """Bytes to read."""
        return sum(source.weight for source in self.inputs)

    @property
    def files(self) -> int:
        """Number of inputs that begin in this unit."""
        return sum(source.begins for source in self.inputs)

    @property
    def where(self) -> str:
        """Name of the unit in messages: its first input, and the number of further ones."""
        more = len(self.inputs) - 1
        return self.inputs[0].where + (f" and {more} more inputs" if more else "")


def sliced(inputs: Iterable[Input], unit_bytes: int) -> list[Input]:
    """Return the inputs in order, with slices instead of those larger than a unit."""
    return [part for source in inputs for part in source.slices(unit_bytes)]


def plan_units(inputs: Sequence[Input], unit_bytes: int) -> list[Unit]:
    """Group consecutive inputs into units.

    Args:
        inputs: the inputs, `sliced`.
        unit_bytes: bytes of a unit. A larger input that cannot be sliced is a unit of its own.

    Raises:
        UserError: there are too many units.
    """
    units = [Unit(i, group) for i, group in enumerate(_groups(inputs, unit_bytes))]
    if len(units) > _MAX_UNITS:
        raise UserError(
            f"--unit-bytes {unit_bytes:,} divides the inputs into {len(units):,} units, and names "
            f"of shards count {_MAX_UNITS:,}: give larger units"
        )
    return units


def _groups(inputs: Iterable[Input], unit_bytes: int) -> Iterator[tuple[Input, ...]]:
    group: list[Input] = []
    size = 0
    for source in inputs:
        if group and (size + source.weight > unit_bytes or len(group) == _MAX_INPUTS):
            yield tuple(group)
            group, size = [], 0
        group.append(source)
        size += source.weight
    if group:
        yield tuple(group)
