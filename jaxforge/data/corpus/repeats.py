"""Extra passes over all inputs for maps with `drop_repeated`, one pass for each.

A pass reads all units in parallel, with the maps before, and collects keys. It finds the records
that share a key with an earlier record, over any number of units. The files stay in the unfinished
output, so an interrupted pass repeats its unfinished units only.

unit 0 ─► keys_00000.npy ─┐  by range of hashes           by unit
unit 1 ─► keys_00001.npy ─┼─► range 0: repeated records ─┬─► repeats_00000.npy
unit 2 ─► keys_00002.npy ─┘   range 1: repeated records ─┴─► repeats_00001.npy, …

Each arrow runs in parallel and needs the memory of one unit or one range. An entry is a hash of 128
bits and the position of its record: unit, input of the unit, number in the input. Of the entries
with a hash, the one at the first position stays, so the result depends on the order of the inputs
only.
"""

import bisect
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from jaxforge.data.corpus.documents import text_parts
from jaxforge.data.corpus.inputs import Unit
from jaxforge.data.corpus.maps import Map, Mapped
from jaxforge.data.corpus.records import UNCHANGED, Content, Outcomes, TextField
from jaxforge.data.corpus.workers import Engine, Show, in_order
from jaxforge.errors import UserError
from jaxforge.storage import safe_files

RANGE_ENTRIES = 1 << 21
"""Entries of a range of hashes, about: they take 200 bytes each."""

KEY = np.dtype([("high", "<u8"), ("low", "<u8"), ("input", "<u4"), ("record", "<u8")])
"""Entry of `keys_*.npy`: hash and position in the unit."""

_REPEAT = np.dtype([("unit", "<u4"), ("input", "<u4"), ("record", "<u8")])


@dataclass(frozen=True)
class Repeats:
    """Numbers of the repeated records of an input.

    Attributes:
        path: file of the unit's repeated records.
        input: index of the input in the unit.
    """

    path: Path
    input: int

    def __contains__(self, number: object) -> bool:
        assert isinstance(number, int)
        numbers = _numbers(self.path, self.input)
        i = int(np.searchsorted(numbers, np.uint64(number)))
        return i < len(numbers) and int(numbers[i]) == number


def needs_passes(mapped: Mapped) -> bool:
    """Return whether a map needs a pass of its own."""
    return any(each.returns_keys for each in mapped.maps)


