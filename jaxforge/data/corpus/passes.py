"""Extra passes over all inputs for maps with `drop_repeated`, one pass for each.

Each pass reads all units in parallel, with the maps before, and collects keys (`repeats`). The
files stay in the unfinished output, so an interrupted pass repeats its unfinished units only.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from jaxforge.data.corpus.content import TextField
from jaxforge.data.corpus.documents import text_parts
from jaxforge.data.corpus.maps import AnyRecord, Mapped, RecordKeys, with_repeats
from jaxforge.data.corpus.records import Input
from jaxforge.data.corpus.repeats import (
    KEY,
    Repeats,
    RunUnits,
    find_repeats,
    keys_path,
    open_entries,
    write_keys,
)
from jaxforge.data.corpus.units import Unit


def needs_passes(mapped: Mapped) -> bool:
    """Return whether a map needs a pass of its own."""
    return any(each.returns_keys for each in mapped.maps)


def find_repeated_records(
    units: Sequence[Unit],
    mapped: Mapped,
    directory: Path,
    run_units: RunUnits,
    *,
    skip_bad: bool,
    show: Callable[[str], None],
) -> list[Unit]:
    """Run the passes; return the units with the repeated records for each map.

    Args:
        units: all inputs, in order, with `mapped` as their content.
        mapped: the content of the inputs.
        directory: directory of the files of the passes.
        run_units: runs functions in processes.
        skip_bad: skip records without text.
        show: receives messages about the progress.

    Raises:
        UserError: an input cannot be read, a record is bad, or a map fails.
    """
    contents = [[mapped] * len(unit.inputs) for unit in units]
    for index, each in enumerate(mapped.maps):
        if not each.returns_keys:
            continue
        work_directory = directory / f"{index}"
        work_directory.mkdir(parents=True, exist_ok=True)
        show(f"pass for --map {each.spec}: reading {len(units)} units …")
        surveyed = [
            [source.with_content(_keys(content, index))
             for source, content in zip(unit.inputs, row, strict=True)]
            for unit, row in zip(units, contents, strict=True)
        ]  # fmt: skip
        survey = functools.partial(_survey, work_directory, skip_bad)
        entries = sum(run_units(survey, list(enumerate(surveyed))))
        paths = find_repeats(len(units), work_directory, run_units)
        repeated = sum(len(open_entries(path)) for path in paths)
        show(f"pass for --map {each.spec}: {entries:,} keys, {repeated:,} repeated records")
        contents = [
            [with_repeats(content, index, Repeats(path, i)) for i, content in enumerate(row)]
            for path, row in zip(paths, contents, strict=True)
        ]
    return [
        Unit(unit.number, tuple(source.with_content(content)
                                for source, content in zip(unit.inputs, row, strict=True)))
        for unit, row in zip(units, contents, strict=True)
    ]  # fmt: skip


def _keys(mapped: Mapped, index: int) -> RecordKeys:
    """Return the content that gives the keys of the map at an index."""
    # Keys need no chat template, whose process cannot be sent to other processes.
    content = mapped.content if isinstance(mapped.content, TextField) else AnyRecord()
    before = Mapped(content, mapped.maps[:index], mapped.repeats)
    return RecordKeys(before, mapped.maps[index])


def _survey(directory: Path, skip_bad: bool, numbered: tuple[int, Sequence[Input]]) -> int:
    """Write the keys of a unit, unless an earlier run has; return their number."""
    number, unit = numbered
    path = keys_path(directory, number)
    if path.exists():
        return len(open_entries(path))
    entries = bytearray()
    for part in text_parts(unit, skip_bad=skip_bad):
        source, records, offset = part.end
        # The position is before the record as long as a part of its keys is missing.
        position = (source, records + bool(offset))
        for line in part.text.split():
            key = bytes.fromhex(line)
            words = (int.from_bytes(key[:8], "big"), int.from_bytes(key[8:], "big"))
            entries += np.array((*words, *position), KEY).tobytes()
    write_keys(path, np.frombuffer(entries, KEY))
    return len(entries) // KEY.itemsize
