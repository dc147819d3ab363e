"""Preparation of units of work, in any process on any machine, and completion of the corpus.

    local disk   shards ─► .DIR.partial/out/train/            part ─► .DIR.partial/parts/
    bucket       shards ─► temporary directory ─► DIR/train/  part ─► DIR/.prepare/parts/

An interrupted unit starts over. When all are finished, `assemble` writes the manifests.
"""

import functools
import socket
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jaxforge.data.corpus.ingest import fill
from jaxforge.data.corpus.inputs import Unit
from jaxforge.data.corpus.manifest import ID, LENGTHS, Manifest, Options, Shard
from jaxforge.data.corpus.parts import READERS, Done, Parts, SplitPart, UnitPart, UnitProgress, sums
from jaxforge.data.corpus.statistics import total
from jaxforge.data.corpus.tokenizer import Tokenizer
from jaxforge.data.corpus.tokenizer_files import load_tokenizer
from jaxforge.data.corpus.workers import Show, ignore_news, run_in_processes
from jaxforge.data.corpus.writer import (
    Corpus,
    check_documents,
    lengths_bytes,
    open_corpus,
    shard_header,
)
from jaxforge.errors import UserError
from jaxforge.storage import urls
from jaxforge.storage.atomic_directory import PLAN, AtomicDirectory, write_bytes

PARTS = "parts"
"""Name of the directory of parts, within that of the state."""


@dataclass(frozen=True)
class CorpusJob:
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
) -> CorpusJob:
    """Return the job of an output, and record that there are parts to resume from."""
    if not has_parts(destination):
        # Before any token is written: a kill from here on finds parts to resume from.
        destination.commit({"units": n_units})
    fingerprint = tokenizer.fingerprint
    return CorpusJob(destination.out, destination.state, options, fingerprint, n_units, isolate)


def has_parts(destination: AtomicDirectory) -> bool:
    """Return whether an interrupted run has begun to write tokens."""
    return "units" in (destination.journal or {})


