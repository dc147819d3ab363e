"""Checkpoints of MindSpeed-LLM's FSDP2 trainer: an engine around a Hugging Face model."""

import numpy as np
import pytest

from tests.torch_compat.runs import assert_same, trained, values
from torch_compat.__main__ import main
from torch_compat.checkpoint import checkpoints, orbax_store
from torch_compat.checkpoint.train_state import read_train_state
from torch_compat.formats.dcp_reader import open_dcp
from torch_compat.formats.files import Directory

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")

GROUP = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def extra_state(step, tokens, logged):
    """Return the trainer's state of each rank."""
    return {
        "global_step": step,
        "_global_step_last_logged": 0,
        "_last_logged_step": logged,
        "lr_scheduler": {"base_lrs": [1e-3], "last_epoch": step, "lr_lambdas": [{}]},
        "train_metric": {"consume_tokens": tokens, "last_iteration": logged, "last_mfu": 0.0},
        "torch_rng_state": torch.get_rng_state(),
    }


def written(run, directory, step, **location):
    """Write a checkpoint like `get_model_state_dict` and MindSpeed's manager."""
    main(["export", str(run), str(run / "hf"), "--to=dcp", "--dialect=hf-llama"])
    tensors = open_dcp(Directory(run / "hf" / "step_2")).tensors
    model, state = {}, {}
    for key, tensor in tensors.items():
        value = torch.tensor(tensor.all())
        if key.startswith("optimizer.state."):
            owner, _, field = key.removeprefix("optimizer.state.").rpartition(".")
            state.setdefault(f"model.{owner}", {})[field] = value
        else:
            model["model." + key.removeprefix("model.")] = value
    optimizer = {"state": state, "param_groups": [{**GROUP, "params": list(state)}]}
    path = directory / "checkpoints" / f"global_step_{step}"
    both = {"model": model, "optimizer": optimizer}
    dcp.save(both, checkpoint_id=str(path), no_dist=True)
    (path / "extra_state").mkdir()
    for rank in range(2):
        torch.save(
            extra_state(step, **location), path / "extra_state" / f"extra_state_rank_{rank}.pt"
        )
    return path


def test_import_finds_newest_global_step(tmp_path):
    config = trained(tmp_path / "run")
    path = written(tmp_path / "run", tmp_path / "theirs", 2, tokens=512, logged=2)
    (path.parent / "global_step_1").mkdir()
    assert "model.model.model.layers.0.mlp.up_proj.weight" in open_dcp(Directory(path)).tensors
    assert checkpoints.find(tmp_path / "theirs").directory.name == "global_step_2"
    command = ["import", str(tmp_path / "theirs"), str(tmp_path / "ours"), f"--config={config}"]
    assert main(command) == 0
    assert_same(values(tmp_path / "run"), values(tmp_path / "ours"))
    location = orbax_store.open_orbax(tmp_path / "ours")[0].progress
    assert (location.step, location.samples, location.tokens) == (2, 16, 512)


def test_tokens_of_another_step_are_ignored(tmp_path):
    """MindSpeed adds up tokens at log lines, which may be at other steps than the checkpoint."""
    for step, logged, tokens in ((10, 10, 2560), (25, 20, None)):
        path = tmp_path / str(step)
        state = {"norm.weight": torch.ones(4)}
        dcp.save(state, checkpoint_id=str(path), no_dist=True)
        (path / "extra_state").mkdir()
        location = extra_state(step, 256 * logged, logged)
        torch.save(location, path / "extra_state" / "extra_state_rank_0.pt")
        result = read_train_state(open_dcp(Directory(path)))
        assert (result.step, result.updates, result.tokens) == (step, step, tokens)


def test_newest_step_is_chosen_numerically(tmp_path):
    for step in (9, 10, 100):
        dcp.save(
            {"x": torch.ones(1)}, checkpoint_id=str(tmp_path / f"global_step_{step}"), no_dist=True
        )
    assert checkpoints.find(tmp_path).directory.name == "global_step_100"
    assert np.array_equal(checkpoints.find(tmp_path).raw()["x"].all(), [1])
