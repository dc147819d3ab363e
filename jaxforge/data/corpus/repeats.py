"""Records that share a key with an earlier record, found over any number of units.

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
from jaxtyping import Shaped

from jaxforge.errors import UserError
from jaxforge.storage import safe_files

RANGE_ENTRIES = 1 << 21
"""Entries of a range of hashes, about: they take 200 bytes each."""

KEY = np.dtype([("high", "<u8"), ("low", "<u8"), ("input", "<u4"), ("record", "<u8")])
"""Entry of `keys_*.npy`: hash and position in the unit."""

_REPEAT = np.dtype([("unit", "<u4"), ("input", "<u4"), ("record", "<u8")])
_Unit = TypeVar("_Unit")
_Result = TypeVar("_Result")


class RunUnits(Protocol):
    """Interface of engines: call a function for each unit, in processes."""

    def __call__(
        self, function: Callable[[_Unit], _Result], units: Sequence[_Unit]
    ) -> Iterator[_Result]:
        """Yield the results in the order of the units; function and units must be picklable."""
        ...


@dataclass(frozen=True)
class Repeats:
    """Numbers of the repeated records of an input.

    Attributes:
        path: file of the unit's repeated records.
        input: index of the input in the unit.
    """

    path: Path
    input: int

    def __contains__(self, number: int) -> bool:
        numbers = _numbers(self.path, self.input)
        i = int(np.searchsorted(numbers, np.uint64(number)))
        return i < len(numbers) and int(numbers[i]) == number


def keys_path(directory: Path, unit: int) -> Path:
    """Return the path of the keys of a unit, which its survey writes."""
    return directory / f"keys_{unit:05d}.npy"


def write_keys(path: Path, entries: Shaped[np.ndarray, "n"]) -> None:
    """Write the entries of a unit, of type `KEY`, sorted by hash and position."""
    order = np.lexsort([entries[name] for name in ("record", "input", "low", "high")])
    _save(path, entries[order])


def find_repeats(units: int, directory: Path, run_units: RunUnits) -> list[Path]:
    """Find the repeated records of all units.

    Args:
        units: number of units, each with a file of keys.
        directory: directory of these files, and of the results.
        run_units: runs functions in processes.

    Returns:
        For each unit the path for `Repeats`.
    """
    total = sum(len(open_entries(keys_path(directory, unit))) for unit in range(units))
    ranges = max(1, -(-total // RANGE_ENTRIES))
    for _ in run_units(functools.partial(_write_range, directory, units, ranges), range(ranges)):
        pass
    function = functools.partial(_write_unit, directory, ranges)
    return list(run_units(function, range(units)))


def _write_range(directory: Path, units: int, ranges: int, number: int) -> None:
    """Write the repeated records whose hashes are in a range."""
    bounds = [-(-(i << 64) // ranges) for i in (number, number + 1)]
    entries, origins = [], []
    for unit in range(units):
        keys = open_entries(keys_path(directory, unit))
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


def _write_unit(directory: Path, ranges: int, unit: int) -> Path:
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
