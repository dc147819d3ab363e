"""Completion of a corpus: the manifests of its splits, and the summary that `prepare` prints."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jaxforge.data.corpus.corpus_state import Options, check_documents
from jaxforge.data.corpus.manifest import ID, LENGTHS, Manifest, Shard
from jaxforge.data.corpus.parts import Parts, SplitPart, sums
from jaxforge.data.corpus.statistics import total
from jaxforge.data.corpus.tokenizer import Tokenizer
from jaxforge.data.corpus.unit_worker import Job
from jaxforge.data.corpus.writer import shard_header
from jaxforge.storage.atomic_directory import write_bytes

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


def assemble(job: Job, tokenizer: Tokenizer, tokenizer_name: str) -> Totals:
    """Write the manifests of the splits.

    Args:
        job: see `Job`; all units are finished.
        tokenizer: the tokenizer.
        tokenizer_name: name of the tokenizer in the manifests.

    Raises:
        UserError: a split has no document.
    """
    parts, options = job.parts, job.options
    every = list(parts.read_all(range(job.n_units)))
    splits = sums(every)
    skipped = sum(part.skipped for part in every)
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
    data = b"".join(_lengths(parts, n_units, split))
    write_bytes(directory / LENGTHS, data)
    return zlib.crc32(data)


def _lengths(parts: Parts, n_units: int, split: str) -> Iterator[bytes]:
    for unit in range(n_units):
        yield parts.lengths_path(unit, split).read_bytes()


def _first_tokens(job: Job, shards: Iterable[Shard]) -> Int[np.ndarray, "n"]:
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
        "bytes per token": lambda part: f"{part.size / part.tokens:.3f}",
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
