"""Reader and writer of jaxforge's own checkpoints, one block at a time.

Orbax reads and writes whole leaves, and a leaf holds all layers and all experts. Arrays are
therefore read and written directly in Orbax's storage format (`ocdbt`). Orbax itself writes the
structure and metadata and commits the checkpoint (`orbax_commit`).

    .<step>.partial/ocdbt.process_0/   staged arrays, linked into the checkpoint on commit
    .<step>.partial/<_RUN_FILES>/      files of the run directory, moved there after the commit
"""

import functools
import itertools
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxforge.checkpoint.paths import EMA, GROUPS, find, is_precision_specific
from jaxforge.config.job import JobConfig
from jaxforge.config.reading.load import make_config
from jaxforge.errors import StorageError, UserError
from jaxforge.kernels.hashing import block_checksum
from jaxforge.state.progress import check_config, unseal_progress
from jaxforge.storage import urls
from jaxforge.storage.atomic_directory import partial_of
from jaxforge.storage.trust import Decision, never
from jaxforge.storage.untrusted_json import DOCUMENT, load_object
from torch_compat.checkpoint.eight_bit import check_moment_dtype, dequantize_moments
from torch_compat.checkpoint.stacking import Stacking
from torch_compat.checkpoint.state import AbstractTarget, CheckpointState
from torch_compat.checkpoint.validation import check_written
from torch_compat.formats import limits, ocdbt, ocdbt_writer
from torch_compat.formats.files import writing
from torch_compat.formats.lazy import (
    Index,
    LazyTensor,
    blocks,
    first_position,
    from_array,
    full_index,
    index_shape,
)
from torch_compat.formats.staging import Staging, Unit, batches, naming_failure

_RUN_FILES = "beside"
_CHUNK = 32 << 20  # largest chunk in bytes; a restore reads one at a time
_CHUNKS = 6  # chunks of largest size in a file, which are synced together
_FORM = 3  # version of the staging format: an import in another one starts anew
_STORE = "ocdbt.process_0"  # Orbax merges all databases whose names begin with ocdbt.process_


def open_orbax(path: Path, trusts: Decision = never) -> tuple[CheckpointState, JobConfig]:
    """Open a checkpoint, or the newest one of a run; also return the stored config.

    Args:
        path: path of the run or of the checkpoint.
        trusts: decides whether plugins of the config are imported.

    Raises:
        UserError: the checkpoint is missing or damaged, or its config is invalid, for example
            because a plugin is not installed.
    """
    run, step = find(path)
    directory = run / "checkpoints" / f"step_{step}"
    _check_files(directory)
    try:
        values, progress_json = (
            load_object((directory / part).read_bytes(), f"{directory} is damaged: {part}")
            for part in ("config/metadata", "progress/metadata")
        )
        check_config(progress_json, values)
        progress = unseal_progress(progress_json)
        leaves = ocdbt.open_arrays(directory / "state")
        leaves = dequantize_moments(_without_groups(leaves))
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{directory} is damaged ({str(error)[:160]})") from error
    model = values.get("model")
    if isinstance(model, dict):
        limits.check_layers(model.get("n_layers"), model.get("num_experts"), str(directory))
    source = str(directory / "config/metadata")
    config = make_config(values, source=source, trusts=trusts)
    stacking = Stacking(config.model)
    params: dict[str, LazyTensor] = {}
    model_state: dict[str, LazyTensor] = {}
    moments: dict[str, dict[str, LazyTensor]] = {}
    ema: dict[str, LazyTensor] = {}
    scalars, guard = {}, {}
    for name, leaf in leaves.items():
        section, _, tail = name.partition(".")
        if is_precision_specific(name):  # only in jaxforge, and runs can start without
            continue
        if section == "params":
            params |= stacking.split(tail, leaf)
        elif section == "model_state":
            model_state |= stacking.split(tail, leaf)
        elif section == EMA:
            ema |= stacking.split(tail, leaf)
        elif section == "optimizer" and "." in tail:
            field, _, parameter = tail.partition(".")
            moments.setdefault(field, {}).update(stacking.split(parameter, leaf))
        elif section == "optimizer":
            scalars[tail] = leaf.all()
        elif section == "guard":
            guard[tail] = leaf.all()
    checkpoint = CheckpointState(
        params, moments or None, scalars, progress, guard, model_state=model_state, ema=ema
    )
    return checkpoint, config


def _without_groups(leaves: Mapping[str, LazyTensor]) -> Mapping[str, LazyTensor]:
    """Return the arrays as those of one job, if groups trained apart (`train.outer_interval`).

    These are the global weights, and the moments and the guard of the first group.
    """
    own = f"{GROUPS}.optimizer."
    if not any(name.startswith(own) for name in leaves):
        return leaves
    result = {}
    for name, leaf in leaves.items():
        section = name.partition(".")[0]
        if name.startswith(own):
            result[name.removeprefix(f"{GROUPS}.")] = leaf.part(0)
        elif section == "guard":
            result[name] = leaf.part(0)
        elif section not in (GROUPS, "optimizer"):
            result[name] = leaf
    return result


