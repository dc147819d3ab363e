"""Trained runs of a tiny model, and comparisons of their values."""

import functools
import shutil
import tempfile
from pathlib import Path

import numpy as np

from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.config.job import JobConfig
from jaxforge.state.progress import Progress
from tests.conftest import tiny_config
from tests.helpers import setup, underway
from torch_compat.checkpoint import orbax_store


def trained(directory, steps=2, **sections):
    """A run directory after a few steps, and its config."""
    result = run_of(tiny_config(**sections).model_dump_json(), steps)
    shutil.copytree(result.name, directory, dirs_exist_ok=True)
    return directory / "config.toml"


@functools.cache
def run_of(config, steps):
    """The directory, made once for all that are alike."""
    result = tempfile.TemporaryDirectory()
    native = setup(JobConfig.model_validate_json(config))
    saved(Path(result.name), native, underway(native, steps), steps)
    return result


def saved(directory, native, state, steps):
    """The config of a run directory with this state."""
    checkpoints = Checkpoints(
        directory,
        native.config.checkpoint,
        native.model.axes,
        native.config.model_dump(mode="json"),
    )
    checkpoints.save(Progress(step=steps, samples=8 * steps, tokens=256 * steps), state)
    checkpoints.close()
    (directory / "config.toml").write_text(native.config.to_toml())
    return directory / "config.toml"


def values(run):
    checkpoint, _ = orbax_store.open_orbax(run)
    return {name: tensor.all() for name, tensor in checkpoint.tensors()} | checkpoint.scalars


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)
