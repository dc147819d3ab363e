"""Preparation of one unit of work, in any process on any machine.

    local disk   shards ─► .DIR.partial/out/train/            part ─► .DIR.partial/parts/
    bucket       shards ─► temporary directory ─► DIR/train/  part ─► DIR/.prepare/parts/

An interrupted unit starts over.
"""

import functools
import socket
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from jaxforge.data.corpus.corpus_state import Corpus, Options, open_corpus
from jaxforge.data.corpus.ingest import fill
from jaxforge.data.corpus.inputs import Unit
from jaxforge.data.corpus.parts import READERS, Part, Parts, SplitPart
from jaxforge.data.corpus.progress import Done, UnitProgress
from jaxforge.data.corpus.tokenizer import Tokenizer
from jaxforge.data.corpus.tokenizer_files import load_tokenizer
from jaxforge.data.corpus.workers import Show, ignore_news, run_in_processes
from jaxforge.data.corpus.writer import lengths_bytes, shard_header
from jaxforge.errors import UserError
from jaxforge.storage import urls
from jaxforge.storage.atomic_directory import PLAN, AtomicDirectory

PARTS = "parts"
"""Name of the directory of parts, within that of the state."""


@dataclass(frozen=True)
class Job:
    """Everything that the units of a corpus have in common.

    Attributes:
        out: directory of the splits and the tokenizer.
        state: directory of the plan and the parts.
        options: see `Options`.
        fingerprint: the tokenizer's.
        n_units: number of units.
        isolate: encode in another process if the tokenizer is risky.
        workers: number of encoding processes of a unit; with 1, its own process encodes.
    """

    out: Path
    state: Path
    options: Options
    fingerprint: str
    n_units: int = 1
    isolate: bool = True
    workers: int = 1

    @property
    def parts(self) -> Parts:
        """The finished parts."""
        return Parts(self.state / PARTS)

    @property
    def is_single(self) -> bool:
        """True if there is only one unit."""
        return self.n_units == 1


def begin_job(
    destination: AtomicDirectory,
    n_units: int,
    tokenizer: Tokenizer,
    options: Options,
    *,
    isolate: bool = True,
) -> Job:
    """Return the job of an output, and record that there are parts to resume from."""
    if not has_parts(destination):
        destination.commit({"units": n_units})
    fingerprint = tokenizer.fingerprint
    return Job(destination.out, destination.state, options, fingerprint, n_units, isolate)


def has_parts(destination: AtomicDirectory) -> bool:
    """Return whether an interrupted run has begun to write tokens."""
    return "units" in (destination.journal or {})


