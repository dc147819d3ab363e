"""Execution of `jaxforge prepare --teacher-logits`: a teacher runs over a run's training data.

The teacher is built, loaded and split over the mesh as in training (`training.frozen`). It sees
sequences in the order of their indices, in batches of a microbatch. The format of the files is that
of `data.teacher_logits`.
"""

import argparse
import hashlib
import json
import logging
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxforge.config.job import JobConfig
from jaxforge.config.reading import load
from jaxforge.config.resolution import World, resolve
from jaxforge.data import sources
from jaxforge.data.dataset import Dataset, Mixture
from jaxforge.data.loader import eval_batches
from jaxforge.data.sources import sequences_per_epoch
from jaxforge.data.teacher_logits import (
    FILE_NAME,
    TEACHER_IDS,
    TEACHER_LOGITS,
    LogitsDtype,
    Manifest,
    SavedSet,
    checksums,
    file_name,
    record_type,
    saved_sets,
    sequence_settings,
)
from jaxforge.errors import UserError
from jaxforge.parallel import compilation
from jaxforge.parallel.mesh import data_parallel_size
from jaxforge.program import Program
from jaxforge.state.progress import Progress
from jaxforge.storage import safe_files, urls
from jaxforge.storage.atomic_directory import (
    AtomicDirectory,
    atomic_directory,
    check_output,
    partial_of,
    write_json,
)
from jaxforge.telemetry.console import begin_command
from jaxforge.training.foreign import open_foreign
from jaxforge.training.frozen import FrozenFields, open_frozen

log = logging.getLogger(__name__)

_FILE_BYTES = 1 << 28


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    """Save logits and return the exit code."""
    begin_command()
    if jax.process_count() > 1:
        raise UserError("--teacher-logits runs in one process on all devices. Start only one")
    written = load.load_unresolved(args.teacher_logits, overrides)
    config = resolve(written, World(jax.device_count()), sequences_per_epoch).config
    compilation.use_cache(config.train)
    output = urls.local(args.output, "--output", "copy the directory there afterwards")
    save(config, output, args.dtype or "float32", args.sequences_per_file, overwrite=args.overwrite)
    return 0


