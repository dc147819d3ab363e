"""Conversions into a bucket, where nothing can be renamed.

The result gathers on this machine, in the directory that it always has for that destination, so
that a conversion which was killed goes on. Then its files are copied:

DST/.unfinished     first: names the conversion whose files lie there, whole or not
DST/...             several at a time
what is looked for  last: `commit_success.txt`, `.metadata`, `config.json`; a run's `config.toml`

Without the first, what lies at a destination is somebody's, and stays as it is.
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
from jaxforge.storage import COMMITTED, buckets, mirror, run_lock, trust
from torch_compat.checkpoint import hf_config, hf_state, orbax_store
from torch_compat.convert import conversion
from torch_compat.convert.conversion import Advance, ConversionPlan, identity
from torch_compat.convert.source import Request
from torch_compat.convert.to_jaxforge import config_for_run
from torch_compat.formats import safetensors
from torch_compat.formats.dcp_reader import METADATA
from torch_compat.formats.staging import for_each
from torch_compat.formats.workers import Share, Workers

UNFINISHED = ".unfinished"

_LAST = (safetensors.INDEX, COMMITTED, f"pp*/{METADATA}", METADATA, hf_config.CONFIG)
_AT_ONCE = 8  # files of this many bytes in all: each passes through memory whole
_MEMORY = 1 << 30


def notes(request: Request) -> list[str]:
    """Return notes for the user of a conversion into a bucket."""
    notes_ = [
        f"it gathers in {_gathering(request.destination)} before it is copied: that disk must hold "
        "it once (TMPDIR names another)"
    ]
    if request.to == "dcp":
        notes_.append("a bucket has no links, so there will be no `latest`: name the step itself")
    return notes_


def run(
    request: Request, plan: ConversionPlan, share: Share, advance: Advance, workers: Workers
) -> Path | None:
    """Do what `conversion.run` does, for a destination in a bucket.

    Returns:
        What was made, from process 0.

    Raises:
        UserError: something is there already, or another process writes there.
        StorageError: the disk or the bucket does not take it; the same command goes on.
    """
    destination, gathering = request.destination, _gathering(request.destination)
    here = dataclasses.replace(request, destination=gathering / destination.name)
    if share.process:
        return conversion.run(here, plan, share, advance, workers)
    with run_lock.RunLock(destination) as lock:
        lock.take()
        name = _name(here, plan)
        _check_free(destination / plan.subdirectory, name, gathering)
        _begin(gathering, name)
        directory = here.destination / plan.subdirectory
        if not directory.exists():
            conversion.run(here, plan, share, advance, workers)
        orbax_store.finish_import(
            here.destination, directory
        )  # what a kill just after its commit left
        _Copy(here.destination, destination, plan.subdirectory, name).run(lock)
        shutil.rmtree(gathering, ignore_errors=True)  # workers take their locks away meanwhile
    return destination / plan.subdirectory


class _Copy:
    """From this machine to the bucket.

    Args:
        here: what was the destination on this machine.
        there: what it is in the bucket.
        within: the directory in it that is made.
        name: of the conversion.
    """

    def __init__(self, here: Path, there: Path, subdirectory: str, name: str) -> None:
        self._here, self._there, self._name = here, there, name
        self._directory, self._target = here / subdirectory, there / subdirectory

    def run(self, lock: run_lock.RunLock) -> None:
        """Copies all, the lock willing."""
        self._begin()
        last = [path for pattern in _LAST for path in sorted(self._directory.glob(pattern))]
        beside = (_files(self._here / name) for name in (hf_state.TOKENIZER, hf_state.IMPORTED))
        self._put({*_files(self._directory), *itertools.chain(*beside)} - {*last})
        ours = {path.relative_to(self._directory).as_posix() for path in _files(self._directory)}
        for key in _keys(self._target) - ours - {UNFINISHED}:  # of another that was not finished
            (self._target / key).unlink()
        lock.check()
        for path in last:
            self._put([path])
        config = self._here / "config.toml"
        if config.exists():  # of a run
            named = config_for_run(load_config(config, trusts=trust.never), self._there)
            (self._there / config.name).write_text(named.to_toml())
        (self._target / UNFINISHED).unlink()

    def _begin(self) -> None:
        """From now on what lies there is unfinished; a run that is there keeps its tokenizer."""
        mark = self._target / UNFINISHED
        if not mark.exists() and (self._there / hf_state.TOKENIZER).is_dir():
            shutil.rmtree(self._here / hf_state.TOKENIZER, ignore_errors=True)
        mark.write_text(self._name)
        for key in _visible(_keys(self._target)):
            (self._target / key).unlink()

    def _put(self, paths: Iterable[Path]) -> None:
        files = sorted(paths)
        largest = max((path.stat().st_size for path in files), default=0)
        at_once = max(1, min(_AT_ONCE, _MEMORY // max(1, largest)))

        def put(path: Path) -> None:
            url = self._there / path.relative_to(self._here).as_posix()
            buckets.write(url, path.read_bytes())

        for_each(put, files, at_once)


def _gathering(destination: Path) -> Path:
    return mirror.directory(destination, "conversion")


def _name(request: Request, plan: ConversionPlan) -> str:
    about = json.dumps(identity(request, plan.source), sort_keys=True)
    return hashlib.sha256(about.encode()).hexdigest()


def _check_free(target: Path, name: str, gathering: Path) -> None:
    keys = _keys(target)
    if not keys:
        return
    if UNFINISHED in keys and (not _visible(keys) or (target / UNFINISHED).read_text() == name):
        return
    if UNFINISHED not in keys:  # a conversion that was killed here had copied all, or is late
        shutil.rmtree(gathering, ignore_errors=True)
    raise UserError(f"{target} is there already; remove it or name another place")


def _begin(gathering: Path, name: str) -> None:
    """Lets what another conversion left on this machine go."""
    mirror.claim(gathering)
    label = gathering / "conversion"
    if not label.exists() or label.read_text() != name:
        mirror.clear(gathering)
        label.write_text(name)


def _files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def _keys(target: Path) -> set[str]:
    return set(buckets.keys(str(target))) - {run_lock.NAME}


def _visible(keys: Iterable[str]) -> list[str]:
    """Return the keys by which a reader finds the result."""
    return [key for key in keys if any(fnmatch.fnmatchcase(key, pattern) for pattern in _LAST)]
