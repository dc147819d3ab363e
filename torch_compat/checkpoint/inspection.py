"""Inspection of a checkpoint without a config and without reading its tensors."""

import math
from collections.abc import Mapping
from typing import Any

from jaxforge.storage import urls
from torch_compat.checkpoint import adapters, dcp_state, hf_state, orbax_store, train_state
from torch_compat.checkpoint.checkpoints import CheckpointRef
from torch_compat.checkpoint.hf_state import read_config
from torch_compat.checkpoint.optimizer_state import LAYOUTS, common_settings
from torch_compat.families import FAMILIES
from torch_compat.formats.lazy import LazyTensor

Tensors = Mapping[str, LazyTensor]


def inspect(reference: CheckpointRef) -> dict[str, Any]:
    """Return a report as plain values: format, dialect, parameters, optimizer, step, tensors."""
    details, raw = _READERS[reference.format](reference)
    return {
        "path": str(reference),
        "format": reference.format,
        **details,
        "bytes": sum(tensor.nbytes for tensor in raw.values()),
        "tensors": {
            name: {"dtype": t.dtype.name, "shape": list(t.shape), "chunks": t.chunks}
            for name, t in raw.items()
        },
    }


def as_text(report: Mapping[str, Any]) -> str:
    """Return a report as text: one line per entry, and a table of the tensors."""
    lines = [f"{key}: {value}" for key, value in report.items() if key != "tensors"]
    rows = [("tensor", "dtype", "shape", "chunks")]
    rows += [
        (name, tensor["dtype"], str(tensor["shape"]), str(tensor["chunks"]))
        for name, tensor in report["tensors"].items()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join([*lines, "", *padded])


def _dcp(reference: CheckpointRef) -> tuple[dict[str, Any], Tensors]:
    dcp = reference.dcp()
    keys = dcp_state.sort_keys(dcp)
    fields = {field for state in keys.state.values() for field in state}
    kinds = [
        name for name, kind in LAYOUTS.items()
        # KempnerForge saves only `momentum_buffer` of Muon.
        if set(kind.fields.values()) <= fields or (name == "muon" and "momentum_buffer" in fields)
    ]  # fmt: skip
    where = train_state.read_train_state(dcp)
    return {
        "dialect": keys.dialect.name if keys.dialect else None,
        "parameters": _count(keys.params.values()),
        "optimizer": kinds[0] if kinds else None,
        "optimizer fields": sorted(fields),
        "settings": common_settings(keys.groups),
        "place": {k: v for k, v in where._asdict().items() if v is not None},
        "other keys": keys.unassigned,
    }, dcp.tensors


def _hf(reference: CheckpointRef) -> tuple[dict[str, Any], Tensors]:
    table, family = read_config(reference.directory)
    tensors = hf_state.tensors(reference.directory)
    details: dict[str, Any] = {"dialect": FAMILIES[family].dialect.name}
    original = hf_state.open_original(reference.directory)
    text = original.parts.text if original else tensors
    details |= {"parameters": _count(text.values()), "model": table}
    return details | ({"notes": original.notes()} if original else {}), tensors


def _jaxforge(reference: CheckpointRef) -> tuple[dict[str, Any], Tensors]:
    checkpoint, config = orbax_store.open_orbax(urls.path(reference.directory.path))
    return {
        "dialect": checkpoint.dialect,
        "parameters": _count(checkpoint.params.values()),
        "untrained": _count(checkpoint.model_state.values()),
        "optimizer": config.optimizer.name if checkpoint.moments else None,
        "optimizer fields": sorted([*(checkpoint.moments or {}), *checkpoint.scalars]),
        "place": checkpoint.progress.to_json() if checkpoint.progress else {},
    }, dict(checkpoint.tensors())


def _peft(reference: CheckpointRef) -> tuple[dict[str, Any], Tensors]:
    config, tensors = adapters.read_config(reference.directory), reference.raw()
    return {
        "dialect": "peft",
        "parameters": _count(tensors.values()),
        "base": config.base,
        "scale": config.scale,
    }, tensors


_READERS = {"peft": _peft, "dcp": _dcp, "pt": _dcp, "hf": _hf, "jaxforge": _jaxforge}


def _count(tensors: Any) -> int:  # noqa: ANN401 (any iterable of tensors)
    return sum(math.prod(tensor.shape) for tensor in tensors)