def run_units(
    job: CorpusJob,
    units: Sequence[Unit],
    workers: int,
    show: Callable[[Done], None] = lambda _: None,
) -> None:
    """Prepare all units that are not finished.

    Args:
        job: see `CorpusJob`.
        units: the units of this process.
        workers: number of processes.
        show: called with the progress.

    Raises:
        UserError: a unit fails.
        StorageError: the bucket of the output fails.
    """
    # A part vouches for its files: where one was cut or removed since, the unit is repeated.
    finished = _intact_units(job, job.parts.finished() & {unit.number for unit in units})
    progress = UnitProgress(units, finished, show)
    unfinished = [unit for unit in units if unit.number not in finished]
    # If there are fewer units than processes, the others encode within units.
    job = replace(job, workers=workers // max(1, min(workers, len(unfinished))))
    prepare = functools.partial(prepare_unit, job)
    for part in run_in_processes(workers, prepare, unfinished, progress.update):
        progress.finish(part)


def prepare_unit(job: CorpusJob, unit: Unit, show: Show = ignore_news) -> UnitPart:
    """Prepare a unit, unless it is finished.

    Args:
        job: see `CorpusJob`.
        unit: the unit.
        show: called after each batch.

    Returns:
        The part, which is durable.

    Raises:
        UserError: an input cannot be read, or a shard cannot be written.
        StorageError: the bucket failed for longer than requests are repeated.
    """
    # Shards on a disk that only this machine sees would be missed at the end of the corpus.
    if not (job.state / PLAN).exists():
        raise UserError(
            f"{socket.gethostname()} does not see {job.state}: --output must be in a bucket, or on "
            "a file system that all machines share"
        )
    parts = job.parts
    with parts.claimed(unit.number) as finished:
        # Another process may have finished the unit since this one listed the parts.
        if finished and is_intact(job, finished):
            return finished
        tokenizer = _tokenizer(job.out / "tokenizer", job.fingerprint)
        is_remote = urls.in_bucket(job.out)
        # The header of a shard has its number of tokens, known at the end, and objects cannot be
        # changed: shards of a bucket are complete files here before they are uploaded.
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
        # Last: all that a part promises is durable by now, so a kill costs work but no correctness.
        parts.write(part)
    return part


def _intact_units(job: CorpusJob, numbers: Iterable[int]) -> set[int]:
    """Return the finished units among `numbers` whose files are whole; the others are repeated."""
    numbers, parts = list(numbers), job.parts

    def check(number: int) -> bool:
        part = parts.read(number)
        return part is not None and is_intact(job, part)

    # In a bucket, each part is a round trip.
    with ThreadPoolExecutor(READERS) as threads:
        are_intact = list(threads.map(check, numbers))
    return {n for n, is_whole in zip(numbers, are_intact, strict=True) if is_whole}


def is_intact(job: CorpusJob, part: UnitPart) -> bool:
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
            # Until a shard is complete, its header says 0 tokens, even if its size is right.
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


def _complete(corpus: Corpus, number: int) -> UnitPart:
    splits = {
        name: SplitPart(
            documents=split.writer.documents,
            # Before `learned` is read: this writes the last tokens, which `learned` counts.
            shards=split.writer.complete(),
            learned=split.writer.learned,
            broken=split.broken,
            statistics=split.statistics,
        )
        for name, split in corpus.splits.items()
    }
    return UnitPart(number, corpus.skipped, splits)


def _upload(part: UnitPart, source: Path, job: CorpusJob) -> None:
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


_COUNTED_TOKENS = 1 << 24  # of the training split, for the entropy


class Totals(NamedTuple):
    """Totals of a corpus.

    Attributes:
        splits: the splits, by name.
        skipped: number of bad records that were skipped.
        entropy: unigram entropy in nats (`entropy`) of the first training tokens.
        options: the options of the command.
    """

    splits: Mapping[str, SplitPart]
    skipped: int
    entropy: float
    options: Options


def assemble(job: CorpusJob, tokenizer: Tokenizer, tokenizer_name: str) -> Totals:
    """Write the manifests of the splits.

    Args:
        job: see `CorpusJob`; all units are finished.
        tokenizer: the tokenizer.
        tokenizer_name: name of the tokenizer in the manifests.

    Raises:
        UserError: a split has no document.
    """
    parts, options = job.parts, job.options
    every = list(parts.read_all(range(job.n_units)))
    splits = sums(every)
    skipped = sum(part.skipped for part in every)
    # A split may be empty in most units, but not in all.
    check_documents({name: split.documents for name, split in splits.items()}, skipped, options)
    for name, split in splits.items():
        lengths_crc32 = None
        if options.conversations:
            lengths_crc32 = _join_lengths(parts, job.n_units, name, job.out / name)
        Manifest.of_shards(
            split.shards,
            version=options.version,
            dtype=options.dtype,
            documents=split.documents,
            eos_id=tokenizer.eos_id,
            vocab_size=tokenizer.vocab_size,
            tokenizer=tokenizer_name,
            tokenizer_sha256=tokenizer.fingerprint,
            lengths_crc32=lengths_crc32,
            bos_ids=tokenizer.prefix,
            statistics=split.statistics.summary(options.rules),
        ).write(job.out / name)
    return Totals(splits, skipped, entropy(_first_tokens(job, splits["train"].shards)), options)


def _join_lengths(parts: Parts, n_units: int, split: str, directory: Path) -> int:
    """Write the lengths of all conversations of a split; return their CRC-32."""
    # In the order of the units, as the shards in the manifest.
    data = b"".join(_lengths(parts, n_units, split))
    write_bytes(directory / LENGTHS, data)
    return zlib.crc32(data)


def _lengths(parts: Parts, n_units: int, split: str) -> Iterator[bytes]:
    for unit in range(n_units):
        yield parts.lengths_path(unit, split).read_bytes()


def _first_tokens(job: CorpusJob, shards: Iterable[Shard]) -> Int[np.ndarray, "n"]:
    """Return the first training tokens; of conversations, the learned ones among them."""
    dtype, tokens = np.dtype(job.options.dtype), []
    left = _COUNTED_TOKENS
    for shard in shards:
        if left <= 0:
            break
        header = shard_header(shard.tokens, job.options.dtype, job.options.file_format)
        count = min(shard.tokens, left)
        left -= count
        with (job.out / "train" / shard.file).open("rb") as file:
            data = file.read(len(header) + count * dtype.itemsize)
        tokens.append(np.frombuffer(data, dtype.newbyteorder("<"), offset=len(header)))
    every = np.concatenate(tokens)
    return every[every <= ID]  # which all tokens of text are


def table(totals: Totals, tokenizer: Tokenizer) -> str:
    """Return a table of the results with a column for each split."""
    options, parts = totals.options, totals.splits.values()
    cells: dict[str, Callable[[SplitPart], str]] = {
        "documents": lambda part: f"{part.documents:,}",
        "… not UTF-8": lambda part: f"{part.broken:,}",
        "tokens": lambda part: f"{part.tokens:,}",
        "bytes per token": lambda part: f"{part.statistics.size / part.tokens:.3f}",
    }
    if options.conversations:
        cells = {
            "conversations": cells["documents"],
            "tokens": cells["tokens"],
            "… learned": lambda part: f"{part.learned:,}",
        }
    if options.preferences:
        cells.pop("conversations")
        cells = {"pairs": lambda part: f"{part.documents // 2:,}", **cells}
    bos = "".join(f", BOS {i}" for i in tokenizer.prefix)
    rows = [
        ("", *totals.splits),
        *((name, *map(cell, parts)) for name, cell in cells.items()),
        ("unigram entropy", f"{totals.entropy:.4f} nats per training token: loss to beat"),
        (
            "vocabulary",
            f"{tokenizer.vocab_size:,} ({options.dtype}), EOS {tokenizer.eos_id}{bos}",
        ),
    ]
    rows += [
        (
            f"map {each.rule}",
            f"{each.unchanged:,} unchanged, {each.changed:,} changed, {each.dropped:,} dropped",
        )
        for each in total(part.statistics.summary(options.rules) for part in parts)
    ]
    if totals.skipped:
        rows.append(("left out as bad", f"{totals.skipped:,} records"))
    lines = (f"{row[0]:<16} " + "".join(f"{cell:<17}" for cell in row[1:]) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def entropy(tokens: Int[np.ndarray, "n"]) -> float:
    """Return the entropy, in nats, of a token drawn with the frequencies of `tokens`.

    This is the loss of a model that predicts the frequency of each token.
    """
    counts = np.bincount(tokens)
    frequencies = counts[counts > 0] / len(tokens)
    return -float(frequencies @ np.log(frequencies))
