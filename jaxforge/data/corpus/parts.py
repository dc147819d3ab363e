"""Finished parts of a corpus, which the units of work have written, and the progress display.

parts/000012.json        shards, tokens and documents of unit 12, which is finished
parts/000012.train.lengths    lengths of its conversations
parts/000012.lock        held by the process that works on unit 12 (local disks only)
"""

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from jaxforge.data.corpus.inputs import Unit
from jaxforge.data.corpus.manifest import Shard
from jaxforge.data.corpus.statistics import Statistics, merged
from jaxforge.errors import UserError
from jaxforge.storage import locks, urls
from jaxforge.storage.atomic_directory import read_sealed, write_sealed

READERS = 32
"""Number of threads that read parts."""

_LOCK_SECONDS = 600.0  # in which a lost process must have released its lock
_NAME = re.compile(r"(\d{6})\.json")


@dataclass(frozen=True)
class SplitPart:
    """Part of a split.

    Attributes:
        documents: number of documents.
        learned: number of tokens with a loss; 0 for text.
        broken: number of documents that were not UTF-8.
        shards: the shards, in order.
        statistics: statistics of the documents.
    """

    documents: int
    learned: int
    broken: int
    shards: tuple[Shard, ...]
    statistics: Statistics

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return sum(shard.tokens for shard in self.shards)


@dataclass(frozen=True)
class UnitPart:
    """Output of a unit.

    Attributes:
        unit: number of the unit.
        skipped: number of bad records that were skipped.
        splits: parts of the splits, by name.
    """

    unit: int
    skipped: int
    splits: dict[str, SplitPart]

    @property
    def documents(self) -> int:
        """Documents in all splits."""
        return sum(split.documents for split in self.splits.values())

    @property
    def tokens(self) -> int:
        """Tokens in all splits."""
        return sum(split.tokens for split in self.splits.values())


_JSON = TypeAdapter(UnitPart)


class Parts:
    """Directory of parts, on a local disk or in a bucket.

    Args:
        directory: the directory; created if it does not exist.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def finished(self) -> set[int]:
        """Return the numbers of the finished units."""
        names = (_NAME.fullmatch(name) for name in _names(self._directory))
        return {int(name[1]) for name in names if name}

    @contextmanager
    def claimed(self, unit: int) -> Iterator[UnitPart | None]:
        """Exclude other processes from a unit on a local disk; yield the part if it is finished.

        A process that was lost, but still runs, may hold the unit for a while. In a bucket, objects
        are replaced as a whole and by the same bytes, so two processes do not disturb each other.

        Raises:
            UserError: another process does not release the unit.
        """
        if urls.in_bucket(self._directory):
            yield self.read(unit)
            return
        path = self._path(unit, "lock")
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            with locks.hold(path) as is_held:
                if is_held:
                    # Read under the lock: its last holder may have finished the unit.
                    yield self.read(unit)
                    return
            if time.monotonic() > deadline:
                raise UserError(f"{locks.holder(path)} does not release {path}: end it")
            time.sleep(0.2)

    def read(self, unit: int) -> UnitPart | None:
        """Return a part; None if it is not finished, or its file is damaged."""
        try:
            return _JSON.validate_python(read_sealed(self._path(unit, "json")))
        except ValidationError:
            return None

    def read_all(self, units: Iterable[int]) -> Iterator[UnitPart]:
        """Yield finished parts, in order."""
        with ThreadPoolExecutor(READERS) as threads:
            # In the order of the units, which is that of the shards in the manifest.
            for number, part in zip(units, threads.map(self.read, units), strict=True):
                assert part is not None, f"part {number} is not finished"
                yield part

    def write(self, part: UnitPart) -> None:
        """Write a part, which is finished with that."""
        write_sealed(self._path(part.unit, "json"), _JSON.dump_python(part, mode="json"))

    def lengths_path(self, unit: int, split: str) -> Path:
        """Return the file of the lengths of a unit's conversations in a split."""
        return self._directory / f"{unit:06d}.{split}.lengths"

    def _path(self, unit: int, kind: str) -> Path:
        return self._directory / f"{unit:06d}.{kind}"


def _names(directory: Path) -> list[str]:
    if urls.in_bucket(directory):
        from jaxforge.storage import buckets

        return buckets.keys(str(directory))
    return [path.name for path in directory.iterdir()]


