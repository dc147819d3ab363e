"""Warnings about valid but unlikely settings: absent data, small disks.

`config.ineffective_settings` has the warnings that follow from the config alone.
"""

import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxforge.checkpoint.layout import stored_params
from jaxforge.cli.suggestions import path_hint
from jaxforge.config.axes import data_parallel
from jaxforge.config.job import JobConfig, short_toml
from jaxforge.config.model import ModelConfig
from jaxforge.config.rules import mesh_shape
from jaxforge.data.foreign_layouts import is_prefix
from jaxforge.data.sources import open_training_data, sequences_per_epoch
from jaxforge.errors import UserError
from jaxforge.parallel.device_memory import gigabytes
from jaxforge.program import Program
from jaxforge.storage import urls
from jaxforge.training.frozen import teacher_model
from jaxforge.training.summary import epoch_rounding


def warnings(config: JobConfig, n_devices: int) -> Iterator[str]:
    """Yield one sentence per warning, with the keys concerned.

    Args:
        config: a config that `rules.check` has passed.
        n_devices: number of devices of the whole job.

    Raises:
        UserError: the training data exist but are damaged or have another vocabulary.
    """
    yield from _data_warnings(config, n_devices)
    yield from disk_warnings(config)


def _data_warnings(config: JobConfig, n_devices: int) -> Iterator[str]:
    """Yield warnings about the source of the tokens, and about repeated epochs."""
    missing = list(missing_data_warnings(config))
    yield from missing
    if missing or not _paths(config):
        return
    dataset = open_training_data(config)
    dp = data_parallel(mesh_shape(config, n_devices))
    rows = config.train.microbatch_size(dp)
    length = sequences_per_epoch(config, rows, dataset)
    if length == 0:
        yield f"the training data have fewer sequences than a microbatch of {rows:,}"
    elif length:
        per_update = rows * config.train.grad_accum_steps  # as if batches were always full
        if (epochs := config.train.max_steps * per_update / length) > 1:
            yield (
                f"train.max_steps = {config.train.max_steps:,} is {epochs:.3g} epochs of "
                f"{length:,} sequences{epoch_rounding(length, per_update)}"
            )


def missing_data_warnings(config: JobConfig) -> Iterator[str]:
    """Yield a warning for each directory of training data that this machine does not have."""
    for key, path in _paths(config).items():
        if urls.in_bucket(path) or not (Path(path).exists() or is_prefix(Path(path))):
            hint = path_hint(path, '"')
            yield f"{key} = {short_toml(path)} is not on this machine: not checked{hint}"


def known_teacher(config: JobConfig, *, is_elsewhere: bool) -> tuple[ModelConfig | None, list[str]]:
    """Return the `[model]` section of the teacher, and a warning if its size is not known.

    Args:
        config: the config.
        is_elsewhere: the run is planned for another machine, which may have the teacher.

    Raises:
        UserError: the teacher cannot be read, and the run is planned for this machine.
    """
    path = config.distillation.teacher
    try:
        return teacher_model(config), []
    except UserError:
        if path is None or not is_elsewhere or Path(path).exists():
            raise
    shown = short_toml(path)
    return None, [
        f"distillation.teacher = {shown} is not on this machine: its memory is not counted"
    ]


def _paths(config: JobConfig) -> dict[str, str]:
    """Return the directories of training data by config key."""
    section = config.data
    paths = {"data.dataset_path": section.dataset_path} | {
        f"data.datasets[{i}].path": source.path for i, source in enumerate(section.datasets)
    }
    if config.train.objective == "distillation" and config.distillation.logits:
        paths["distillation.logits"] = config.distillation.logits
    return {key: path for key, path in paths.items() if path}


def disk_warnings(config: JobConfig) -> Iterator[str]:
    """Yield warnings about the disk space for retained checkpoints."""
    directory = config.checkpoint.dir
    if urls.in_bucket(directory):
        return
    size, n_kept = checkpoint_bytes(config), kept_checkpoints(config)
    path = Path(directory).absolute()
    # The run directory may not exist yet: ask the file system of its nearest parent.
    existing = next(p for p in (path, *path.parents) if p.exists())
    free = shutil.disk_usage(existing).free
    # A save is complete before the oldest checkpoint is removed: one more must fit.
    if size * (n_kept + 1) > free:
        room = free // size - 1 - config.checkpoint.keep_best_n
        fewer = [f"checkpoint.keep_last_n to {room}"] if room > 0 else []
        yield (
            f"checkpoint.keep_last_n = {config.checkpoint.keep_last_n}: {n_kept:,} checkpoints of "
            f"{gigabytes(size)} and one being written need {gigabytes(size * (n_kept + 1))}, and "
            f"checkpoint.dir = {short_toml(directory)} has {gigabytes(free)} on {existing}: change "
            f"{' or '.join([*fewer, 'checkpoint.dir'])}"
        )


def checkpoint_bytes(config: JobConfig) -> int:
    """Return the bytes of parameters, their average and optimizer state."""
    state = Program.without_devices(config).shapes
    leaves = jax.tree.leaves((stored_params(state.params), state.opt_state, state.ema))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def kept_checkpoints(config: JobConfig) -> int:
    """Return the number of checkpoints on disk at the end of the run."""
    n_saves = max(1, math.ceil(config.train.max_steps / config.checkpoint.interval))
    last = config.checkpoint.keep_last_n
    return min(n_saves, last + config.checkpoint.keep_best_n) if last > 0 else n_saves
