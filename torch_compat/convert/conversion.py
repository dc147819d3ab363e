"""Conversions of a checkpoint of any format to any format: each is planned, then run in shares.

Tensors flow from the source to the result, a block at a time: nothing lies in between. The
destination may be in a bucket; `upload` runs such a conversion.
"""

import contextlib
import dataclasses
import gc
import importlib
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxforge.checkpoint.paths import check_path
from jaxforge.storage.run_lock import RunLock
from torch_compat.convert.source import Request, Source, open_source
from torch_compat.convert.writers import WRITERS
from torch_compat.formats.staging import naming_failure
from torch_compat.formats.workers import Share, Workers

Advance = Callable[[int], None]

_NOT_OPTIONS = ("source", "config", "overrides")  # the two latter are in the resolved config


@dataclasses.dataclass(frozen=True)
class ConversionPlan:
    """A conversion that can be run.

    Attributes:
        summary: what it does, in a line.
        notes: what the user should know.
        source: the opened source.
        within: the directory in the destination that is made; "" is the destination itself.
    """

    summary: str
    notes: tuple[str, ...]
    source: Source
    subdirectory: str


def plan(request: Request) -> ConversionPlan:
    """Open the source and check everything that can be checked without reading tensors.

    Raises:
        UserError: it is damaged, not of the config, or has no counterpart in the format asked for.
    """
    if request.to == "jaxforge":
        check_path(request.destination)
    source = open_source(request)
    writer = WRITERS[request.to](request, source)
    start, size = str(source.ref), f"{source.nbytes / 1e9:.3g} GB"
    if request.to == "jaxforge":
        dialect = source.checkpoint.dialect
        summary = f"{start} ({dialect}, {writer.label}, {size}) -> {request.destination}"
    else:
        summary = f"{start} -> {writer.path} ({writer.label}, {size})"
    return ConversionPlan(summary, (*source.notes, *writer.notes()), source, writer.subdirectory)


def run(
    request: Request, plan: ConversionPlan, share: Share, advance: Advance, workers: Workers
) -> Path | None:
    """Write a share of the result; process 0 waits for the others, and commits.

    Returns:
        What was made, from process 0.

    Raises:
        UserError: the destination is there, another conversion writes to it, or the source changes.
        StorageError: the destination cannot be written; the same command goes on.
    """
    is_run, is_first = request.to == "jaxforge", not share.process
    with RunLock(request.destination) if is_run else contextlib.nullcontext() as lock:
        if lock and is_first:
            lock.take()
        writer = WRITERS[request.to](request, plan.source)
        with writer.stage(identity(request, plan.source), share) as staging:
            workers.start()
            with ThreadPoolExecutor(1) as beside:
                if is_run and is_first:  # the disk is busy for longer than this takes
                    beside.submit(_load_orbax)
                staging.write(writer.units, advance)
            if not is_first:
                return None
            results = staging.results(writer.units, workers.check)
            with naming_failure(staging.destination):
                writer.complete(results)
            plan.source.check_unchanged()
            writer.commit()
        return staging.destination


def identity(request: Request, source: Source) -> dict[str, Any]:
    """Return JSON that is the same in every process of a conversion, and in no other conversion.

    A command goes on with another's pieces if this is the same: the files of the source by size,
    time and inode, the config with every default and override in it, and what the user asks for.
    """
    names = [f.name for f in dataclasses.fields(request) if f.name not in _NOT_OPTIONS]
    progress = source.progress
    return {
        "source": str(source.ref),
        "files": source.files,
        "config": source.target.config.model_dump(mode="json"),
        "options": {name: str(getattr(request, name)) for name in names},
        "progress": [progress.step, progress.samples, progress.tokens],
    }


def _load_orbax() -> None:
    """Import Orbax next to writing threads, which need the interpreter only briefly.

    They would wait for five milliseconds each time: 3.6 s for 4 GB, instead of 3.3.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.0002)
    try:
        importlib.import_module("torch_compat.checkpoint.orbax_commit")
    finally:
        sys.setswitchinterval(interval)
    gc.freeze()  # to look through what was loaded takes a third of a second, when Python ends too