def sums(parts: Iterable[UnitPart]) -> Mapping[str, SplitPart]:
    """Return the splits of all parts together, with the shards in order."""
    splits: dict[str, list[SplitPart]] = {}
    for part in parts:
        for name, split in part.splits.items():
            splits.setdefault(name, []).append(split)
    return {
        name: SplitPart(
            documents=sum(split.documents for split in every),
            learned=sum(split.learned for split in every),
            broken=sum(split.broken for split in every),
            shards=tuple(shard for split in every for shard in split.shards),
            statistics=merged(split.statistics for split in every),
        )
        for name, every in splits.items()
    }


_LINE_SECONDS = 10.0  # between lines where there is no terminal
_DISPLAY_SECONDS = 0.5  # between two displays of the progress within units


class Done(NamedTuple):
    """Work that is done.

    Attributes:
        files: number of inputs that have been read.
        fraction: fraction of the bytes of all inputs; None if unknown.
        documents: number of documents.
        tokens: number of tokens.
    """

    files: int
    fraction: float | None
    documents: int
    tokens: int


@contextmanager
def progress_shown(files: int) -> Iterator[Callable[[Done], None]]:
    """Yield a function that shows progress in `files` inputs: a bar, or lines without a terminal.

    Rate and time left are those since the first call, because an earlier run may have done a part.
    """
    console, start = Console(stderr=True), time.monotonic()
    said, first = start, None
    columns = (BarColumn(20), TextColumn("{task.description}"))
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        bar = progress.add_task("", total=1.0)

        def show(done: Done) -> None:
            nonlocal said, first, start
            now = time.monotonic()
            first = first or done
            line = in_words(done, first, files, now - start)
            progress.update(bar, completed=done.fraction or 0.0, description=line)
            if not console.is_terminal and now - said >= _LINE_SECONDS:
                console.print(line, highlight=False, soft_wrap=True, markup=False)
                said = now

        yield show


def in_words(done: Done, first: Done, files: int, seconds: float) -> str:
    """Return a line such as "12%, 24 of 200 files, 5 docs, 0.1 M tokens, 0.02 M/s, 0:00:41 left".

    Args:
        done: the progress.
        first: the progress at the start of this run.
        files: number of inputs.
        seconds: time since the start of this run.
    """
    rate = (done.tokens - first.tokens) / seconds / 1e6 if seconds > 0 else 0.0
    parts = [
        f"{done.files:,} of {files:,} files",
        f"{done.documents:,} docs",
        f"{done.tokens / 1e6:,.1f} M tokens",
        f"{rate:.2f} M/s",
    ]
    if done.fraction is not None:
        parts.insert(0, f"{done.fraction:.0%}")
        if (gained := done.fraction - (first.fraction or 0.0)) > 0:
            left = int(seconds * (1 - done.fraction) / gained)
            parts.append(f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left")
    return ", ".join(parts)


class UnitProgress:
    """Sum of the progress of all units.

    Args:
        units: the units.
        finished: numbers of the units that were finished before.
        show: receives the sum.
    """

    def __init__(
        self, units: Sequence[Unit], finished: Iterable[int], show: Callable[[Done], None]
    ) -> None:
        self._show, self._lock, self._displayed = show, threading.Lock(), 0.0
        self._weights = {unit.number: unit.weight for unit in units}
        self._files = {unit.number: unit.files for unit in units}
        self._total = sum(self._weights.values())
        self._running: dict[int, tuple[int, int, int]] = {}
        self._weight = self._n_files = self._documents = self._tokens = 0
        for number in finished:
            self._count(number)
        self._display()

    def update(self, unit: int, documents: int, tokens: int, size: int) -> None:
        """Record the progress within a unit, from any thread."""
        with self._lock:
            if unit in self._weights:
                # Compressed files have more text than bytes.
                self._running[unit] = documents, tokens, min(size, self._weights[unit])
            if time.monotonic() - self._displayed >= _DISPLAY_SECONDS:
                self._display()

    def finish(self, part: UnitPart) -> None:
        """Record that a unit is finished."""
        with self._lock:
            # Under one lock, so that no display counts the unit twice or not at all.
            self._running.pop(part.unit, None)
            self._documents += part.documents
            self._tokens += part.tokens
            self._count(part.unit)
            self._display()

    def _count(self, unit: int) -> None:
        self._weight += self._weights.pop(unit)
        self._n_files += self._files[unit]

    def _display(self) -> None:
        running = self._running.values()
        weight = self._weight + sum(size for _, _, size in running)
        self._displayed = time.monotonic()
        self._show(
            Done(
                files=self._n_files,
                # Streams have weight 0: how much of them is done is unknown.
                fraction=weight / self._total if self._total else None,
                documents=self._documents + sum(documents for documents, _, _ in running),
                tokens=self._tokens + sum(tokens for _, tokens, _ in running),
            )
        )
