"""Meshes whose dp_shard does not divide the width: sharding over a factor of it."""

import functools
import math

import jax
import numpy as np
import pytest

from jaxforge.exit_codes import Exit
from jaxforge.inference import open_run
from jaxforge.inference.evaluation import evaluate
from jaxforge.training import launch
from jaxforge.training.evaluation import summary
from tests.conftest import tiny_config
from tests.helpers import random_batches, setup

UPDATE, MICROBATCH = {"grad_sync": "update"}, {"grad_sync": "microbatch"}
MUON = {"name": "muon"}
EXPERTS = {"num_experts": 4, "moe_top_k": 2, "moe_expert_dim": 48, "moe_aux_loss_weight": 0.01}
ROWS = 12  # sequences of an update, in two microbatches


def config(train=UPDATE, model=None, optimizer=None, **axes):
    groups = math.prod(axes.get(axis, 1) for axis in ("dp_replicate", "dp_shard", "ep"))
    return tiny_config(
        model=model or {}, optimizer=optimizer or {},
        train={"batch_size": ROWS // 2 // groups, "grad_accum_steps": 2, "seq_len": 16, **train},
        distributed={"dp_shard": 1, **axes},
    )  # fmt: skip


def run(job):
    """Return program, state and metrics with gradients of three updates."""
    program = setup(job, collect=("grads",))
    return program, *program.run(program.state(), random_batches(job, 3))


@functools.cache
def on_one_device(kind):
    return run(config(**KINDS[kind]))


KINDS = {"dense": {}, "muon": {"optimizer": MUON}, "experts": {"model": EXPERTS}}
CASES = [  # requested axes, and the resulting dp_replicate and dp_shard
    pytest.param("dense", MICROBATCH, {"dp_shard": 6}, (3, 2), marks=pytest.mark.slow),
    ("dense", MICROBATCH, {"dp_shard": 3, "tp": 2}, (3, 1)),
    ("dense", UPDATE, {"dp_replicate": 2, "dp_shard": 3}, (6, 1)),
    pytest.param("dense", UPDATE, {"pp": 2, "dp_shard": 3}, (3, 1), marks=pytest.mark.slow),
    pytest.param("muon", UPDATE, {"dp_shard": 6}, (3, 2), marks=pytest.mark.slow),
    pytest.param("experts", MICROBATCH, {"dp_shard": 3, "ep": 2}, (3, 1), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "train", "axes", "built"), CASES, ids=str)
def test_updates_match_single_device(kind, train, axes, built):
    program, state, result = run(config(train, **KINDS[kind], **axes))
    _, expected_state, expected = on_one_device(kind)
    assert (program.mesh.shape["dp_replicate"], program.mesh.shape["dp_shard"]) == built
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose(result[key], expected[key], rtol=1e-5)
    for leaf, other in zip(
        jax.tree.leaves(result["grads"]), jax.tree.leaves(expected["grads"]), strict=True
    ):
        np.testing.assert_allclose(leaf[0], other[0], rtol=1e-5, atol=1e-5 * np.abs(other[0]).max())
    for leaf, other in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(expected_state.params), strict=True
    ):
        np.testing.assert_allclose(leaf, other, atol=2e-4)
    weight = state.params["layers"]["attention"]["q_proj"]["weight"]
    width = weight.shape[-1] // (built[1] * axes.get("ep", 1))
    assert weight.sharding.shard_shape(weight.shape)[-1] == width


def job(path, name, **keys):
    """Return a job on eight devices; four share a parameter, since 8 does not divide 60."""
    for data, n in (("a", 60), ("b", 20)):
        (path / data).mkdir(exist_ok=True)
        np.save(path / data / "x.npy", (np.arange(n * 33) % 251).astype(np.uint16))
    return tiny_config(
        model={"dim": 60, "n_heads": 2, "n_kv_heads": 2, "ffn_hidden_dim": 96},
        train={"max_steps": 6, "batch_size": 1, "global_batch_size": 8, **keys},
        distributed={"dp_shard": -1},
        data={"dataset_path": str(path / "a")},
        eval={
            "enabled": True,
            "interval": 6,
            "steps": 2,
            "datasets": {"dataset_path": str(path / "b")},
        },
        checkpoint={"dir": str(path / name), "interval": 3},
    )


@pytest.mark.slow
def test_run_resumes_and_evaluates_on_other_devices(tmp_path, capsys):
    assert launch.fit(job(tmp_path, "whole")) is Exit.COMPLETED
    reported = [line for line in capsys.readouterr().err.splitlines() if "does not divide" in line]
    assert reported == [
        "WARNING distributed.dp_shard = 8 does not divide model.dim = 60: parameters and optimizer "
        "state are split over 4 devices and copied 2 times, 2 times the memory. A divisor splits "
        "them all the way"
    ]
    assert launch.fit(job(tmp_path, "parts", exit_interval=3)) is Exit.INTERVAL
    assert launch.fit(job(tmp_path, "parts")) is Exit.COMPLETED

    def params(name):
        opened = open_run(tmp_path / name, devices=jax.devices()[:1])
        with opened.in_use() as params:
            return jax.device_get(params)

    jax.tree.map(np.testing.assert_array_equal, params("parts"), params("whole"))
    single, seven = (
        summary(evaluate(tmp_path / "whole", devices=jax.devices()[:n])[1]) for n in (1, 7)
    )
    assert seven == pytest.approx(single, rel=1e-5)