def _check_files(directory: Path) -> None:
    """Check types and sizes of files, so that no pipe blocks and no metadata fill the memory.

    Raises:
        UserError: a file is of another type, or too large.
    """
    if urls.in_bucket(directory):  # buckets hold only objects
        return
    for path in filter(lambda path: not path.is_dir(), directory.rglob("*")):
        if not path.is_file():
            raise UserError(f"{directory} is damaged ({path.name} is not a regular file)")
        if path.parent.name != ocdbt.DATA and path.stat().st_size > DOCUMENT:
            raise UserError(
                f"{directory} is damaged ({path.name} has {path.stat().st_size} bytes, more than "
                "such a file can have)"
            )


def stage(
    checkpoint: CheckpointState,
    target: AbstractTarget,
    run: Path,
    plan: dict[str, Any],
    block: int,
) -> "StagedImport":
    """Begin the import of a checkpoint into a run.

    Args:
        checkpoint: state to write.
        target: state that the config declares.
        run: run directory.
        plan: identification of the conversion, for resuming one that was stopped.
        block: bytes that may be in memory at a time.
    """
    assert checkpoint.progress is not None
    check_moment_dtype(checkpoint, target.config, str(run))
    destination = run.absolute() / "checkpoints" / f"step_{checkpoint.progress.step}"
    if finish_import(run, destination):
        raise UserError(
            f"{destination} exists: an import that was stopped at its very end is complete now"
        )
    # Raises if the state cannot be written, before anything is created.
    tensors = _tensors(checkpoint, target.stacking)
    staging = Staging(destination, {**plan, "store": _FORM})
    return StagedImport(checkpoint, target, run, tensors, staging, block)


class StagedImport:
    """Checkpoint being imported: first write `units`, then call `commit`."""

    def __init__(
        self,
        checkpoint: CheckpointState,
        target: AbstractTarget,
        run: Path,
        tensors: dict[str, LazyTensor],
        staging: Staging,
        block: int,
    ) -> None:
        self.staging = staging
        self._checkpoint, self._target, self._run = checkpoint, target, run
        self._tensors = tensors
        self._store = self.staging.path / _STORE
        self._block = min(block, _CHUNK)
        self._locations: dict[str, ocdbt.Location] = {}
        self.units = list(self._units())

    def commit(self) -> None:
        """Commit the staged arrays as a checkpoint, and verify it."""
        from torch_compat.checkpoint import orbax_commit

        progress = self._checkpoint.progress
        assert progress is not None
        result = orbax_commit.scalars(self._checkpoint)
        scalars = {name: from_array(value) for name, value in result.items()}
        arrays = {**self._tensors, **scalars}
        destination, config = self.staging.destination, self._target.config
        with naming_failure(destination):
            # After all chunks: the manifest makes them visible.
            ocdbt_writer.write_index(self._store, self._values(arrays, scalars))
            # A checksum of an array is the sum of the checksums of its blocks, which may be in
            # several files.
            files = self.staging.results(self.units).values()
            checksums = {
                **{n: sum(file.get(n, 0) for file in files) % 2**32 for n in self._tensors},
                **{name: block_checksum(value.all(), 0) for name, value in scalars.items()},
            }
            orbax_commit.commit(progress, config, self._run, self._store, arrays, checksums)
        self._check_written(arrays)
        finish_import(self._run, destination)
        self.staging.discard()

    @property
    def run_files(self) -> Path:
        """Directory of files that the run directory receives once the checkpoint exists."""
        return self.staging.path / _RUN_FILES

    def _check_written(self, arrays: dict[str, LazyTensor]) -> None:
        """Open the new checkpoint and compare the last value of each array.

        Raises:
            StorageError: the checkpoint cannot be read; it is removed.
        """
        from torch_compat.checkpoint.orbax_commit import names

        directory = self.staging.destination
        try:
            open_orbax(directory)
            result = ocdbt.open_arrays(directory / "state")
            if names(directory / "state") != set(arrays):
                raise StorageError(f"{directory}: Orbax finds other arrays than were written")
            check_written(result, arrays, str(directory))
            # A truncated file lacks its end, where the last values of arrays are.
            wrong = [name for name in arrays if _last(arrays[name]) != _last(result[name])]
            if wrong:
                raise StorageError(f"{directory}: {wrong[0]} has other values than were written")
        except (OSError, ValueError) as error:
            # A run must not resume from a damaged checkpoint.
            shutil.rmtree(directory)
            self.staging.discard()
            raise StorageError(f"the new checkpoint could not be read: {error}") from error

    def _units(self) -> Iterator[Unit]:
        """Yield the units, one per file of several chunks, and record the locations of chunks."""
        chunks = itertools.chain.from_iterable(
            split_chunks(name, leaf, self._block) for name, leaf in self._tensors.items()
        )
        files = batches(chunks, lambda chunk: chunk.nbytes, _CHUNKS * self._block)
        for number, file_chunks in enumerate(files):
            name, at = f"{ocdbt.DATA}/{number}", 0
            for chunk in file_chunks:
                self._locations[chunk.key] = name, at, chunk.nbytes
                at += chunk.nbytes
            write = functools.partial(write_chunk_file, self._store / name, file_chunks)
            nbytes = sum(_bytes(chunk.leaf, chunk.region) for chunk in file_chunks)
            yield Unit(f"data-{number}", nbytes, write)

    def _values(
        self, arrays: dict[str, LazyTensor], scalars: dict[str, LazyTensor]
    ) -> dict[str, ocdbt.Location]:
        """Return the contents of the database by key."""
        values = dict(self._locations)
        for name, leaf in arrays.items():
            chunk = index_shape(split_blocks(leaf, self._block)[0])
            metadata = ocdbt_writer.description(leaf.shape, chunk, leaf.dtype)
            values[f"{name}{ocdbt.ZARRAY}"] = metadata
        for name, value in scalars.items():
            values[f"{name}/{ocdbt.chunk_key((0,) * len(value.shape))}"] = value.all().tobytes()
        return values


