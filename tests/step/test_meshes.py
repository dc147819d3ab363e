"""Ten float32 steps are equal on every mesh and accumulation split."""

import functools

import jax
import numpy as np
import pytest

from tests.conftest import tiny_config
from tests.helpers import (
    new_setup,
    random_batches,
    setup,
    use_unsplittable_kernel,
    with_random_biases,
)

STEPS = 10
# Combinations of two axes are covered by the mesh with three, which runs with `microbatch` here and
# with `update` in the test of an opaque kernel.
CASES = [
    ({"dp_shard": 8}, "update"),
    ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, "microbatch"),
]


def config(accum=1, grad_sync="update", z=0.0, **distributed):
    dp = distributed.get("dp_shard", 1) * distributed.get("dp_replicate", 1)
    return tiny_config(
        train={
            "batch_size": 8 // dp // accum if 8 // dp >= accum else 1,
            "grad_accum_steps": accum,
            "grad_sync": grad_sync,
            "z_loss_weight": z,
        },
        distributed={"dp_shard": 1, **distributed},
    )


@functools.cache
def single_device():
    program = setup(config(z=1e-4))
    return program.run(program.state(), random_batches(program.config, STEPS))


@pytest.mark.parametrize(("mesh", "grad_sync"), CASES, ids=str)
def test_losses_do_not_depend_on_the_mesh(mesh, grad_sync):
    program = setup(config(grad_sync=grad_sync, z=1e-4, **mesh))
    state, metrics = program.run(program.state(), random_batches(program.config, STEPS))
    reference_state, reference = single_device()
    np.testing.assert_allclose(metrics["loss"], reference["loss"], rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], reference["grad_norm"], rtol=1e-4)
    for ours_leaf, leaf in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(reference_state.params), strict=True
    ):
        np.testing.assert_allclose(ours_leaf, leaf, atol=2e-4)


@pytest.mark.parametrize(
    "grad_sync", ["update", pytest.param("microbatch", marks=pytest.mark.slow)]
)
def test_opaque_kernel_runs_on_each_device_separately(grad_sync, monkeypatch):
    use_unsplittable_kernel(monkeypatch)
    mesh = {"dp_replicate": 2, "dp_shard": 2, "tp": 2}
    program = new_setup(config(grad_sync=grad_sync, z=1e-4, **mesh))
    _, metrics = program.run(program.state(), random_batches(program.config, STEPS)[:3])
    np.testing.assert_allclose(metrics["loss"], single_device()[1]["loss"][:3], rtol=1e-5)


@pytest.mark.parametrize(
    ("mesh", "accum"),
    [pytest.param({}, 8, marks=pytest.mark.slow), ({"dp_shard": 2, "dp_replicate": 2}, 2)],
    ids=str,
)
def test_losses_do_not_depend_on_the_accumulation_split(mesh, accum):
    program = setup(config(accum, z=1e-4, **mesh))
    batches = [
        {k: v.reshape(accum, 8 // accum, -1) for k, v in batch.items()}
        for batch in random_batches(setup(config()).config, STEPS)
    ]
    _, metrics = program.run(program.state(), batches)
    np.testing.assert_allclose(metrics["loss"], single_device()[1]["loss"], rtol=1e-5)


def test_bfloat16_compute_runs_on_every_kind_of_axis():
    """test_grad_sync.py compares the gradients of a reduction per microbatch."""
    base = config(dp_replicate=2, dp_shard=2, tp=2)
    train = base.train.model_copy(update={"mixed_precision": "bf16"})
    program = setup(base.model_copy(update={"train": train}))
    state, metrics = program.run(program.state(), random_batches(program.config, 3))
    np.testing.assert_allclose(metrics["loss"], single_device()[1]["loss"][:3], rtol=2e-2)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {np.dtype("float32")}


@pytest.mark.slow
def test_biases_are_split_with_their_heads():
    """EVERY_OPTION in test_context.py covers all biases, reduced per microbatch."""
    model = {"qkv_bias": True, "head_dim": 24}  # dim / n_heads would be 16
    axes = {"dp_replicate": 2, "dp_shard": 2, "tp": 2}
    train = {"batch_size": 2, "grad_sync": "update"}
    alone = setup(tiny_config(model=model), collect=("grads",))
    split = setup(tiny_config(model=model, train=train, distributed=axes), collect=("grads",))
    params = with_random_biases(alone.state().params)
    batches = random_batches(alone.config, 1)
    _, a = alone.run(alone.state(params), batches)
    state, b = split.run(split.state(params), batches)
    np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-5)
    for name, width in [("q_proj", 96), ("k_proj", 48), ("v_proj", 48)]:
        expected, result = (m["grads"]["layers"]["attention"][name]["bias"][0] for m in (a, b))
        assert expected.shape == (2, width)
        assert (expected != 0).all()
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
        bias = state.params["layers"]["attention"][name]["bias"]
        assert bias.sharding.shard_shape(bias.shape) == (2, width // 2)
