"""What a checkpoint holds, without a config and without reading its tensors."""

import math
from typing import Any

from jaxforge import storage
from torch_compat import dcp_state, orbax_store, safetensors, train_state
from torch_compat.checkpoints import CheckpointRef
from torch_compat.families import FAMILIES
from torch_compat.hf_state import read_config
from torch_compat.lazy import LazyTensor
from torch_compat.optimizer_state import KINDS, settings_of


def inspect(found: CheckpointRef) -> dict[str, Any]:
    """Plain values: format, dialect, parameters, optimizer, step, and every tensor."""
    details = {"dcp": _dcp, "hf": _hf, "jaxforge": _jaxforge}[found.format](found)
    raw = found.raw()
    return {
        "path": str(found.directory),
        "format": found.format,
        **details,
        "bytes": sum(tensor.nbytes for tensor in raw.values()),
        "tensors": {name: _described(tensor) for name, tensor in raw.items()},
    }


def _dcp(found: CheckpointRef) -> dict[str, Any]:
    dcp = found.dcp()
    keys = dcp_state.sort_keys(dcp)
    fields = {field for state in keys.state.values() for field in state}
    kinds = [
        name for name, kind in KINDS.items()
        if set(kind.fields.values()) <= fields or (name == "muon" and "momentum_buffer" in fields)
    ]  # fmt: skip
    where = train_state.read_train_state(dcp)
    return {
        "dialect": keys.dialect.name if keys.dialect else None,
        "parameters": _count(keys.params.values()),
        "optimizer": kinds[0] if kinds else None,
        "optimizer fields": sorted(fields),
        "settings": settings_of(keys.groups),
        "place": {k: v for k, v in where._asdict().items() if v is not None},
        "other keys": keys.others,
    }


def _hf(found: CheckpointRef) -> dict[str, Any]:
    table, family = read_config(found.directory)
    tensors = safetensors.open_directory(found.directory).values()
    return {"dialect": FAMILIES[family].dialect.name, "parameters": _count(tensors), "model": table}


def _jaxforge(found: CheckpointRef) -> dict[str, Any]:
    checkpoint, config = orbax_store.open_orbax(storage.path(found.directory.path))
    return {
        "dialect": checkpoint.dialect,
        "parameters": _count(checkpoint.params.values()),
        "untrained": _count(checkpoint.model_state.values()),
        "optimizer": config.optimizer.name if checkpoint.moments else None,
        "optimizer fields": sorted([*(checkpoint.moments or {}), *checkpoint.scalars]),
        "place": checkpoint.progress.to_json() if checkpoint.progress else {},
    }


def _count(tensors: Any) -> int:  # noqa: ANN401 (any iterable of tensors)
    return sum(math.prod(tensor.shape) for tensor in tensors)


def _described(tensor: LazyTensor) -> dict[str, Any]:
    return {"dtype": tensor.dtype.name, "shape": list(tensor.shape), "chunks": tensor.chunks}
