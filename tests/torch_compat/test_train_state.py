"""Position of a PyTorch run in train_state.pt or in keys of the checkpoint."""

import dataclasses

import numpy as np
import pytest

from jaxforge.data import loader
from jaxforge.errors import UserError
from jaxforge.state.progress import Progress
from tests.conftest import tiny_config
from torch_compat.checkpoint.train_state import (
    TorchTrainState,
    read_train_state,
    to_progress,
    to_torch,
)
from torch_compat.formats import torch_zip
from torch_compat.formats.dcp_reader import open_dcp
from torch_compat.formats.files import Directory

PER_STEP = 8 * 32  # tokens of a step of the tiny config


def counts(progress):
    return dataclasses.replace(progress, run_id="")


def test_tokens_determine_samples_for_any_ranks():
    config = tiny_config(data={"order": "torch"})
    for batches, ranks in ((10, 1), (10, 4), (None, None)):
        location = TorchTrainState(
            step=10, tokens=10 * PER_STEP, updates=10, batches=batches, ranks=ranks
        )
        progress, notes = to_progress(location, 10, config)
        assert counts(progress) == Progress(step=10, samples=80, tokens=2560, run_id="")
        assert notes == []


def test_skipped_steps_count_as_samples():
    location = TorchTrainState(step=10, tokens=7 * PER_STEP, updates=7, batches=10, ranks=1)
    progress, _ = to_progress(location, 7, tiny_config(data={"order": "torch"}))
    assert counts(progress) == Progress(step=10, samples=80, tokens=7 * 256, skipped=3, run_id="")


def test_batches_determine_samples_without_tokens():
    config = tiny_config(data={"order": "torch"}, train={"batch_size": 2})
    progress, notes = to_progress(
        TorchTrainState(step=10, updates=10, batches=20, ranks=4), 10, config
    )
    assert progress.samples == 20 * 2 * 4
    assert any("20 batches of 8" in note for note in notes)


def test_different_order_and_count_are_noted():
    location = TorchTrainState(step=10, tokens=10 * PER_STEP, updates=10)
    _, notes = to_progress(location, 11, tiny_config())
    assert any('data.order = "torch"' in note for note in notes)
    assert any("counts 11 updates and the LR scheduler 10" in note for note in notes)


def data_of(tmp_path, sequences):
    tokens = np.random.default_rng(0).integers(0, 256, sequences * 33).astype(np.uint16)
    np.save(tmp_path / "tokens.npy", tokens)
    return tiny_config(data={"dataset_path": str(tmp_path), "order": "torch"})


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_position_round_trips_through_train_state(tmp_path, ranks):
    config = data_of(tmp_path, 50)  # epochs of 6 steps
    config = config.model_copy(
        update={"train": config.train.model_copy(update={"batch_size": 8 // ranks})}
    )
    for step in (0, 1, 5, 6, 7, 20):
        progress = Progress(step=step, samples=8 * step, tokens=PER_STEP * step)
        state = to_torch(progress, step, config, ranks)
        epoch, batches = divmod(step, 6)
        data = state["dataloader"]
        assert (data["epoch"], data["batches_yielded"]) == (epoch, batches)
        location = TorchTrainState(step, PER_STEP * step, step, epoch, batches, ranks)
        assert counts(to_progress(location, step, config)[0]) == counts(progress)


def test_position_within_a_batch_is_refused():
    with pytest.raises(UserError, match="not a multiple of 24"):
        to_torch(Progress(step=1, samples=8, tokens=256), 1, tiny_config(), 3)


def test_torch_loads_train_state_and_random_states(tmp_path):
    torch = pytest.importorskip("torch")
    state = to_torch(Progress(step=2, samples=16, tokens=512), 2, tiny_config(), 1)
    path = tmp_path / "train_state.pt"
    torch_zip.save(state, path)
    read = torch.load(path, weights_only=False)
    generator = torch.Generator().manual_seed(tiny_config().train.seed)
    assert torch.equal(read["rng"]["torch_cpu"], generator.get_state())
    torch.Generator().set_state(read["rng"]["torch_cpu"])
    theirs = np.random.RandomState()
    theirs.set_state(read["rng"]["numpy"])
    assert theirs.rand() == np.random.RandomState(tiny_config().train.seed).rand()
    assert read["dataloader"]["sampler"]["seed"] == loader.data_seed(tiny_config())
    schedule = torch.optim.lr_scheduler.LambdaLR(
        torch.optim.SGD([torch.zeros(1)], lr=1.0), lambda n: 1.0
    )
    read["scheduler"]["lr_lambdas"] = [None]
    schedule.load_state_dict(read["scheduler"])
    assert schedule.last_epoch == 2


def test_torchtitan_keys_are_read(tmp_path):
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    state = {
        "norm.weight": torch.ones(4),
        "train_state": {"step": torch.tensor(7), "ntokens_seen": torch.tensor(2**40)},
        "lr_scheduler": {"last_epoch": 6},
    }
    dcp.save(state, checkpoint_id=tmp_path / "step-7", no_dist=True)
    location = read_train_state(open_dcp(Directory(tmp_path / "step-7")))
    assert location == TorchTrainState(step=7, tokens=2**40, updates=6)
