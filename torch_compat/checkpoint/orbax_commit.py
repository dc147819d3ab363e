"""Last phase of an import: Orbax commits the staged arrays as a checkpoint."""

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
from jaxforge.checkpoint.paths import EMA
from jaxforge.config.checkpoint import CheckpointConfig
from jaxforge.config.job import JobConfig
from jaxforge.state.progress import Progress
from jaxforge.state.train_state import GuardState
from torch_compat.checkpoint.state import CheckpointState
from torch_compat.checkpoint.training_state import program_of
from torch_compat.formats.files import link, sync
from torch_compat.formats.lazy import LazyTensor


def scalars(checkpoint: CheckpointState) -> dict[str, np.ndarray]:
    """Return the arrays of a checkpoint that are neither parameters nor moments, by name."""
    assert checkpoint.progress is not None
    assert checkpoint.guard.keys() <= set(GuardState._fields)
    guard = GuardState.fresh(checkpoint.progress.skipped).arrays() | dict(checkpoint.guard)
    return {
        "step": np.asarray(checkpoint.progress.step, np.int32),
        **{f"optimizer.{name}": np.asarray(value) for name, value in checkpoint.scalars.items()},
        **{f"guard.{name}": np.asarray(value) for name, value in guard.items()},
    }


def names(state: Path) -> set[str]:
    """Return the names of all arrays that Orbax lists in a checkpoint."""
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
        progress: progress of the run.
        config: config that is stored next to the arrays.
        run: run directory.
        store: database of the staged arrays.
        arrays: all arrays by name.
        checksums: checksums of all arrays by name.
    """
    tree = {name: _Staged(store, a.shape, a.dtype) for name, a in arrays.items()}
    nested = {"optimizer": {}, **unflatten_dict(tree, sep=".")}
    program = program_of(config)
    # The layout must be that of the staged arrays, which may lack average and optimizer.
    like = program.shapes if EMA in nested else dataclasses.replace(program.shapes, ema={})
    if not nested["optimizer"]:
        like = dataclasses.replace(like, opt_state=())
    checkpoints = Checkpoints(
        run,
        # keep_last_n = 0: the import removes no other checkpoint of the run.
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
    """Stand-in for an array whose data are already in the database."""

    def __init__(self, store: Path, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.store, self.shape, self.dtype = store, shape, dtype
        self.ndim, self.size = len(shape), int(np.prod(shape, dtype=np.int64))
        self.nbytes = self.size * dtype.itemsize


class _StagedHandler(ocp.type_handlers.NumpyHandler):
    """Orbax type handler that hard-links the staged files instead of writing arrays.

    The staged files stay complete, so that an import can be repeated after a crash.
    """

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
            # The links must be durable before Orbax renames the checkpoint to its final name.
            sync(path)
        return []
