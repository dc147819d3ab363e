"""What a conversion is of. A run of the command goes on with another's pieces if this is the same.

The files of the source by size, time and inode, the config with every default and override in it,
and what the user asked for.
"""

import dataclasses
import os
import posixpath
from pathlib import Path
from typing import Any

from jaxforge.errors import UserError
from jaxforge.storage import urls
from torch_compat.checkpoint import hf_state, orbax_store, train_state
from torch_compat.checkpoint.checkpoints import CheckpointRef
from torch_compat.checkpoint.state import AbstractTarget, CheckpointState
from torch_compat.formats import dcp_reader
from torch_compat.formats.files import Directory

_NOT_OPTIONS = ("source", "config", "overrides")  # the two latter are in the resolved config


def files_of(found: CheckpointRef) -> dict[str, dict[str, str]]:
    """Directory -> file -> what changes when the file does, of all files that are converted."""
    try:
        return _files_of(found)
    except FileNotFoundError:
        return {}  # it is just being removed


def _files_of(found: CheckpointRef) -> dict[str, dict[str, str]]:
    if found.format == "jaxforge" and urls.in_bucket(found.directory.path):
        from jaxforge.storage import buckets  # here, as its clients take a second to import

        return {found.directory.path: buckets.stamps(found.directory.path)}
    if found.format == "jaxforge":
        step = Path(found.directory.path)
        roots = [step / "state", step / "config", orbax_store.run_of(step) / "tokenizer"]
        every = [Directory(d) for root in roots for d, _, _ in os.walk(root)]
    elif found.format == "dcp":
        beside = found.directory / posixpath.dirname(train_state.EXTRA_STATE)
        every = [found.directory, *dcp_reader.parts(found.directory), beside]
    else:
        stamps = found.directory.stamps().items()
        return {str(found.directory): {n: s for n, s in stamps if hf_state.is_read(n)}}
    return {str(directory): directory.stamps() for directory in every}


def check_unchanged(found: CheckpointRef, files: dict[str, dict[str, str]]) -> None:
    """Looks whether the files are those that a conversion began with.

    Raises:
        UserError: some were replaced, came or went.
    """
    if files_of(found) != files:
        raise UserError(
            f"{found.directory} changed while it was converted: nothing is there under the name of "
            "the result; run the same command again when the source is at rest"
        )


def identity(
    job: Any,  # noqa: ANN401 (any dataclass)
    files: dict[str, Any],
    checkpoint: CheckpointState,
    target: AbstractTarget,
) -> dict[str, Any]:
    """JSON that is the same in every process of one conversion, and in no other conversion.

    Args:
        job: the conversion; what it has but its source and config are options.
        files: of its source, from before it was opened.
        checkpoint: what the source holds.
        target: what the config declares.
    """
    names = [f.name for f in dataclasses.fields(job) if f.name not in _NOT_OPTIONS]
    progress = checkpoint.progress
    return {
        "job": type(job).__name__,
        "source": str(job.source.directory),
        "files": files,
        "config": target.config.model_dump(mode="json"),
        "options": {name: str(getattr(job, name)) for name in names},
        "progress": progress and [progress.step, progress.samples, progress.tokens],
    }
