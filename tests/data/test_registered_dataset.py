"""A training set of one's own."""

import jax
import numpy as np
import pytest

from jaxforge.config import load_unresolved
from jaxforge.config.data import DataConfig
from jaxforge.data.dataset import Dataset
from jaxforge.data.loader import training_batches
from jaxforge.data.packing import split_window
from jaxforge.data.sources import open_training_data, register_dataset, sequences_per_epoch
from jaxforge.parallel.mesh import make_mesh
from tests.conftest import tiny_config


class Counting:
    """Window i counts from i."""

    def __init__(self, window, n):
        self.window, self.n = window, n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return np.arange(index, index + self.window, dtype=np.int32)

    def batch(self, indices):
        return np.stack([self[i] for i in indices])


@pytest.fixture(autouse=True)
def counting(own_names):
    @register_dataset("counting")
    def build(config):
        return Dataset(Counting(config.train.seq_len + 1, 20), split_window)


def test_batches_come_from_the_registered_set():
    config = tiny_config(
        data={"dataset_type": "counting", "shuffle": False}, train={"batch_size": 4}
    )
    mesh = make_mesh(config, jax.devices()[:1])
    batches = training_batches(config, mesh, open_training_data(config), 16, 2)
    first, second = jax.device_get(list(batches))
    assert first["input_ids"][0, :, 0].tolist() == [16, 17, 18, 19]
    assert second["input_ids"][0, :, 0].tolist() == [0, 1, 2, 3]  # the second epoch
    assert first["labels"][0, 0, :3].tolist() == [17, 18, 19]


def test_registered_dataset_length_is_epoch():
    settings = ["--data.dataset_type=counting", "--train.max_steps=2ep", "--train.batch_size=8"]
    unresolved = load_unresolved(None, [*settings, "--scheduler.warmup_steps=1"])
    assert unresolved.resolve(1, sequences_per_epoch).train.max_steps == 5


def test_registered_dataset_is_refused_in_a_mixture():
    with pytest.raises(ValueError, match=r'dataset_type = "counting" does not mix: leave datasets'):
        DataConfig(dataset_type="counting", datasets=[{"path": "a"}])
