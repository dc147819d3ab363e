"""Conversion into a bucket, in which objects cannot be renamed.

The result is first written to a temporary directory, and then copied in this order:

    1. DST/.unfinished    empty: the files are incomplete
    2. DST/...            all other files, several at a time
    3. marker files       `commit_success.txt`, `.metadata`, `config.json`; `config.toml` of a run

Readers look for the marker files, so an incomplete result is never taken for a complete one. Files
at a destination without `.unfinished` belong to somebody else and are never changed.
"""

import dataclasses
import fnmatch
import tempfile
from collections.abc import Iterable
from pathlib import Path

from jaxforge.config.reading.load import load_config
from jaxforge.errors import UserError
from jaxforge.storage import COMMITTED, buckets, files, run_lock, trust
from torch_compat.checkpoint import hf_config, hf_state, hf_tokenizer
from torch_compat.convert import conversion
from torch_compat.convert.conversion import Advance, ConversionPlan
from torch_compat.convert.source import Request
from torch_compat.convert.to_jaxforge import config_for_run
from torch_compat.formats import safetensors
from torch_compat.formats.dcp_reader import METADATA
from torch_compat.formats.staging import for_each

UNFINISHED = ".unfinished"

_MARKERS = (safetensors.INDEX, COMMITTED, f"pp*/{METADATA}", METADATA, hf_config.CONFIG)
_MAX_UPLOADS = 8  # concurrent uploads
_MAX_MEMORY = 1 << 30  # bytes of all concurrent uploads: each file is read into memory


def notes(request: Request) -> list[str]:
    """Return notes for the user of a conversion into a bucket."""
    notes_ = [
        f"the result is written to {tempfile.gettempdir()} before it is copied, and that disk must "
        "hold it once (TMPDIR selects another disk)"
    ]
    if request.to == "dcp":
        notes_.append(
            "a bucket has no links, so `latest` is not created: load the step by its path"
        )
    if request.to == "megatron":
        notes_.append("a bucket gets no tracker file: load the iteration by its path")
    return notes_


def run(request: Request, plan: ConversionPlan, advance: Advance) -> Path:
    """Run a conversion like `conversion.run`, for a destination in a bucket.

    Raises:
        UserError: the destination exists, or another process writes to it.
        StorageError: a write to the disk or the bucket fails.
    """
    destination = request.destination
    target = destination / plan.subdirectory
    with (
        run_lock.RunLock(destination) as lock,
        tempfile.TemporaryDirectory(prefix="jaxforge-") as scratch,
    ):
        lock.take()
        is_repeated = (target / UNFINISHED).exists()
        if not is_repeated and _keys(target):
            raise UserError(f"{target} already exists. Remove it or choose another destination")
        local = Path(scratch, destination.name)
        result = conversion.run(dataclasses.replace(request, destination=local), plan, advance)
        paths = set(_files(result))
        for name in (hf_tokenizer.TOKENIZER, hf_state.IMPORTED):
            if is_repeated or not (destination / name).is_dir():  # those of a run stay as they are
                paths.update(_files(local / name))
        # Before the first file, so that a repeated command knows the files as its own.
        (target / UNFINISHED).write_text("")
        # Leftovers of an interrupted conversion: markers first, so that no reader takes the others
        # for a complete result.
        for key in sorted(_keys(target) - {UNFINISHED}, key=lambda key: not _is_marker(key)):
            (target / key).unlink()
        markers = [path for pattern in _MARKERS for path in sorted(result.glob(pattern))]
        _put(paths - {*markers}, local, destination)
        # Another process may have taken the lock of this one, which it believed dead.
        lock.check()
        for path in markers:
            _put([path], local, destination)
        if (config := local / "config.toml").exists():  # the result is a run
            table = config_for_run(load_config(config, trusts=trust.never), destination)
            (destination / config.name).write_text(table.to_toml())
        # Last: from here on the result is complete, and another conversion refuses to overwrite it.
        (target / UNFINISHED).unlink()
    return target


def _put(paths: Iterable[Path], local: Path, remote: Path) -> None:
    """Copy files of a local directory to the same places of a remote one."""
    ordered = sorted(paths)
    largest = max((path.stat().st_size for path in ordered), default=0)
    n_uploads = max(1, min(_MAX_UPLOADS, _MAX_MEMORY // max(1, largest)))

    def put(path: Path) -> None:
        files.write(remote / path.relative_to(local).as_posix(), path.read_bytes())

    for_each(put, ordered, n_uploads)


def _files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def _is_marker(key: str) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in _MARKERS)


def _keys(target: Path) -> set[str]:
    return set(buckets.keys(str(target))) - {run_lock.NAME}
