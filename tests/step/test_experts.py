"""Updates with experts on several meshes, in several rounds of exchange."""

import functools
import math
import re

import jax
import numpy as np
import pytest

from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.checkpoint.relayout import by_layer
from jaxforge.checkpoint.restore import Saved, start_from
from jaxforge.model import experts
from tests import torch_names
from tests.conftest import tiny_config
from tests.helpers import (
    collectives_in_loops,
    hlo,
    random_batches,
    save_checkpoint,
    setup,
)

SHAPE = {"n_layers": 2, "dim": 32, "vocab_size": 64, "num_experts": 8, "moe_expert_dim": 16}
UNEVEN = {"init_std": 0.3}  # routers that prefer some experts
MODELS = {
    "softmax": {
        **SHAPE, **UNEVEN, "moe_top_k": 3, "moe_shared_experts": 1, "moe_shared_expert_gate": True,
        "moe_router_z_loss_weight": 1e-3, "moe_sequence_aux_loss_weight": 1e-2,
        "moe_latent_dim": 24,
    },
    "deepseek": {
        **SHAPE, **UNEVEN, "moe_router": "sigmoid_topk", "moe_bias_update": "sign",
        "moe_groups": 4, "moe_top_k_groups": 2, "moe_capacity_factor": 1.1,
        "moe_bias_update_rate": 0.05, "moe_bias_schedule": "cosine_decay",
        "moe_routed_scaling": 2.5, "mlp_bias": True,
    },
    "kempnerforge": {
        **SHAPE, **UNEVEN, "moe_router": "sigmoid_topk", "moe_sequence_aux_loss_weight": 1.0,
        "moe_capacity_factor": 0.9, "moe_gradient_scale": True,
        "feed_forward_pattern": ("dense", "experts"),
        "activation": "gelu", "n_layers": 4, "moe_latent_dim": 24,
    },
}  # fmt: skip
MODELS["leading"] = {  # DeepSeek-V3's leading dense layers
    **MODELS["deepseek"], "n_layers": 5, "moe_first_dense_layers": 2,
}  # fmt: skip
UPDATE, MICROBATCH = {"grad_sync": "update"}, {"grad_sync": "microbatch"}
FULL = {"activation_checkpointing": "full"}


def config(model, train=None, **distributed):
    groups = math.prod(distributed.get(axis, 1) for axis in ("dp_replicate", "dp_shard", "ep"))
    return tiny_config(
        model=MODELS[model],
        train={
            "seq_len": 16, "batch_size": 8 // groups, "grad_accum_steps": 2, "max_steps": 8,
            **(train or {}),
        },
        distributed={"dp_shard": 1, **distributed},
    )  # fmt: skip


def run(job):
    """Return metrics of three updates, and parameters and model state by KempnerForge's names."""
    program = setup(job)
    batches = random_batches(job, 3)
    batches[1]["labels"][0, :, :8] = -100
    state, metrics = program.run(program.state(), batches)
    of = program.model.stack.of
    arrays = jax.device_get((state.params, state.model_state))
    stacks = job.model.stacks
    named = [
        torch_names.to_torch(
            {k: jax.tree.map(of(k).unstack, v) if k in stacks else v for k, v in tree.items()},
            job.model,
        )
        for tree in arrays
    ]
    return metrics, *named


@pytest.fixture(autouse=True)
def small_capacity(monkeypatch):
    """Limit the capacity of a round, so that most tests need several rounds."""
    monkeypatch.setattr(experts, "HEADROOM", 0.2)


@functools.cache
def on_one_device(model):
    return run(config(model))


DATA_AND_TENSOR = ("softmax", MICROBATCH, {"dp_shard": 2, "ep": 2, "tp": 2})
MESHES = [
    pytest.param(*DATA_AND_TENSOR, marks=pytest.mark.slow),
    pytest.param("deepseek", UPDATE, {"pp": 2, "ep": 2, "tp": 2}, marks=pytest.mark.slow),
    pytest.param("leading", UPDATE, {"pp": 2, "ep": 2, "tp": 2}, marks=pytest.mark.slow),
    pytest.param(
        "leading",
        {**MICROBATCH, **FULL},
        {"pp": 2, "dp_shard": 2, "cp": 2, "pp_schedule": "interleaved_1f1b"},
        marks=pytest.mark.slow,
    ),
    ("kempnerforge", {**UPDATE, **FULL}, {"dp_replicate": 2, "dp_shard": 2, "ep": 2}),
    pytest.param("kempnerforge", MICROBATCH, {"dp_shard": 4, "tp": 2}, marks=pytest.mark.slow),
]


