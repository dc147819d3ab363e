"""Warnings about allowed but unlikely settings: absent data, small disks.

What a config tells by itself is in `config.ineffective_settings`.
"""

import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxforge.cli.suggestions import path_hint
from jaxforge.config.axes import data_parallel
from jaxforge.config.job import JobConfig, shown
from jaxforge.config.problems import said
from jaxforge.config.rules import mesh_shape
from jaxforge.data.epoch import sequences_per_epoch
from jaxforge.data.sources import open_training_data
from jaxforge.parallel.device_memory import gigabytes
from jaxforge.program import Program
from jaxforge.storage import urls


def warnings(config: JobConfig, n_devices: int) -> Iterator[str]:
    """One sentence each, with the keys to look at.

    Args:
        config: that `rules.check` has passed.
        n_devices: of the whole job.

    Raises:
        UserError: the training data are here, and damaged or of another vocabulary.
    """
    yield from data(config, n_devices)
    yield from disk(config)


def data(config: JobConfig, n_devices: int) -> Iterator[str]:
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
    elif length and (epochs := _sequences(config, dp) / length) > 1:
        yield (
            f"train.max_steps = {config.train.max_steps:,} is {epochs:.3g} epochs of "
            f"{length:,} sequences"
        )


def missing_data_warnings(config: JobConfig) -> Iterator[str]:
    """Training data that are elsewhere."""
    for key, path in _paths(config).items():
        if urls.in_bucket(path) or not Path(path).exists():
            hint = path_hint(path, '"')
            yield f"{key} = {shown(path)} is not on this machine: not looked at{hint}"


def _paths(config: JobConfig) -> dict[str, str]:
    """Directories of training data by the keys that name them."""
    section = config.data
    paths = {"data.dataset_path": section.dataset_path} | {
        f"data.datasets[{i}].path": source.path for i, source in enumerate(section.datasets)
    }
    return {key: path for key, path in paths.items() if path}


def _sequences(config: JobConfig, dp: int) -> int:
    """Return the sequences of the whole run, as if batches were always full."""
    train = config.train
    return train.max_steps * train.microbatch_size(dp) * train.grad_accum_steps


def disk(config: JobConfig) -> Iterator[str]:
    """Yield warnings about the disk space for retained checkpoints."""
    directory = config.checkpoint.dir
    if urls.in_bucket(directory):
        return
    size, n_kept = checkpoint_bytes(config), kept_checkpoints(config)
    here = next(
        p for p in (Path(directory).absolute(), *Path(directory).absolute().parents) if p.exists()
    )
    free = shutil.disk_usage(here).free
    if size * (n_kept + 1) > free:
        room = free // size - 1 - config.checkpoint.keep_best_n
        fewer = [said({"checkpoint.keep_last_n": room})] if room > 0 else []
        yield (
            f"checkpoint.keep_last_n = {config.checkpoint.keep_last_n}: {n_kept:,} checkpoints of "
            f"{gigabytes(size)} and one being written need {gigabytes(size * (n_kept + 1))}, and "
            f"checkpoint.dir = {shown(directory)} has {gigabytes(free)} on {here}: change "
            f"{' or '.join([*fewer, 'checkpoint.dir'])}"
        )


def checkpoint_bytes(config: JobConfig) -> int:
    """Return the bytes of parameters and optimizer state."""
    state = Program.without_devices(config).shapes
    leaves = jax.tree.leaves((state.params, state.opt_state))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def kept_checkpoints(config: JobConfig) -> int:
    """Return the number of checkpoints on disk at the end of the run."""
    n_saves = max(1, math.ceil(config.train.max_steps / config.checkpoint.interval))
    last = config.checkpoint.keep_last_n
    return min(n_saves, last + config.checkpoint.keep_best_n) if last > 0 else n_saves