def run_units(
    job: Job,
    units: Sequence[Unit],
    workers: int,
    show: Callable[[Done], None] = lambda _: None,
) -> None:
    """Prepare all units that are not finished.

    Args:
        job: see `Job`.
        units: the units of this process.
        workers: number of processes.
        show: called with the progress.

    Raises:
        UserError: a unit fails.
        StorageError: the bucket of the output fails.
    """
    finished = _intact_units(job, job.parts.finished() & {unit.number for unit in units})
    progress = UnitProgress(units, finished, show)
    unfinished = [unit for unit in units if unit.number not in finished]
    # If there are fewer units than processes, the others encode within units.
    job = replace(job, workers=workers // max(1, min(workers, len(unfinished))))
    prepare = functools.partial(prepare_unit, job)
    for part in run_in_processes(workers, prepare, unfinished, progress.update):
        progress.finish(part)


def prepare_unit(job: Job, unit: Unit, show: Show = ignore_news) -> Part:
    """Prepare a unit, unless it is finished.

    Args:
        job: see `Job`.
        unit: the unit.
        show: called after each batch.

    Returns:
        The part, which is durable.

    Raises:
        UserError: an input cannot be read, or a shard cannot be written.
        StorageError: the bucket failed for longer than requests are repeated.
    """
    if not (job.state / PLAN).exists():
        raise UserError(
            f"{socket.gethostname()} does not see {job.state}: --output must be in a bucket, or on "
            "a file system that all machines share"
        )
    parts = job.parts
    with parts.claimed(unit.number) as finished:
        if finished and is_intact(job, finished):
            return finished
        tokenizer = _tokenizer(job.out / "tokenizer", job.fingerprint)
        is_remote = urls.in_bucket(job.out)
        with tempfile.TemporaryDirectory(prefix="jaxforge-") as temporary:
            out = Path(temporary) if is_remote else job.out
            number = None if job.is_single else unit.number
            lengths = Parts(out) if is_remote else parts
            lengths_path = functools.partial(lengths.lengths_path, unit.number)
            with open_corpus(out, job.options, number, lengths_path) as corpus:
                fill(
                    corpus,
                    unit.inputs,
                    tokenizer,
                    job.out / "tokenizer",
                    job.options,
                    is_whole=job.is_single,
                    workers=job.workers,
                    isolate=job.isolate,
                    show=lambda corpus: show(
                        unit.number, corpus.documents, corpus.tokens, corpus.size
                    ),
                )
                part = _complete(corpus, unit.number)
            if is_remote:
                _upload(part, out, job)
        parts.write(part)
    return part


def _intact_units(job: Job, numbers: Iterable[int]) -> set[int]:
    """Return the finished units among `numbers` whose files are whole; the others are repeated."""
    numbers, parts = list(numbers), job.parts

    def check(number: int) -> bool:
        part = parts.read(number)
        return part is not None and is_intact(job, part)

    with ThreadPoolExecutor(READERS) as threads:
        are_intact = list(threads.map(check, numbers))
    return {n for n, is_whole in zip(numbers, are_intact, strict=True) if is_whole}


def is_intact(job: Job, part: Part) -> bool:
    """Return whether a part has all splits, and its files have their sizes.

    Objects in buckets are written whole.
    """
    if tuple(part.splits) != job.options.splits:
        return False
    if urls.in_bucket(job.out):
        return True
    dtype, file_format = job.options.dtype, job.options.file_format
    for name, split in part.splits.items():
        lengths = job.parts.lengths_path(part.unit, name)
        size = lengths_bytes(split.documents)
        if job.options.conversations and not _has(lengths, b"", size):
            return False
        for shard in split.shards:
            header = shard_header(shard.tokens, dtype, file_format)
            size = len(header) + shard.tokens * np.dtype(dtype).itemsize
            if not _has(job.out / name / shard.file, header, size):
                return False
    return True


def _has(path: Path, start: bytes, size: int) -> bool:
    """Return whether a path is a file of a size that begins with some bytes."""
    if not path.is_file() or path.stat().st_size != size:
        return False
    with path.open("rb") as file:
        return file.read(len(start)) == start


@functools.lru_cache(1)
def _tokenizer(directory: Path, fingerprint: str) -> Tokenizer:
    tokenizer = load_tokenizer(directory, is_checked=True)
    if tokenizer.fingerprint != fingerprint:
        raise UserError(f"{directory} has another tokenizer than the run that began: start it anew")
    return tokenizer


def _complete(corpus: Corpus, number: int) -> Part:
    splits = {
        name: SplitPart(
            documents=split.writer.documents,
            tokens=split.writer.tokens,
            shards=split.writer.complete(),
            learned=split.writer.learned,
            size=split.size,
            broken=split.broken,
            statistics=split.statistics,
        )
        for name, split in corpus.splits.items()
    }
    return Part(number, corpus.skipped, splits)


def _upload(part: Part, source: Path, job: Job) -> None:
    """Copy the files of a part to a bucket, one at a time."""
    from jaxforge.storage import files

    for name, split in part.splits.items():
        for shard in split.shards:
            data = (source / name / shard.file).read_bytes()
            files.write(job.out / name / shard.file, data)
    if job.options.conversations:
        for name in job.options.splits:
            path = job.parts.lengths_path(part.unit, name)
            path.write_bytes((source / path.name).read_bytes())
