"""Twelve updates of KempnerForge in float32, from its initial weights, with its batches."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from tests import torch_names
from tests.conftest import tiny_config
from tests.helpers import placed, setup

LOSS_TOLERANCE = 1e-5  # relative, loss and gradient norm of every update
MEAN_TOLERANCE, WORST_TOLERANCE = 1e-6, 1e-3  # final weights, absolute
MOMENT_TOLERANCE = 1e-5  # of the largest
TIE = 1e-5  # of the largest: what rounding makes of zero
EXPERTS = {
    "num_experts": 4, "feed_forward_pattern": ("dense", "experts"), "moe_shared_experts": 1,
    "moe_router_z_loss_weight": 1e-3,
}  # fmt: skip
MOMENTS = {"mu": "exp_avg", "nu": "exp_avg_sq"}  # torch's names


def trajectory_config(optimizer=None, model=None, grad_sync="update", **distributed):
    dp = math.prod(distributed.get(axis, 1) for axis in ("dp_shard", "dp_replicate", "ep"))
    return tiny_config(
        model=model or {},
        train={
            "batch_size": 4 // dp, "max_steps": 12, "grad_accum_steps": 2,
            "loss_norm": "microbatch", "grad_sync": grad_sync,
        },
        optimizer=optimizer or {},
        distributed={"dp_shard": 1, **distributed},
    )  # fmt: skip


def opened(golden, name):

    run = dict(np.load(golden(f"{name}.npz")))
    if not part(run, "init/"):
        first = np.load(golden("traj_dense_adamw.npz"))
        run |= {key: first[key] for key in first.files if key.startswith("init/")}
    batches = {
        key: run[key].astype(np.int32) for key in ("input_ids", "labels", "doc_ids") if key in run
    }
    return run | batches


def part(run, prefix):
    return {name.removeprefix(prefix): run[name] for name in run if name.startswith(prefix)}


SPLIT = {"dp_replicate": 2, "dp_shard": 2, "tp": 2}
LION = {"name": "lion", "lr": 1e-3}


@pytest.mark.parametrize(
    ("name", "optimizer", "distributed"),
    [
        ("traj_dense_adamw", {}, {}),
        ("traj_dense_adamw", {}, SPLIT),
        ("traj_dense_packed_docids", {}, SPLIT),
        ("traj_dense_lion", LION, {}),
        ("traj_dense_lion", LION, SPLIT),
    ],
)
def test_follows_the_reference(golden, name, optimizer, distributed):
    run = opened(golden, name)
    ours = setup(trajectory_config(optimizer, **distributed))
    fields = {"input_ids": "input_ids", "labels": "labels", "doc_ids": "segment_ids"}
    batches = [
        {name: run[theirs][i] for theirs, name in fields.items() if theirs in run}
        for i in range(12)
    ]
    params = torch_names.from_torch(part(run, "init/"), ours.model.abstract)
    follow = follow_with_ties if name == "traj_dense_lion" else steps
    state, metrics = follow(ours, params, batches, run)

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
    for field in MOMENTS.keys() & fields:
        for key, moment in torch_names.to_torch(fields[field]).items():
            reference = run.get(f"opt/{key}/{MOMENTS[field]}")
            if reference is None:  # a small copy
                continue
            worst = np.abs(moment - reference).max()
            assert worst < MOMENT_TOLERANCE * np.abs(reference).max(), (key, field)


@pytest.mark.parametrize(
    ("grad_sync", "distributed"),
    [
        ("update", {}),
        pytest.param("update", {"dp_replicate": 2, "ep": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param("microbatch", {"ep": 4}, marks=pytest.mark.slow),
        pytest.param("microbatch", {"dp_shard": 2, "ep": 2, "tp": 2}, marks=pytest.mark.slow),
    ],
)
def test_experts_follow_the_reference(golden, grad_sync, distributed):
    run = opened(golden, "traj_moe_softmax")
    config = trajectory_config(model=EXPERTS, grad_sync=grad_sync, **distributed)
    ours = setup(config)
    batches = [{name: run[name][i] for name in ("input_ids", "labels")} for i in range(12)]
    model = config.model
    params = torch_names.from_torch(part(run, "init/"), ours.model.abstract, model)
    state, metrics = steps(ours, params, batches, run)

    np.testing.assert_allclose(metrics["loss"], run["loss"], rtol=LOSS_TOLERANCE)
    np.testing.assert_allclose(metrics["grad_norm"], run["grad_norm"], rtol=LOSS_TOLERANCE)
    final = torch_names.to_torch(jax.device_get(state.params), model)
    for key, reference in part(run, "final/").items():
        difference = np.abs(final[key] - reference)
        assert difference.mean() < MEAN_TOLERANCE, key
        assert difference.max() < WORST_TOLERANCE, key


def steps(ours, params, batches, run, ties=()):
    """The updates; of every tie (step, name, index), the element goes the other way."""
    state, logged = ours.state(params), []
    for n, batch in enumerate(batches):
        now = [tie[1:] for tie in ties if tie[0] == n]
        before = momentum(state) if now else {}
        state, metrics = ours.run(state, [batch])
        logged.append(metrics)
        for key, index in now:
            state = other_way(ours, state, before, key, index, 2 * run["lr_used"][n])
    keys = ("loss", "grad_norm", "lr")
    return state, {key: np.concatenate([m[key] for m in logged]) for key in keys}


def follow_with_ties(ours, params, batches, run):
    """Lion moves an element by the sign of a number, which may be zero but for rounding.

    Processors round differently. Where the reference went the other way, so do we; one after the
    other, as what an element does decides the later signs of others.
    """
    ties = []
    while True:
        state, metrics = steps(ours, params, batches, run, ties)
        if (tie := first_turned(torch_names.to_torch(jax.device_get(state.params)), run)) is None:
            return state, metrics
        assert tie not in ties
        ties.append(tie)


def first_turned(final, run):
    """The (step, name, index) that differs first: by two of its steps, which tell when it was."""
    rates, result = run["lr_used"], []
    for key, reference in part(run, "final/").items():
        off = np.abs(final[key] - reference)
        for index in zip(*np.nonzero(off > rates[rates > 0].min()), strict=True):
            apart = np.abs(off[index] / (2 * rates[1:]) - 1)
            if apart.min() < 1e-3:
                result.append((1 + int(apart.argmin()), key, index))
    return min(result, default=None)


def momentum(state):
    return torch_names.to_torch(jax.device_get(state.opt_state[1].mu))


def other_way(ours, state, before, key, index, apart):
    """The state whose element has taken the opposite step: only where the sign is a tie."""
    b1, b2 = ours.config.optimizer.betas
    gradient = (momentum(state)[key] - b2 * before[key]) / (1 - b2)
    mean = b1 * before[key] + (1 - b1) * gradient
    assert abs(mean[index]) < TIE * np.abs(mean).max(), (key, index)
    params = torch_names.to_torch(jax.device_get(state.params))
    params[key] = np.array(params[key])
    params[key][index] += np.sign(mean[index]) * apart
    tree = torch_names.from_torch(params, ours.model.abstract)
    like = jax.tree.map(lambda leaf: leaf.sharding, state.params)
    return dataclasses.replace(state, params=jax.tree.map(placed, jax.device_get(tree), like))


def test_logits_before_training(golden):
    run = opened(golden, "traj_dense_adamw")
    ours = setup(trajectory_config())
    params = torch_names.from_torch(part(run, "init/"), ours.model.abstract)
    model = ours.model
    forward = jax.jit(lambda params, tokens: model.logits(params, model.hidden(params, tokens)))
    logits = forward(params, run["input_ids"][0, 0])
    np.testing.assert_allclose(logits, run["logits0"], atol=1e-5)
