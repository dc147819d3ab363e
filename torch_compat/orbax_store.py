"""jaxforge's own checkpoints, read and written in pieces.

Orbax reads and writes whole leaves, and a leaf holds all layers. The arrays are therefore reached
through tensorstore, in the format that Orbax keeps them in (zarr in OCDBT); what is around them
(structure, metadata, commit) is Orbax's own work.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxforge.checkpoint import layout
from jaxforge.checkpoint.find import find
from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.config.checkpoint import CheckpointConfig
from jaxforge.config.job import JobConfig
from jaxforge.config.load import make_config
from jaxforge.errors import UserError
from jaxforge.training.guard import GuardState
from jaxforge.training.progress import Progress
from torch_compat.lazy import Index, Lazy, blocks, extent, of_array, whole
from torch_compat.staging import Share, Staging, Unit
from torch_compat.state import Held, Wanted, stacked, unstacked

_CHUNK = 32 << 20  # bytes of a chunk at most: what a restore reads at a time


def run_of(path: Path) -> Path:
    """The run directory of a checkpoint."""
    return find(path)[0]


def open_orbax(path: Path) -> tuple[Held, JobConfig]:
    """The newest checkpoint of a run, or the one that is named, and the config stored in it.

    Raises:
        UserError: there is none, it is damaged, or its config is not valid here: a plugin of it is
            not to be found, say.
    """
    run, step = find(path)
    directory = run / "checkpoints" / f"step_{step}"
    try:
        values = dict(json.loads((directory / "config/metadata").read_text()))
        progress = json.loads((directory / "progress/metadata").read_text())
        metadata = ocp.PyTreeCheckpointHandler().metadata(directory / "state").tree
        leaves = {
            name: _open_leaf(directory / "state", name) for name in flatten_dict(metadata, sep=".")
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{directory} is damaged ({str(error)[:160]})") from error
    config = make_config(values, source=str(directory / "config/metadata"))
    params: dict[str, Lazy] = {}
    moments: dict[str, dict[str, Lazy]] = {}
    scalars, guard = {}, {}
    for name, leaf in leaves.items():
        section, _, rest = name.partition(".")
        if section == "params":
            params |= unstacked(rest, leaf)
        elif section == "optimizer" and "." in rest:
            field, _, parameter = rest.partition(".")
            moments.setdefault(field, {}).update(unstacked(parameter, leaf))
        elif section == "optimizer":
            scalars[rest] = leaf.all()
        elif section == "guard":
            guard[rest] = leaf.all()
    held = Held(params, moments or None, scalars, Progress.from_json(progress), guard)
    return held, config


def stage(
    held: Held, wanted: Wanted, run: Path, plan: dict[str, Any], share: Share, block: int
) -> "Import":
    """Begins a checkpoint of a run.

    Args:
        held: what to write; every parameter and moment that is wanted.
        wanted: what the config declares.
        run: the run directory.
        plan: names the conversion, to go on with one that was stopped.
        share: which of several processes this one is.
        block: bytes that may be in memory at a time.
    """
    assert held.progress is not None
    destination = run.absolute() / "checkpoints" / f"step_{held.progress.step}"
    return Import(held, wanted, run, Staging(destination, plan, share), block)


class Import:
    """A checkpoint in the making: `units` to write, then `commit`."""

    def __init__(self, held: Held, wanted: Wanted, run: Path, staging: Staging, block: int) -> None:
        self.staging = staging
        self._held, self._wanted, self._run = held, wanted, run
        self._leaves = _leaves(held)
        self._store = self.staging.path / f"ocdbt.process_{staging.share.process}"
        for stale in self._store.rglob("*.__lock"):
            stale.unlink()  # left by a kill, it would lend its end to what is written next
        self._block = min(block, _CHUNK)
        self.units = [
            Unit(f"{name}-{'-'.join(str(s.start) for s in index)}", _bytes(leaf, index), write)
            for name, leaf in self._leaves.items()
            for index in _blocks(leaf, self._block)
            for write in [lambda name=name, leaf=leaf, index=index: self._write(name, leaf, index)]
        ]

    def _write(self, name: str, leaf: Lazy, index: Index) -> None:
        # A block is a chunk: two processes that wrote parts of one would lose either's.
        chunk = extent(_blocks(leaf, self._block)[0])
        array = _create_leaf(self._store, name, leaf, chunk)
        array[index].write(np.asarray(leaf.read(index), order="C")).result()

    def commit(self) -> None:
        """Lets Orbax make a checkpoint of what was staged."""
        tree = {
            name: _Staged(self.staging.path, leaf.shape, leaf.dtype)
            for name, leaf in self._leaves.items()
        }
        nested = {"optimizer": {}, **unflatten_dict(tree, sep=".")}
        like = self._wanted.state
        if not nested["optimizer"]:
            like = dataclasses.replace(like, opt_state=())
        state = layout.from_tree(nested, like)
        registry = ocp.type_handlers.create_type_handler_registry((_Staged, _StagedHandler()))
        checkpoints = Checkpoints(
            self._run,
            CheckpointConfig(async_mode="disabled", keep_last_n=0),
            self._wanted.model.axes,
            self._wanted.config.model_dump(mode="json"),
            arrays=ocp.PyTreeCheckpointHandler(type_handler_registry=registry),
        )
        assert self._held.progress is not None
        checkpoints.save(self._held.progress, state)
        checkpoints.close()
        self.staging.discard()


class _Staged:
    """An array whose data were written beforehand."""

    def __init__(self, store: Path, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.store, self.shape, self.dtype = store, shape, dtype
        self.ndim, self.size = len(shape), int(np.prod(shape, dtype=np.int64))
        self.nbytes = self.size * dtype.itemsize


class _StagedHandler(ocp.type_handlers.NumpyHandler):
    """Brings staged data in as if it had written them; links, so that a crash loses nothing."""

    async def serialize(
        self,
        values: Sequence[_Staged],
        infos: Sequence[ocp.type_handlers.ParamInfo],
        args: Sequence[ocp.SaveArgs] | None = None,
    ) -> list[Any]:
        await infos[0].await_path_creation()
        for store in values[0].store.glob("ocdbt.process_*"):
            target = Path(infos[0].parent_dir) / store.name
            if not target.exists():
                shutil.copytree(store, target, copy_function=os.link)
        return []


def _leaves(held: Held) -> dict[str, Lazy]:
    assert held.progress is not None
    skipped = held.progress.skipped
    guard = GuardState.fresh(skipped)._asdict() | dict(held.guard)
    assert guard.keys() == set(GuardState._fields)
    scalars = {
        "step": np.int32(held.progress.step),
        **{f"optimizer.{name}": value for name, value in held.scalars.items()},
        **{f"guard.{name}": np.asarray(value) for name, value in guard.items()},
    }
    leaves = {name: of_array(np.asarray(value)) for name, value in scalars.items()}
    leaves |= {f"params.{name}": tensor for name, tensor in stacked(held.params).items()}
    for field, tensors in (held.moments or {}).items():
        leaves |= {f"optimizer.{field}.{name}": t for name, t in stacked(tensors).items()}
    return leaves


def _blocks(leaf: Lazy, limit: int) -> list[Index]:
    """One layer or less at a time."""
    if len(leaf.shape) < 2:
        return [whole(leaf.shape)]
    if len(leaf.shape) < 3:
        return list(blocks(leaf.shape, leaf.dtype.itemsize, limit))
    within = list(blocks(leaf.shape[1:], leaf.dtype.itemsize, limit))
    return [(slice(i, i + 1), *index) for i in range(leaf.shape[0]) for index in within]


def _bytes(leaf: Lazy, index: Index) -> int:
    return int(np.prod(extent(index), dtype=np.int64)) * leaf.dtype.itemsize


def _create_leaf(store: Path, name: str, leaf: Lazy, chunk: tuple[int, ...]) -> ts.TensorStore:
    spec = {
        **_spec(store, name),
        "metadata": {
            "shape": list(leaf.shape),
            "chunks": [max(1, n) for n in chunk],
            "dtype": _zarr_dtype(leaf.dtype),
            "compressor": None,
        },
    }
    return ts.open(spec, create=True, open=True).result()


def _zarr_dtype(dtype: np.dtype) -> str:
    return dtype.name if dtype.kind == "V" else dtype.newbyteorder("<").str


def _open_leaf(store: Path, name: str) -> Lazy:
    array = ts.open(_spec(store, name), open=True, read=True).result()

    def read(index: Index) -> np.ndarray:
        return array[index].read().result()

    shape, dtype = tuple(array.shape), np.dtype(array.dtype.numpy_dtype)
    return Lazy(shape, dtype, read, f"{store}: {name}")


def _spec(store: Path, name: str) -> dict[str, Any]:
    kvstore = {"driver": "ocdbt", "base": f"file://{store}", "path": f"{name}/"}
    return {"driver": "zarr", "kvstore": kvstore}