def save(
    config: JobConfig,
    output: Path,
    dtype: LogitsDtype = "float32",
    per_file: int | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Write the logits of `distillation.teacher` for all sequences of the training data.

    A command that was killed resumes after its last complete file.

    Args:
        config: a resolved config of a distillation with a teacher.
        output: the directory to create.
        dtype: dtype of the logits.
        per_file: sequences in a file; by default as many as take 256 MB.
        overwrite: replace an existing directory of logits.

    Raises:
        UserError: the config has no teacher, the data or the teacher cannot be used, the disk has
            too little space, or `output` cannot be written.
    """
    section, train = config.distillation, config.train
    if train.objective != "distillation" or section.teacher is None:
        raise UserError(
            '--teacher-logits needs train.objective = "distillation" and distillation.teacher: set '
            "both, and leave distillation.logits out"
        )
    check_output(output.absolute(), FILE_NAME, overwrite)  # before a large teacher is loaded
    data = sources.open_training_data(config)
    sets = saved_sets(config, data)
    program, progress = Program(config), Progress()
    with program.context():
        frozen = open_frozen(program, open_foreign, progress)
        assert frozen is not None
        manifest = _manifest(config, progress.frozen, sets, dtype, per_file)
        datasets = list(data.datasets.values()) if isinstance(data, Mixture) else [data]
        with atomic_directory(
            output, _plan(manifest), marker=FILE_NAME, overwrite=overwrite, say=log.info
        ) as directory:
            assert directory is not None
            begun = [0] * len(sets) if directory.journal is None else directory.journal["files"]
            _announce(manifest, begun, output)
            for number, dataset in enumerate(datasets):
                assert isinstance(dataset, Dataset)  # `saved_sets` refuses others
                # Complete files of a killed command stay as they are.
                first = begun[number] * manifest.sequences_per_file
                batches = _records(program, frozen, dataset, first, manifest.record)
                _write_files(directory, manifest, begun, number, batches)
            # After all files: the manifest marks a complete directory.
            write_json(directory.out / FILE_NAME, manifest.to_json())
    log.info("wrote %s; train with distillation.logits = %s", output, output)


def _manifest(
    config: JobConfig,
    arrays: dict[str, Any],
    sets: list[SavedSet],
    dtype: LogitsDtype,
    per_file: int | None,
) -> Manifest:
    section, vocab_size = config.distillation, config.model.vocab_size
    record = record_type(config.train.seq_len, section.top_k, vocab_size, dtype)
    return Manifest(
        teacher=str(section.teacher),
        arrays=arrays,
        vocab_size=vocab_size,
        top_k=section.top_k,
        dtype=dtype,
        settings=sequence_settings(config),
        sequences_per_file=per_file or max(1, _FILE_BYTES // record.itemsize),
        datasets=sets,
    )


def _plan(manifest: Manifest) -> dict[str, Any]:
    """Return the options and inputs that the files depend on."""
    arrays = json.dumps(manifest.arrays, sort_keys=True).encode()
    values = manifest.to_json()
    inputs = [list(item.values()) for item in values.pop("datasets")]
    return {
        "options": {**values, "arrays": hashlib.sha256(arrays).hexdigest()},
        "inputs": [[name, str(sequences), contents] for name, sequences, contents in inputs],
    }


def _announce(manifest: Manifest, files: list[int], output: Path) -> None:
    """Log the size of the logits before they are computed, and check that the disk has the space.

    Raises:
        UserError: the disk has too little space.
    """
    size = manifest.record.itemsize
    total = sum(item.sequences for item in manifest.datasets)
    done = sum(
        min(n * manifest.sequences_per_file, item.sequences)
        for n, item in zip(files, manifest.datasets, strict=True)
    )
    needed, free = size * (total - done), shutil.disk_usage(partial_of(output)).free
    log.info(
        "%s sequences of %s tokens with %d logits: %.3g GB, of which %.3g GB are missing; %.3g GB "
        "are free",
        f"{total:,}", f"{manifest.settings['train.seq_len']:,}", manifest.top_k,
        total * size / 1e9, needed / 1e9, free / 1e9,
    )  # fmt: skip
    if needed > free:
        raise UserError(
            f"{output}: {needed:,} bytes are needed, and {free:,} are free. Lower "
            "distillation.top_k, use --dtype float16, or choose another --output"
        )


def _records(
    program: Program, frozen: FrozenFields, dataset: Dataset, first: int, record: np.dtype
) -> Iterator[np.ndarray]:
    """Yield the records of a dataset from sequence `first` on, in batches.

    The teacher computes a batch while the records of the batch before are written.
    """
    rows = program.config.train.microbatch_size(data_parallel_size(program.mesh))
    settings = frozen.model.config
    settings = settings.with_values({"eval.batch_size": rows})
    left, ahead = len(dataset) - first, None
    if left <= 0:
        return
    for batch in eval_batches(settings, program.mesh, dataset, range(first, len(dataset))):
        current = frozen({}, batch)
        if ahead is not None:
            yield _as_records(ahead, record, min(left, rows))
            left -= rows
        ahead = current
    assert ahead is not None  # there was at least one sequence
    yield _as_records(ahead, record, left)


def _as_records(batch: dict[str, jax.Array], record: np.dtype, n: int) -> np.ndarray:
    """Return the records of the first `n` sequences of a batch.

    Raises:
        UserError: a logit does not fit into the dtype of the records.
    """
    # [microbatches, rows, ...] -> [sequences, ...]
    host = {name: x.reshape(-1, *x.shape[2:])[:n] for name, x in jax.device_get(batch).items()}
    records = np.empty(n, record)
    # The check below reports an overflow, with a remedy.
    with np.errstate(over="ignore"):
        records["logits"] = host[TEACHER_LOGITS]
    records["ids"] = host[TEACHER_IDS]
    if not np.isfinite(records["logits"]).all():
        size = np.abs(host[TEACHER_LOGITS]).max()
        raise UserError(
            f"the teacher has logits of size {size:g}, which are not finite as "
            f"{record['logits'].base}. Use --dtype float32, or check the teacher"
        )
    records["checksum"][:, 0] = checksums(host, records)
    return records


def _write_files(
    directory: AtomicDirectory,
    manifest: Manifest,
    files: list[int],
    number: int,
    batches: Iterable[np.ndarray],
) -> None:
    """Write the remaining files of a dataset, and commit each of them.

    Args:
        directory: the unfinished directory.
        manifest: its manifest.
        files: number of complete files of each dataset; updated.
        number: number of the dataset.
        batches: records of the sequences after the complete files.
    """
    item = manifest.datasets[number]
    for records in _regrouped(batches, manifest.sequences_per_file):
        path = directory.out / file_name(number, files[number])
        with safe_files.replacing(path, durable=True) as file:
            header = np.lib.format.header_data_from_array_1_0(records)
            np.lib.format.write_array_header_1_0(file, header)
            file.write(records.view(np.uint8).data)
        files[number] += 1
        # After the file is durable: a crash in between repeats the file.
        directory.commit({"files": files})
        done = min(files[number] * manifest.sequences_per_file, item.sequences)
        log.info("%s: %s of %s sequences", item.name, f"{done:,}", f"{item.sequences:,}")


def _regrouped(batches: Iterable[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """Yield the same records in arrays of `size`; the last array may be shorter."""
    held: list[np.ndarray] = []
    for batch in batches:
        held.append(batch)
        if sum(map(len, held)) < size:
            continue
        records = np.concatenate(held)
        whole = len(records) // size * size
        yield from records[:whole].reshape(-1, size)
        held = [records[whole:]]
    if sum(map(len, held)):
        yield np.concatenate(held)
