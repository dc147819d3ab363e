"""Twelve updates of KempnerForge in float32, from its initial weights, with its batches."""

import jax
import numpy as np
import pytest

from tests import torch_names
from tests.conftest import tiny_config
from tests.helpers import setup

LOSS_TOLERANCE = 1e-5  # relative, loss and gradient norm of every update
MEAN_TOLERANCE, WORST_TOLERANCE = 1e-6, 1e-3  # final weights, absolute
MOMENT_TOLERANCE = 1e-5  # of the largest
MOMENTS = {"mu": "exp_avg", "nu": "exp_avg_sq"}  # torch's names


def trajectory_config(optimizer=None, **distributed):
    dp = distributed.get("dp_shard", 1) * distributed.get("dp_replicate", 1)
    return tiny_config(
        train={
            "batch_size": 4 // dp, "max_steps": 12, "grad_accum_steps": 2,
            "loss_norm": "microbatch",
        },
        optimizer=optimizer or {},
        distributed={"dp_shard": 1, **distributed},
    )  # fmt: skip


def part(run, prefix):
    return {name.removeprefix(prefix): run[name] for name in run.files if name.startswith(prefix)}


@pytest.mark.parametrize("distributed", [{}, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}])
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("traj_dense_adamw", {}),
        ("traj_dense_packed_docids", {}),
        ("traj_dense_lion", {"name": "lion", "lr": 1e-3}),
    ],
)
def test_follows_the_reference(golden, name, optimizer, distributed):
    run = np.load(golden / f"{name}.npz")
    ours = setup(trajectory_config(optimizer, **distributed))
    keys = [k for k in ("input_ids", "labels", "doc_ids") if k in run.files]
    batches = [{k: run[k][i] for k in keys} for i in range(12)]
    params = torch_names.from_torch(part(run, "init/"), ours.model.abstract)
    state, metrics = ours.run(ours.state(params), batches)

    np.testing.assert_allclose(metrics["loss"], run["loss"], rtol=LOSS_TOLERANCE)
    np.testing.assert_allclose(metrics["grad_norm"], run["grad_norm"], rtol=LOSS_TOLERANCE)
    np.testing.assert_allclose(metrics["lr"], run["lr_logged"], rtol=1e-6)
    final = torch_names.to_torch(jax.device_get(state.params))
    for key, reference in part(run, "final/").items():
        difference = np.abs(final[key] - reference)
        assert difference.mean() < MEAN_TOLERANCE, key
        assert difference.max() < WORST_TOLERANCE, key
    fields = jax.device_get(state.opt_state[1])._asdict()
    assert fields.pop("updates") == 12
    for field, moments in fields.items():
        for key, moment in torch_names.to_torch(moments).items():
            reference = run[f"opt/{key}/{MOMENTS[field]}"]
            worst = np.abs(moment - reference).max()
            assert worst < MOMENT_TOLERANCE * np.abs(reference).max(), (key, field)


def test_logits_before_training(golden):
    run = np.load(golden / "traj_dense_adamw.npz")
    ours = setup(trajectory_config())
    params = torch_names.from_torch(part(run, "init/"), ours.model.abstract)
    hidden = ours.model.hidden(params, run["input_ids"][0, 0])
    logits = ours.model.logits(params, hidden)
    np.testing.assert_allclose(logits, run["logits0"], atol=1e-5)
