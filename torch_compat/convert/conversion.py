"""Conversion of checkpoints between all formats: planned, then run.

Tensors are read and written a block at a time, without intermediate files. `upload` runs
conversions whose destination is in a bucket.
"""

import contextlib
import dataclasses
import gc
import importlib
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxforge.checkpoint.paths import check_path
from jaxforge.errors import UserError
from jaxforge.storage import urls
from jaxforge.storage.run_lock import RunLock
from torch_compat.convert import to_mindspeed
from torch_compat.convert.repeats import suspicions
from torch_compat.convert.source import Request, Source, open_source
from torch_compat.convert.to_dcp import DcpWriter
from torch_compat.convert.to_hf import HfWriter
from torch_compat.convert.to_jaxforge import RunWriter
from torch_compat.convert.to_megatron import MegatronWriter
from torch_compat.convert.to_peft import PeftWriter
from torch_compat.convert.to_torch_file import TorchFileWriter
from torch_compat.convert.writer import Writer
from torch_compat.formats.staging import naming_failure
from torch_compat.names.megatron import MEGATRON

Advance = Callable[[int], None]

WRITERS: Mapping[str, type[Writer]] = {
    "jaxforge": RunWriter,
    "dcp": DcpWriter,
    "pt": TorchFileWriter,
    "hf": HfWriter,
    "megatron": MegatronWriter,
    "peft": PeftWriter,
}
"""Format -> writer."""

_NOT_OPTIONS = ("source", "config", "overrides")  # the resolved config covers the last two


@dataclasses.dataclass(frozen=True)
class ConversionPlan:
    """Conversion that is ready to run.

    Attributes:
        summary: description in one line.
        notes: notes for the user.
        source: the opened source.
        subdirectory: directory to create in the destination; "" is the destination itself.
    """

    summary: str
    notes: tuple[str, ...]
    source: Source
    subdirectory: str


def _create_writer(request: Request, source: Source) -> Writer:
    """Return the writer for a request.

    Raises:
        UserError: the source has no counterpart in the format, or the dialect belongs to another.
    """
    formats = {MEGATRON.name: "megatron", to_mindspeed.NAME: "dcp"}
    required = formats.get(request.dialect or "", request.to)
    if request.to != required:
        raise UserError(f"--dialect {request.dialect}: it has its own format. Use --to {required}")
    is_mindspeed = request.dialect == to_mindspeed.NAME
    writer = to_mindspeed.MindSpeedWriter if is_mindspeed else WRITERS[request.to]
    return writer(request, source)


def plan(request: Request) -> ConversionPlan:
    """Open the source and check everything that can be checked without reading tensors.

    Raises:
        UserError: the source is damaged, does not match the config, or has no counterpart in the
            requested format.
    """
    if request.to == "jaxforge":
        check_path(request.destination)
    source = open_source(request)
    writer = _create_writer(request, source)
    start, size = str(source.ref), f"{writer.source.nbytes / 1e9:.3g} GB"
    if request.to == "jaxforge":
        dialect = source.checkpoint.dialect
        summary = f"{start} ({dialect}, {writer.label}, {size}) -> {request.destination}"
    else:
        summary = f"{start} -> {writer.path} ({writer.label}, {size})"
    notes = [*source.notes, *writer.notes()]
    if not urls.in_bucket(source.ref.directory.path):  # where each tensor would be a request
        notes += suspicions(source.checkpoint.params)
    return ConversionPlan(summary, tuple(notes), source, writer.subdirectory)


def run(request: Request, plan: ConversionPlan, advance: Advance) -> Path:
    """Write the result and return its path.

    Raises:
        UserError: the destination exists, another conversion writes to it, or the source changes.
        StorageError: the destination cannot be written; the same command resumes the conversion.
    """
    is_run = request.to == "jaxforge"
    # A run may be in training: the lock keeps two writers of checkpoints apart.
    lock_of_run = RunLock(request.destination) if is_run else contextlib.nullcontext()
    with contextlib.closing(plan.source), lock_of_run as lock:
        if lock:
            lock.take()
        writer = _create_writer(request, plan.source)
        with writer.stage(identity(request, plan.source)) as staging:
            with ThreadPoolExecutor(1) as background:
                if is_run:  # takes less time than writing the tensors
                    background.submit(_load_orbax)
                staging.write(writer.units, advance)
            results = staging.results(writer.units)
            with naming_failure(staging.destination):
                writer.complete(results)
            # Last: a file that changes from here on has been read already.
            plan.source.check_unchanged()
            writer.commit()
        return staging.destination


def identity(request: Request, source: Source) -> dict[str, Any]:
    """Return JSON that identifies a conversion: equal when it is repeated, and in no other one.

    A command resumes an interrupted conversion of the same identity. It covers the source files by
    size, time and inode, the config with all defaults and overrides, and the requested options.
    """
    # All fields by default: an option that is forgotten here would mix two results.
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
    """Import Orbax while other threads write tensors.

    Writing threads need the interpreter often and briefly. With the default switch interval they
    wait for five milliseconds each time: 3.6 s for 4 GB instead of 3.3 s.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.0002)
    try:
        importlib.import_module("torch_compat.checkpoint.orbax_commit")
    finally:
        sys.setswitchinterval(interval)
    gc.freeze()  # a collection over the imported modules takes a third of a second, also at exit
