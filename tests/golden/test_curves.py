"""KempnerForge's own runs, taken over at step 10 and continued on its data to step 30."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxforge.config.reading.load import load_config
from jaxforge.data import loader, sources
from jaxforge.step.train_step import Controls
from tests import torch_names
from tests.helpers import setup

TOLERANCE = 1e-5  # relative, as for the trajectories


def checkpoint(run, tmp_path):
    """Model and optimizer state of the DCP checkpoint at step 10, as torch reads it."""
    torch = pytest.importorskip("torch")
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(run / "checkpoints" / "step_10", tmp_path / "step_10.pt")
    return torch.load(tmp_path / "step_10.pt", weights_only=True)


def taken_over(ours, saved):
    def tree(named):
        return torch_names.from_torch(
            {name: tensor.numpy() for name, tensor in named.items()}, ours.model.abstract
        )

    state = ours.state(tree(saved["model"]))
    moments = {
        ours_name: tree({n: s[theirs] for n, s in saved["optimizer"]["state"].items()})
        for ours_name, theirs in (("mu", "exp_avg"), ("nu", "exp_avg_sq"))
    }
    opt_state = optax.tree.set(state.opt_state, updates=jnp.int32(10), **moments)
    opt_state = jax.device_put(opt_state, jax.tree.map(lambda x: x.sharding, state.opt_state))
    return dataclasses.replace(state, opt_state=opt_state)


@pytest.mark.parametrize(
    ("name", "overrides", "compared"),
    [
        ("curve_dense_1rank", ["--distributed.dp_shard=1"], ("loss", "grad_norm", "lr")),
        # Its printed loss is that of one rank of two.
        pytest.param(
            "curve_dense_fsdp2", ["--distributed.dp_shard=2"], ("grad_norm", "lr"),
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_continued_run_follows_the_curve(golden, tmp_path, name, overrides, compared):
    run = golden(name)
    paths = [f"--data.dataset_path={golden('tokens')}", "--data.shuffle=false"]
    ours = setup(load_config(run / "config.toml", [*paths, *overrides]))
    state = taken_over(ours, checkpoint(run, tmp_path))
    dataset = sources.open_training_data(ours.config)
    curve = {entry["step"]: entry for entry in json.loads((run / "curve.json").read_text())}
    with jax.set_mesh(ours.mesh):
        batches = loader.training_batches(ours.config, ours.mesh, dataset, 10 * 8, 20)
        for step, batch in enumerate(batches, 11):
            state, metrics = ours.step(state, batch, Controls())
            for key in compared:
                np.testing.assert_allclose(
                    metrics[key], curve[step][key], rtol=TOLERANCE, err_msg=f"{key} of step {step}"
                )
    assert step == 30
