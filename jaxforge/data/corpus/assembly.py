"""Completion of a corpus: the manifests of the parts of all units."""

import zlib
from collections.abc import Iterator
from pathlib import Path

from jaxforge.data.corpus.corpus_state import check_documents
from jaxforge.data.corpus.manifest import LENGTHS, Manifest
from jaxforge.data.corpus.parts import Parts, all_counts, sums
from jaxforge.data.corpus.summary import SplitTotals, Totals
from jaxforge.data.corpus.tokenizer import Tokenizer
from jaxforge.data.corpus.unit_worker import Job
from jaxforge.storage.atomic_directory import write_bytes


def assemble(job: Job, n_units: int, tokenizer: Tokenizer, tokenizer_name: str) -> Totals:
    """Write the manifests of the splits.

    Args:
        job: see `Job`.
        n_units: number of units, all finished.
        tokenizer: the tokenizer.
        tokenizer_name: name of the tokenizer in the manifests.

    Raises:
        UserError: a split has no document.
    """
    parts, options = job.parts, job.options
    every = list(parts.read_all(range(n_units)))
    splits = sums(every)
    skipped = sum(part.skipped for part in every)
    check_documents({name: split.documents for name, split in splits.items()}, skipped, options)
    counts = all_counts(parts, (len(options.splits), tokenizer.vocab_size))
    totals = {}
    for (name, split), row in zip(splits.items(), counts, strict=True):
        statistics = split.statistics.summary(options.rules)
        totals[name] = SplitTotals(
            split.documents, split.tokens, split.size, split.broken, row, statistics
        )
        lengths_crc32 = None
        if options.conversations:
            lengths_crc32 = _join_lengths(parts, n_units, name, job.out / name)
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
            statistics=statistics,
        ).write(job.out / name)
    kinds = options.conversations, options.preferences
    return Totals(totals, skipped, options.dtype, *kinds)


def _join_lengths(parts: Parts, n_units: int, split: str, directory: Path) -> int:
    """Write the lengths of all conversations of a split; return their CRC-32."""
    data = b"".join(_lengths(parts, n_units, split))
    write_bytes(directory / LENGTHS, data)
    return zlib.crc32(data)


def _lengths(parts: Parts, n_units: int, split: str) -> Iterator[bytes]:
    for unit in range(n_units):
        yield parts.lengths_path(unit, split).read_bytes()