def find_repeated_records(
    units: Sequence[Unit],
    mapped: Mapped,
    directory: Path,
    engine: Engine,
    *,
    skip_bad: bool,
    show: Callable[[str], None],
) -> list[Unit]:
    """Run the passes; return the units with the repeated records for each map.

    Args:
        units: all inputs, in order, with `mapped` as their content.
        mapped: the content of the inputs.
        directory: directory of the files of the passes.
        engine: runs functions in processes.
        skip_bad: skip records without text.
        show: receives messages about the progress.

    Raises:
        UserError: an input cannot be read, a record is bad, or a map fails.
    """
    contents = [[mapped] * len(unit.inputs) for unit in units]
    for index, each in enumerate(mapped.maps):
        if not each.returns_keys:
            continue
        files = directory / f"{index}"
        files.mkdir(parents=True, exist_ok=True)
        show(f"pass for --map {each.spec}: reading {len(units)} units …")
        surveyed = [
            _with_contents(unit, [_keys(content, index) for content in row])
            for unit, row in zip(units, contents, strict=True)
        ]
        entries = in_order(engine, functools.partial(_survey, files, skip_bad), surveyed)
        ranges = max(1, -(-sum(entries) // RANGE_ENTRIES))
        in_order(engine, functools.partial(_write_range, files, len(units), ranges), range(ranges))
        paths = in_order(engine, functools.partial(_write_unit, files, ranges), range(len(units)))
        repeated = sum(len(open_entries(path)) for path in paths)
        show(f"pass for --map {each.spec}: {sum(entries):,} keys, {repeated:,} repeated records")
        contents = [
            [
                replace(content, repeats=(*content.repeats, (index, Repeats(path, i))))
                for i, content in enumerate(row)
            ]
            for path, row in zip(paths, contents, strict=True)
        ]
    return [_with_contents(unit, row) for unit, row in zip(units, contents, strict=True)]


def _with_contents(unit: Unit, contents: Sequence[Content]) -> Unit:
    pairs = zip(unit.inputs, contents, strict=True)
    return Unit(unit.number, tuple(source.with_content(content) for source, content in pairs))


def _keys(mapped: Mapped, index: int) -> "RecordKeys":
    """Return the content that gives the keys of the map at an index."""
    # Keys need no chat template, whose process cannot be sent to other processes.
    content = mapped.content if isinstance(mapped.content, TextField) else AnyRecord()
    before = Mapped(content, mapped.maps[:index], mapped.repeats)
    return RecordKeys(before, mapped.maps[index])


@dataclass(frozen=True)
class AnyRecord(Content):
    """Content of records that may have no document."""

    @property
    def identity(self) -> tuple[str, ...]:
        """Nothing."""
        return ()

    def columns(self, there: Sequence[str] | None, where: str) -> list[str]:
        """Return all columns."""
        return list(there or [])

    def document(self, record: Mapping[str, Any]) -> str:
        """Return ""."""
        return ""


@dataclass(frozen=True)
class RecordKeys(Content):
    """Content of the pass that collects keys: the document is the record's keys, hashed.

    Attributes:
        before: content with the maps before `keys`.
        keys: a map with `drop_repeated`.
    """

    has_maps = True

    before: Mapped
    keys: Map

    @property
    def identity(self) -> tuple[str, ...]:
        """Strings of the maps."""
        return (*self.before.identity, self.keys.spec, self.keys.fingerprint)

    def columns(self, there: Sequence[str] | None, where: str) -> list[str]:
        """Return all columns."""
        return self.before.columns(there, where)

    @property
    def text_field(self) -> str:
        """See `Mapped`."""
        return self.before.text_field

    def document(self, record: Mapping[str, Any]) -> str:
        """Return the keys of a record as its document."""
        return str(record["keys"])

    def apply(
        self, number: int, record: Mapping[str, Any], where: str
    ) -> tuple[Mapping[str, Any] | None, Outcomes]:
        """Return a record of the keys' hashes, one per line; None if a map before dropped it."""
        mapped, outcomes = self.before.apply(number, record, where)
        if mapped is None:
            return None, outcomes
        lines = []
        for key in self.keys.call(dict(mapped), where):
            if not isinstance(key, bytes):
                raise UserError(
                    f"{where}: --map {self.keys.spec} returned the key {key!r:.60}, and keys must "
                    "be bytes; encode texts with .encode()"
                )
            lines.append(hashlib.blake2b(key, digest_size=16).hexdigest() + "\n")
        return {"keys": "".join(lines)}, (UNCHANGED,)


def _survey(directory: Path, skip_bad: bool, unit: Unit, _: Show) -> int:
    """Write the sorted keys of a unit, unless an earlier run has; return their number."""
    path = _keys_path(directory, unit.number)
    if path.exists():
        return len(open_entries(path))
    data = bytearray()
    for part in text_parts(unit.inputs, skip_bad=skip_bad):
        source, records, offset = part.end
        # The position is before the record as long as a part of its keys is missing.
        position = (source, records + bool(offset))
        for line in part.text.split():
            key = bytes.fromhex(line)
            words = (int.from_bytes(key[:8], "big"), int.from_bytes(key[8:], "big"))
            data += np.array((*words, *position), KEY).tobytes()
    entries = np.frombuffer(data, KEY)
    order = np.lexsort([entries[name] for name in ("record", "input", "low", "high")])
    _save(path, entries[order])
    return len(entries)


def _keys_path(directory: Path, unit: int) -> Path:
    return directory / f"keys_{unit:05d}.npy"


def _write_range(directory: Path, units: int, ranges: int, number: int, _: Show) -> None:
    """Write the repeated records whose hashes are in a range."""
    bounds = [-(-(i << 64) // ranges) for i in (number, number + 1)]
    entries, origins = [], []
    for unit in range(units):
        keys = open_entries(_keys_path(directory, unit))
        # bisect and not searchsorted, which would copy a column of the whole file.
        first, last = (bisect.bisect_left(keys, bound, key=_high) for bound in bounds)
        entries.append(np.array(keys[first:last]))
        origins.append(np.full(last - first, unit, np.uint32))
    _save(_range_path(directory, number), _repeated(np.concatenate(entries),
                                                    np.concatenate(origins)))  # fmt: skip


def _high(entry: np.void) -> int:
    return int(entry["high"])


def _repeated(
    entries: Shaped[np.ndarray, "n"], units: Shaped[np.ndarray, "n"]
) -> Shaped[np.ndarray, "m"]:
    """Return the sorted positions of entries whose hash has an earlier position."""
    columns = [entries["record"], entries["input"], units, entries["low"], entries["high"]]
    order = np.lexsort(columns)
    record, source, unit, low, high = (column[order] for column in columns)
    is_new = np.ones(len(order), bool)
    is_new[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
    first = np.maximum.accumulate(np.where(is_new, np.arange(len(order)), 0))
    # An entry at the first position itself is the record's own: two of its keys are equal.
    repeats = (record != record[first]) | (source != source[first]) | (unit != unit[first])
    positions = np.empty(int(repeats.sum()), _REPEAT)
    for name, column in zip(("unit", "input", "record"), (unit, source, record), strict=True):
        positions[name] = column[repeats]
    return np.unique(positions)


def _write_unit(directory: Path, ranges: int, unit: int, _: Show) -> Path:
    """Collect the repeated records of a unit from all ranges."""
    parts = []
    for number in range(ranges):
        repeats = open_entries(_range_path(directory, number))
        first, last = (bisect.bisect_left(repeats, bound, key=_unit) for bound in (unit, unit + 1))
        parts.append(np.array(repeats[first:last]))
    path = directory / f"repeats_{unit:05d}.npy"
    _save(path, np.unique(np.concatenate(parts)))
    return path


def _unit(entry: np.void) -> int:
    return int(entry["unit"])


def _range_path(directory: Path, number: int) -> Path:
    return directory / f"range_{number:05d}.npy"


@functools.lru_cache(maxsize=2)
def _numbers(path: Path, source: int) -> Shaped[np.ndarray, "n"]:
    repeats = open_entries(path)
    return np.ascontiguousarray(repeats["record"][repeats["input"] == source])


def open_entries(path: Path) -> Shaped[np.ndarray, "n"]:
    """Return the entries of a file of the passes, mapped into memory.

    Raises:
        UserError: the file is damaged.
    """
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is not a regular file")
        return np.load(path, mmap_mode="r")
    except (ValueError, EOFError) as error:
        raise UserError(
            f"{path} is damaged ({error}): remove {path.parents[2]}, and repeat the command"
        ) from error


def _save(path: Path, array: Shaped[np.ndarray, "n"]) -> None:
    with safe_files.replacing(path, durable=True) as file:
        np.save(file, array)
