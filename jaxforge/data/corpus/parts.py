"""Finished parts of a corpus: what the units of work have written.

    parts/000012.json        shards, tokens and documents of unit 12, which is finished
    parts/000012.counts      occurrences of each token in unit 12, until they are folded
    parts/folded_0.npz       sum of the occurrences in the units that process 0 has folded
    parts/000012.train.lengths    lengths of its conversations
    parts/000012.journal     progress within unit 12 (local disks only)
    parts/000012.lock        held by the process that works on unit 12 (local disks only)

The counts of a unit take as many bytes as a vocabulary has: 100,000 units would take 100 GB. They
are added up while the units are prepared, and removed.
"""

import io
import re
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int
from pydantic import TypeAdapter, ValidationError

from jaxforge.data.corpus.manifest import Shard
from jaxforge.data.corpus.statistics import Statistics, merged
from jaxforge.errors import UserError
from jaxforge.storage import locks, safe_files, urls
from jaxforge.storage.atomic_directory import read_sealed, write_bytes, write_sealed

READERS = 32
"""Number of threads that read parts."""

_LOCK_SECONDS = 600.0  # in which a lost process must have released its lock
_MOST_BYTES = 1 << 29  # above the counts of the largest vocabulary in two splits
_NAME = re.compile(r"(\d{6})\.(json|counts)")


@dataclass(frozen=True)
class SplitPart:
    """Part of a split.

    Attributes:
        documents: number of documents.
        tokens: number of tokens.
        size: bytes of text.
        broken: number of documents that were not UTF-8.
        shards: the shards, in order.
        statistics: statistics of the documents.
    """

    documents: int
    tokens: int
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

Counts = Int[np.ndarray, "splits V"]
"""Occurrences of each token in each split, in the order of `Options.splits`."""


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
        return self._numbers("json")

    def with_counts(self) -> set[int]:
        """Return the numbers of the units whose counts are not folded."""
        return self._numbers("counts")

    def _numbers(self, kind: str) -> set[int]:
        names = (_NAME.fullmatch(name) for name in _names(self._directory))
        return {int(name[1]) for name in names if name and name[2] == kind}

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

    def journal(self, unit: int) -> dict[str, Any] | None:
        """Return the progress within a unit."""
        return read_sealed(self._path(unit, "journal"))

    def commit(self, unit: int, journal: dict[str, Any]) -> None:
        """Record the progress within a unit durably."""
        write_sealed(self._path(unit, "journal"), journal)

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

    def write(self, part: Part, counts: Counts) -> None:
        """Write a part, which is finished with that."""
        data = zlib.compress(counts.astype("<i8").tobytes(), 1)
        write_bytes(self._path(part.unit, "counts"), data)
        write_sealed(self._path(part.unit, "json"), _JSON.dump_python(part, mode="json"))
        if not urls.in_bucket(self._directory):
            self._path(part.unit, "journal").unlink(missing_ok=True)

    def counts(self, unit: int, shape: Sequence[int]) -> Counts:
        """Return the counts of a unit that are not folded."""
        path = self._path(unit, "counts")
        with _sound(path):
            data = zlib.decompress(safe_files.read_regular(path, _MOST_BYTES))
            return np.frombuffer(data, "<i8").reshape(shape)

    def remove_counts(self, unit: int) -> None:
        """Remove the counts of a unit."""
        self._path(unit, "counts").unlink(missing_ok=True)

    def lengths_path(self, unit: int, split: str) -> Path:
        """Return the file of the lengths of a unit's conversations in a split."""
        return self._directory / f"{unit:06d}.{split}.lengths"

    def folds(self) -> list[Path]:
        """Return the files of folded counts."""
        names = [name for name in _names(self._directory) if name.startswith("folded_")]
        return [self._directory / name for name in sorted(names)]

    def fold_path(self, share: int) -> Path:
        """Return the file of the counts that a process folds."""
        return self._directory / f"folded_{share}.npz"

    def _path(self, unit: int, kind: str) -> Path:
        return self._directory / f"{unit:06d}.{kind}"


class Fold:
    """Sum of the counts of finished units, in memory that does not grow with their number.

    Args:
        parts: the parts.
        share: number of this process among those that fold.
        shape: numbers of splits and of tokens in the vocabulary.
    """

    _PENDING = 64  # units whose counts stay in files until the sum is written

    def __init__(self, parts: Parts, share: int, shape: tuple[int, int]) -> None:
        self._parts, self._path, self._shape = parts, parts.fold_path(share), shape
        self.units, self.counts = _read_fold(self._path, shape)
        self._folded = folded_units(parts, shape)
        self._pending: list[int] = []

    def add(self, unit: int) -> None:
        """Add the counts of a unit, unless they are part of a sum, because the unit is repeated."""
        if unit in self._folded:
            self._parts.remove_counts(unit)
            return
        self.counts += self._parts.counts(unit, self.counts.shape)
        self._pending.append(unit)
        if len(self._pending) >= self._PENDING:
            self.save()

    def save(self) -> None:
        """Write the sum, and only then remove what it contains."""
        self.units.update(self._pending)
        file = io.BytesIO()
        np.savez_compressed(file, units=np.array(sorted(self.units)), counts=self.counts)
        write_bytes(self._path, file.getvalue())
        for unit in self._pending:
            self._parts.remove_counts(unit)
        self._pending = []


def folded_units(parts: Parts, shape: tuple[int, int]) -> set[int]:
    """Return the units whose counts any process has folded."""
    return set().union(*(_read_fold(path, shape)[0] for path in parts.folds()))


def all_counts(parts: Parts, shape: tuple[int, int]) -> Counts:
    """Return the counts of all finished units, folded or not."""
    units: set[int] = set()
    counts = np.zeros(shape, np.int64)
    for path in parts.folds():
        folded, more = _read_fold(path, shape)
        units |= folded
        counts += more
    for unit in parts.with_counts() - units:
        counts += parts.counts(unit, shape)
    return counts


def _read_fold(path: Path, shape: tuple[int, int]) -> tuple[set[int], Counts]:
    try:
        with (
            _sound(path),
            np.load(io.BytesIO(safe_files.read_regular(path, _MOST_BYTES))) as file,
        ):
            return set(file["units"].tolist()), file["counts"].reshape(shape)
    except FileNotFoundError:
        return set(), np.zeros(shape, np.int64)


@contextmanager
def _sound(path: Path) -> Iterator[None]:
    """Convert errors of a damaged file of counts, which cannot be made again, to UserError."""
    try:
        yield
    except Exception as error:  # zipfile and NumPy raise almost anything
        if isinstance(error, OSError) and not isinstance(error, safe_files.IrregularFileError):
            raise
        raise UserError(
            f"{path} is damaged ({getattr(error, 'strerror', error)}): remove "
            f"{path.parent.parent}, and repeat the command"
        ) from error


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
            size=sum(split.size for split in every),
            broken=sum(split.broken for split in every),
            shards=tuple(shard for split in every for shard in split.shards),
            statistics=merged(split.statistics for split in every),
        )
        for name, every in splits.items()
    }
