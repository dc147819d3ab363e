"""The end of an import: Orbax makes a checkpoint of the arrays that lie staged."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxforge.checkpoint import layout
from jaxforge.checkpoint.checksums import Checksums
from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.config.checkpoint import CheckpointConfig
from jaxforge.config.job import JobConfig
from jaxforge.state.guard_state import GuardState
from jaxforge.state.progress import Progress
from torch_compat.checkpoint.state import CheckpointState
from torch_compat.checkpoint.training_state import program_of
from torch_compat.formats.files import link, sync
from torch_compat.formats.lazy import LazyTensor


def scalars(checkpoint: CheckpointState) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint that are neither parameters nor moments, by name."""
    assert checkpoint.progress is not None
    assert checkpoint.guard.keys() <= set(GuardState._fields)
    guard = GuardState.fresh(checkpoint.progress.skipped).arrays() | dict(checkpoint.guard)
    return {
        "step": np.asarray(checkpoint.progress.step, np.int32),
        **{f"optimizer.{name}": np.asarray(value) for name, value in checkpoint.scalars.items()},
        **{f"guard.{name}": np.asarray(value) for name, value in guard.items()},
    }


def names(state: Path) -> set[str]:
    """Return the names of all arrays of a checkpoint, as Orbax finds them."""
    return set(flatten_dict(ocp.PyTreeCheckpointHandler().metadata(state).tree, sep="."))


def commit(
    progress: Progress,
    config: JobConfig,
    run: Path,
    store: Path,
    arrays: Mapping[str, LazyTensor],
    checksums: Checksums,
) -> None:
    """Commit the checkpoint.

    Args:
        progress: where the run stands.
        config: the config that goes next to the arrays.
        run: the run directory.
        store: the database in which the arrays are staged.
        arrays: all of them, by name.
        checksums: of all of them, by name.
    """
    tree = {name: _Staged(store, a.shape, a.dtype) for name, a in arrays.items()}
    nested = {"optimizer": {}, **unflatten_dict(tree, sep=".")}
    program = program_of(config)
    like = program.shapes
    if not nested["optimizer"]:
        like = dataclasses.replace(like, opt_state=())
    checkpoints = Checkpoints(
        run,
        CheckpointConfig(async_mode="disabled", keep_last_n=0),
        program.model.axes,
        config.model_dump(mode="json"),
        arrays=ocp.PyTreeCheckpointHandler(
            type_handler_registry=ocp.type_handlers.create_type_handler_registry(
                (_Staged, _StagedHandler())
            )
        ),
        begin_checksums=lambda _: lambda: checksums,
    )
    checkpoints.save(progress, layout.from_tree(nested, like))
    checkpoints.close()


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
        store = values[0].store
        target = Path(infos[0].parent_dir) / store.name
        for directory, _, files in os.walk(store):
            path = target / Path(directory).relative_to(store)
            path.mkdir(parents=True, exist_ok=True)
            for name in files:
                if not (path / name).exists():
                    link(Path(directory, name), path / name)
            sync(path)
        return []