def finish_import(run: Path, checkpoint: Path) -> bool:
    """Move the staged files of the run directory there if the checkpoint exists.

    Only renames are needed, so a full disk cannot stop it. An import that was killed right after
    the commit is completed when it is repeated.

    Returns:
        Whether an import was completed.
    """
    partial = partial_of(checkpoint)
    if not checkpoint.exists() or not (partial / _RUN_FILES).is_dir():
        return False
    with naming_failure(run / "config.toml"):
        for path in (partial / _RUN_FILES).iterdir():
            # `replace` cannot overwrite a directory with files: the run keeps its own.
            if path.is_file() or not (run / path.name).exists():
                path.replace(run / path.name)
    shutil.rmtree(partial, ignore_errors=True)
    return True


def _tensors(checkpoint: CheckpointState, stacking: Stacking) -> dict[str, LazyTensor]:
    sections = {"params": checkpoint.params, "model_state": checkpoint.model_state}
    sections[EMA] = checkpoint.ema
    moments = checkpoint.moments or {}
    sections |= {f"optimizer.{field}": of_field for field, of_field in moments.items()}
    return {
        f"{section}.{name}": tensor
        for section, entries in sections.items()
        for name, tensor in stacking.join(entries).items()
    }


class _Chunk(NamedTuple):
    """Chunk of an array.

    Attributes:
        name: name of the array.
        key: key in the database.
        leaf: the array.
        region: index of the chunk in the array.
        nbytes: size of a full chunk, which the last chunk may not fill.
    """

    name: str
    key: str
    leaf: LazyTensor
    region: Index
    nbytes: int


def split_chunks(name: str, leaf: LazyTensor, limit: int) -> Iterator[_Chunk]:
    """Yield the chunks of an array, one per block; none for an empty array."""
    indices = split_blocks(leaf, limit)
    shape, nbytes = index_shape(indices[0]), _bytes(leaf, indices[0])
    for index in indices if nbytes else ():
        cell = tuple(s.start // n for s, n in zip(index, shape, strict=True))
        yield _Chunk(name, f"{name}/{ocdbt.chunk_key(cell)}", leaf, index, nbytes)


def write_chunk_file(path: Path, chunks: list[_Chunk]) -> dict[str, int]:
    """Write chunks into a file; return the sum of checksums by array name."""
    sums: dict[str, int] = {}
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path) as put:
        at = 0
        for chunk in chunks:
            values = np.asarray(chunk.leaf.read(chunk.region), order="C")
            put(values.reshape(-1).view(np.uint8), at)
            # zarr pads the last chunks of an array to the full size.
            put(bytes(chunk.nbytes - values.nbytes), at + values.nbytes)
            at += chunk.nbytes
            # The disk writes the chunk while its checksum is computed.
            checksum = block_checksum(values, first_position(chunk.region, chunk.leaf.shape))
            sums[chunk.name] = (sums.get(chunk.name, 0) + checksum) % 2**32
    return sums


def split_blocks(leaf: LazyTensor, limit: int) -> list[Index]:
    """Split an array into blocks of at most one layer: some experts, or some rows of one."""
    if len(leaf.shape) < 2:
        return [full_index(leaf.shape)]
    if len(leaf.shape) < 3:
        return list(blocks(leaf.shape, leaf.dtype.itemsize, limit))
    within = list(blocks(leaf.shape[1:], leaf.dtype.itemsize, limit))
    return [(slice(i, i + 1), *index) for i in range(leaf.shape[0]) for index in within]


def _last(leaf: LazyTensor) -> bytes:
    """Return the bytes of the last value; empty for an empty array."""
    index = tuple(slice(max(0, size - 1), size) for size in leaf.shape)
    return leaf.read(index).tobytes()


def _bytes(leaf: LazyTensor, index: Index) -> int:
    return math.prod(index_shape(index)) * leaf.dtype.itemsize
