"""Conversion into a bucket, in which objects cannot be renamed.

The result is first written to a local staging directory, which depends only on the destination:
an interrupted conversion resumes there. Then its files are copied in this order:

    1. DST/.unfinished    identity of the conversion that owns the incomplete files
    2. DST/...            all other files, several at a time
    3. marker files       `commit_success.txt`, `.metadata`, `config.json`; `config.toml` of a run

Readers look for the marker files, so an incomplete result is never taken for a complete one. Files
at a destination without `.unfinished` belong to somebody else and are never changed.
"""

import dataclasses
import fnmatch
import hashlib
import itertools
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from jaxforge.config.reading.load import load_config
from jaxforge.errors import UserError
from jaxforge.storage import COMMITTED, buckets, files, mirror, run_lock, trust
from torch_compat.checkpoint import hf_config, hf_state, hf_tokenizer, orbax_store
from torch_compat.convert import conversion
from torch_compat.convert.conversion import Advance, ConversionPlan, identity
from torch_compat.convert.source import Request
from torch_compat.convert.to_jaxforge import config_for_run
from torch_compat.formats import safetensors
from torch_compat.formats.dcp_reader import METADATA
from torch_compat.formats.staging import for_each
from torch_compat.formats.workers import Share, Workers

UNFINISHED = ".unfinished"

_MARKERS = (safetensors.INDEX, COMMITTED, f"pp*/{METADATA}", METADATA, hf_config.CONFIG)
_MAX_UPLOADS = 8  # concurrent uploads
_MAX_MEMORY = 1 << 30  # bytes of all concurrent uploads: each file is read into memory


def notes(request: Request) -> list[str]:
    """Return notes for the user of a conversion into a bucket."""
    notes_ = [
        f"the result is written to {_staging_directory(request.destination)} before it is copied, "
        "and that disk must hold it once (TMPDIR selects another disk)"
    ]
    if request.to == "dcp":
        notes_.append(
            "a bucket has no links, so `latest` is not created: load the step by its path"
        )
    if request.to == "megatron":
        notes_.append("a bucket gets no tracker file: load the iteration by its path")
    return notes_


def run(
    request: Request, plan: ConversionPlan, share: Share, advance: Advance, workers: Workers
) -> Path | None:
    """Run a conversion like `conversion.run`, for a destination in a bucket.

    Returns:
        The path of the result in process 0, None in others.

    Raises:
        UserError: the destination exists, or another process writes to it.
        StorageError: a write to the disk or the bucket fails; the same command resumes.
    """
    destination, staging = request.destination, _staging_directory(request.destination)
    local = dataclasses.replace(request, destination=staging / destination.name)
    if share.process:
        return conversion.run(local, plan, share, advance, workers)
    with run_lock.RunLock(destination) as lock:
        lock.take()
        name = _name(local, plan)
        _check_free(destination / plan.subdirectory, name, staging)
        _claim(staging, name)
        directory = local.destination / plan.subdirectory
        if not directory.exists():
            conversion.run(local, plan, share, advance, workers)
        orbax_store.finish_import(local.destination, directory)  # if a kill interrupted the commit
        _Upload(local.destination, destination, plan.subdirectory, name).run(lock)
        shutil.rmtree(staging, ignore_errors=True)  # workers remove their locks meanwhile
    return destination / plan.subdirectory


class _Upload:
    """Upload of a local result to the bucket.

    Args:
        local: the destination on this machine.
        remote: the destination in the bucket.
        subdirectory: the directory to create in the destination.
        name: the identity of the conversion.
    """

    def __init__(self, local: Path, remote: Path, subdirectory: str, name: str) -> None:
        self._local, self._remote, self._name = local, remote, name
        self._directory, self._target = local / subdirectory, remote / subdirectory

    def run(self, lock: run_lock.RunLock) -> None:
        """Copy all files, the markers last, if the lock is still valid then."""
        self._mark_unfinished()
        markers = [path for pattern in _MARKERS for path in sorted(self._directory.glob(pattern))]
        further = (
            _files(self._local / name) for name in (hf_tokenizer.TOKENIZER, hf_state.IMPORTED)
        )
        self._put({*_files(self._directory), *itertools.chain(*further)} - {*markers})
        keys = {path.relative_to(self._directory).as_posix() for path in _files(self._directory)}
        for key in _keys(self._target) - keys - {UNFINISHED}:  # of another, incomplete conversion
            (self._target / key).unlink()
        lock.check()
        for path in markers:
            self._put([path])
        config = self._local / "config.toml"
        if config.exists():  # the result is a run
            remote = config_for_run(load_config(config, trusts=trust.never), self._remote)
            (self._remote / config.name).write_text(remote.to_toml())
        (self._target / UNFINISHED).unlink()

    def _mark_unfinished(self) -> None:
        """Mark the destination as unfinished; an existing run keeps its tokenizer."""
        mark = self._target / UNFINISHED
        if not mark.exists() and (self._remote / hf_tokenizer.TOKENIZER).is_dir():
            shutil.rmtree(self._local / hf_tokenizer.TOKENIZER, ignore_errors=True)
        mark.write_text(self._name)
        for key in _marker_keys(_keys(self._target)):
            (self._target / key).unlink()

    def _put(self, paths: Iterable[Path]) -> None:
        ordered = sorted(paths)
        largest = max((path.stat().st_size for path in ordered), default=0)
        n_uploads = max(1, min(_MAX_UPLOADS, _MAX_MEMORY // max(1, largest)))

        def put(path: Path) -> None:
            url = self._remote / path.relative_to(self._local).as_posix()
            files.write(url, path.read_bytes())

        for_each(put, ordered, n_uploads)


def _staging_directory(destination: Path) -> Path:
    return mirror.directory(destination, "conversion")


def _name(request: Request, plan: ConversionPlan) -> str:
    text = json.dumps(identity(request, plan.source), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _check_free(target: Path, name: str, staging: Path) -> None:
    keys = _keys(target)
    if not keys:
        return
    if UNFINISHED in keys and (not _marker_keys(keys) or (target / UNFINISHED).read_text() == name):
        return
    if UNFINISHED not in keys:  # an interrupted conversion has copied all files, or was overtaken
        shutil.rmtree(staging, ignore_errors=True)
    raise UserError(f"{target} already exists. Remove it or choose another destination")


def _claim(staging: Path, name: str) -> None:
    """Claim the staging directory and remove files of other conversions."""
    mirror.claim(staging)
    label = staging / "conversion"
    if not label.exists() or label.read_text() != name:
        mirror.clear(staging)
        label.write_text(name)


def _files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def _keys(target: Path) -> set[str]:
    return set(buckets.keys(str(target))) - {run_lock.NAME}


def _marker_keys(keys: Iterable[str]) -> list[str]:
    """Return the keys of marker files, by which readers recognize a complete result."""
    return [key for key in keys if any(fnmatch.fnmatchcase(key, pattern) for pattern in _MARKERS)]
