"""Steps with 8-bit products: meshes, and histories of delayed scaling."""

import functools

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxforge.step.train_step import Controls
from tests.conftest import tiny_config
from tests.helpers import placed, random_batches, setup


def config(distributed=None, n_layers=2, **train):
    """Return a config whose first layer stays in bf16, so that pipeline stages differ."""
    d = {"dp_shard": 1, **(distributed or {})}
    batch = 4 // (d["dp_shard"] * d.get("dp_replicate", 1))
    return tiny_config(
        model={"n_layers": n_layers},
        train={"mixed_precision": "fp8", "fp8_scaling": "delayed", "fp8_amax_history_len": 3,
               "num_layers_at_start_in_bf16": n_layers - 1, "num_layers_at_end_in_bf16": 0,
               "grad_accum_steps": 2, "batch_size": batch, **train},
        distributed=d,
        optimizer={"lr": 0.1},
    )  # fmt: skip


@functools.cache
def single_device():
    program = setup(config())
    return program.run(program.state(), random_batches(program.config, 2))


MESHES = [
    ({"tp": 2, "dp_shard": 2}, "update"),
    pytest.param({"tp": 2, "dp_shard": 2}, "microbatch", marks=pytest.mark.slow),
    pytest.param({"pp": 2, "tp": 2}, "microbatch", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("mesh", "grad_sync"), MESHES, ids=str)
def test_losses_and_histories_do_not_depend_on_the_mesh(mesh, grad_sync):
    program = setup(config(mesh, grad_sync=grad_sync))
    expected_state, expected = single_device()
    state, metrics = program.run(program.state(), random_batches(program.config, 2))
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=2e-5)
    np.testing.assert_allclose(metrics["grad_norm"], expected["grad_norm"], rtol=5e-3)
    for history, want in zip(
        jax.tree.leaves(state.model_state), jax.tree.leaves(expected_state.model_state), strict=True
    ):
        np.testing.assert_allclose(history, want, rtol=2**-5)  # a few digits of bf16
    is_recorded = [np.asarray(leaf)[1, :2].all() for leaf in jax.tree.leaves(state.model_state)]
    assert all(is_recorded)


def with_experts(distributed=None, **train):
    d = {"dp_shard": 1, **(distributed or {})}
    return tiny_config(
        model={"n_layers": 1, "num_experts": 4, "moe_top_k": 2, "moe_latent_dim": 32},
        train={"mixed_precision": "fp8", "fp8_exclude": (), "num_layers_at_start_in_bf16": 0,
               "num_layers_at_end_in_bf16": 0, "global_batch_size": 8, **train},
        distributed=d,
    )  # fmt: skip


@pytest.mark.slow
def test_fp8_experts_do_not_depend_on_the_mesh():
    """Scales may differ, because each device uses those of its own rows."""
    alone = setup(with_experts())
    spread = setup(with_experts({"ep": 2, "dp_shard": 2}, grad_sync="microbatch"))
    wide = setup(with_experts(mixed_precision="bf16"))
    batches = random_batches(alone.config, 2)
    losses, norms = [], []
    for program in (alone, spread, wide):
        _, metrics = program.run(program.state(), batches)
        losses.append(np.asarray(metrics["loss"]))
        norms.append(np.asarray(metrics["grad_norm"]))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-3)
    np.testing.assert_allclose(norms[1], norms[0], rtol=3e-2)
    np.testing.assert_allclose(losses[0], losses[2], rtol=1e-2)
    assert np.all(losses[0] != losses[2])


def in_bf16(x):
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def amax_of_inputs(params, batch):
    """Return the amax of the first attention's inputs in NumPy, over all microbatches."""
    table = in_bf16(params["token_embedding"]["embedding"]["weight"])
    x = table[batch["input_ids"]]
    normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
    return np.abs(normed * np.asarray(params["layers"]["attention_norm"]["weight"])[0]).max()


def test_amax_histories_hold_latest_good_steps():
    """Compare six steps of two microbatches with plain lists; the fourth step has a NaN."""
    program = setup(config(n_layers=1))
    state, inputs, weights = program.state(), [0.0] * 3, [0.0] * 3
    for number, batch in enumerate(random_batches(program.config, 6)):
        params = jax.device_get(state.params)
        good, where = np.array(params["norm"]["weight"]), state.params["norm"]["weight"].sharding
        if number == 3:
            state.params["norm"]["weight"] = placed(good * np.nan, where)
        else:
            inputs = [amax_of_inputs(params, batch), *inputs[:2]]
            q = params["layers"]["attention"]["q_proj"]["weight"][0]
            weights = [np.abs(in_bf16(q)).max(), *weights[:2]]
        with jax.set_mesh(program.mesh):
            state, metrics = program.step(state, program.put(batch), Controls())
        assert bool(metrics["applied"]) == (number != 3)
        if number == 3:
            state.params["norm"]["weight"] = placed(good, where)
        linear = state.model_state["layers"]["attention"]["q_proj"]
        np.testing.assert_allclose(linear["input_amax_history"][0], inputs, rtol=2**-7)
        np.testing.assert_array_equal(linear["weight_amax_history"][0], weights)
    assert all(weights)
    assert weights[0] != weights[1]
