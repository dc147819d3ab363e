"""The length of an epoch, and where there is none."""

import numpy as np
import pytest

from jaxforge.config import load_unresolved
from jaxforge.data.sources import sequences_per_epoch
from jaxforge.errors import UserError
from tests.conftest import tiny_config


@pytest.fixture
def shards(tmp_path):
    """100 windows."""
    np.save(tmp_path / "a.npy", np.zeros(33 * 100, np.uint16))
    return str(tmp_path)


@pytest.mark.parametrize(("order", "rows", "n"), [("grain", 8, 100), ("torch", 8, 96)])
def test_shards_have_a_length(shards, order, rows, n):
    config = tiny_config(data={"dataset_path": shards, "order": order})
    assert sequences_per_epoch(config, rows) == n


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"hf_dataset_name": "a", "hf_streaming": True, "tokenizer_path": "byte"},
        {"datasets": [{"path": "a"}, {"path": "b"}], "dataset_path": "c"},
    ],
)
def test_other_data_have_no_epoch_length(data):
    assert sequences_per_epoch(tiny_config(data=data), 8) is None


def test_run_length_in_epochs(shards):
    settings = [
        "--train.seq_len=32", "--train.batch_size=8", "--train.max_steps=2.5ep",
        "--scheduler.warmup_steps=10%", "--checkpoint.interval=1ep",
        f"--data.dataset_path={shards}",
    ]  # fmt: skip
    config = load_unresolved(None, settings).resolve(1, sequences_per_epoch)
    assert (config.train.max_steps, config.scheduler.warmup_steps) == (32, 3)
    assert config.checkpoint.interval == 13


def test_missing_data_raise(tmp_path):
    settings = ["--train.max_steps=1ep", f"--data.dataset_path={tmp_path}/none"]
    with pytest.raises(UserError, match="none"):
        load_unresolved(None, settings).resolve(1, sequences_per_epoch)