def check_same(result, expected):
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    for key in ("loss", "grad_norm", "losses", "side"):
        jax.tree.map(close, result[0][key], expected[0][key])
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=5e-5)
    jax.tree.map(close, result[1:], expected[1:])


@pytest.mark.parametrize(("model", "train", "axes"), MESHES, ids=str)
def test_updates_do_not_depend_on_the_mesh(model, train, axes):
    check_same(run(config(model, train, **axes)), on_one_device(model))


def check_resumes(directory, job, other):
    """Resume a run bit-exactly on its own mesh, and closely on another mesh."""
    program, batches = setup(job), random_batches(job, 2)
    state, _ = program.run(program.state(), batches[:1])
    save_checkpoint(program, state, directory)
    expected = by_layer(program.run(state, batches[1:])[0], program.model.stack)
    for resumed_job in (job, other):
        resumed = setup(resumed_job)
        source = Saved(Checkpoints(directory, job.checkpoint, read_only=True), 1)
        restored, _ = start_from(source, resumed)
        state = by_layer(resumed.run(restored, batches[1:])[0], resumed.model.stack)
        same = np.testing.assert_array_equal
        if resumed_job is other:
            same = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=5e-5)
        jax.tree.map(same, jax.device_get(state), jax.device_get(expected))


@pytest.mark.slow
def test_run_resumes_on_any_mesh(tmp_path):
    other = config("kempnerforge", {**UPDATE, **FULL}, dp_replicate=2, dp_shard=2, ep=2)
    check_resumes(tmp_path, config("kempnerforge", MICROBATCH, dp_shard=4, tp=2), other)


@pytest.mark.slow
def test_run_in_stages_of_different_layers_resumes_on_any_mesh(tmp_path):
    """The biases of routers are among the restored arrays."""
    job = config("leading", {**UPDATE, **FULL}, pp=2, ep=2, pp_schedule="interleaved_1f1b")
    check_resumes(tmp_path, job, config("leading", MICROBATCH, pp=2, dp_shard=2))


@pytest.mark.parametrize(("model", "train", "axes"), [DATA_AND_TENSOR, MESHES[1]], ids=str)
def test_tokens_are_exchanged_and_expert_weights_are_not(model, train, axes):
    """Each device has its own share of 8 experts' matrices, 16 x D over tp.

    D is the width that experts read and write, which is also what devices exchange.
    """
    job = config(model, train, **axes)
    text, width = hlo(setup(job)), job.model.expert_embed_dim
    exchanged = [shape for shape, kind, _ in collectives_in_loops(text) if kind == "all-to-all"]
    assert any(re.match(rf"\(?f32\[[\d,]*,{width}\]", shape) for shape in exchanged), exchanged
    assert width == 32 or not any(",32]" in shape for shape in exchanged)
    assert re.search(rf"f32\[{8 // axes['ep']},8,{width}\]", text)
    assert not re.search(rf"f32\[8,(8|16),{width}\]", text)


def test_every_assignment_is_counted():
    metrics = on_one_device("softmax")[0]
    assert metrics["side"]["expert_counts"].shape == (3, 2, 8)
    np.testing.assert_array_equal(metrics["side"]["expert_counts"].sum(axis=-1), 2 * 8 * 16 * 3)
    assert not metrics["side"]["dropped"].any()
    metrics = on_one_device("kempnerforge")[0]
    assert np.isnan(metrics["side"]["dropped"][:, ::2]).all()  # dense layers have no metrics
    assert (metrics["side"]["dropped"][:, 1::2] > 0.02).all()


def test_router_biases_follow_load_once_per_update():
    metrics, _, state = on_one_device("deepseek")
    rates = 0.05 * 0.5 * (1 + np.cos(np.pi * np.arange(3) / 8))
    counts = metrics["side"]["expert_counts"]
    moved = np.sign(counts.mean(axis=-1, keepdims=True) - counts) * rates[:, None, None]
    for layer, expected in enumerate(moved.sum(axis=0)):
        bias = state[f"layers.{layer}.mlp.router.expert_bias"]
        np.testing.assert_allclose(bias, expected, atol=1e-7)
