"""Finished parts of a corpus: what the units of work have written.

parts/000012.json        shards, tokens and documents of unit 12, which is finished
parts/000012.train.lengths    lengths of its conversations
parts/000012.lock        held by the process that works on unit 12 (local disks only)
"""

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

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
        tokens: number of tokens.
        learned: number of tokens with a loss; 0 for text.
        size: bytes of text.
        broken: number of documents that were not UTF-8.
        shards: the shards, in order.
        statistics: statistics of the documents.
    """

    documents: int
    tokens: int
    learned: int
    size: int
    broken: int
    shards: tuple[Shard, ...]
    statistics: Statistics


@dataclass(frozen=True)
class Part:
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


_JSON = TypeAdapter(Part)


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
    def claimed(self, unit: int) -> Iterator[Part | None]:
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
                    yield self.read(unit)
                    return
            if time.monotonic() > deadline:
                raise UserError(f"{locks.holder(path)} does not release {path}: end it")
            time.sleep(0.2)

    def read(self, unit: int) -> Part | None:
        """Return a part; None if it is not finished, or its file is damaged."""
        try:
            return _JSON.validate_python(read_sealed(self._path(unit, "json")))
        except ValidationError:
            return None

    def read_all(self, units: Iterable[int]) -> Iterator[Part]:
        """Yield finished parts, in order."""
        with ThreadPoolExecutor(READERS) as threads:
            for number, part in zip(units, threads.map(self.read, units), strict=True):
                assert part is not None, f"part {number} is not finished"
                yield part

    def write(self, part: Part) -> None:
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


def sums(parts: Iterable[Part]) -> Mapping[str, SplitPart]:
    """Return the splits of all parts together, with the shards in order."""
    splits: dict[str, list[SplitPart]] = {}
    for part in parts:
        for name, split in part.splits.items():
            splits.setdefault(name, []).append(split)
    return {
        name: SplitPart(
            documents=sum(split.documents for split in every),
            tokens=sum(split.tokens for split in every),
            learned=sum(split.learned for split in every),
            size=sum(split.size for split in every),
            broken=sum(split.broken for split in every),
            shards=tuple(shard for split in every for shard in split.shards),
            statistics=merged(split.statistics for split in every),
        )
        for name, every in splits.items()
    }
