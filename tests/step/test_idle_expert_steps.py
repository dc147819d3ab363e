"""Steps that skip experts without tokens: meshes, checkpoints and bad steps."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import tiny_config
from tests.helpers import random_batches, restore_checkpoint, save_checkpoint, setup

MODEL = {"n_layers": 3, "dim": 32, "vocab_size": 64, "num_experts": 16, "moe_top_k": 1,
         "moe_expert_dim": 16, "init_std": 0.3, "mlp_bias": True}  # fmt: skip
STEPS = 4
STAGES = {"grad_sync": "update"}, {"pp": 2, "ep": 2}


def config(train=None, **distributed):
    groups = math.prod(distributed.get(axis, 1) for axis in ("dp_replicate", "dp_shard", "ep"))
    return tiny_config(
        model=MODEL,
        train={"seq_len": 8, "batch_size": 4 // groups, "grad_accum_steps": 2, **(train or {})},
        optimizer={"skip_idle_experts": True},
        distributed={"dp_shard": 1, **distributed},
    )  # fmt: skip


@functools.cache
def run(job):
    """Return program, final state, all states, and token counts [updates, layers, experts]."""
    program = setup(job)
    batches = random_batches(job, STEPS, dp=4 // job.train.batch_size)
    state, states, counts = program.state(), [], []
    for batch in batches:
        state, metrics = program.run(state, [batch])
        arrays = jax.device_get((state.params, state.opt_state[1]))
        states.append(jax.tree.map(program.model.stack.unstack, arrays[0]["layers"]))
        states[-1] = (
            states[-1],
            {
                name: program.model.stack.unstack(
                    field["layers"]["mlp"]["experts"]["up_proj"]["weight"]
                )
                for name, field in arrays[1]._asdict().items()
                if isinstance(field, dict)
            },
        )
        counts.append(metrics["side"]["expert_counts"][0])
    return program, state, states, np.array(counts)


def up_proj(layers):
    return np.asarray(layers["mlp"]["experts"]["up_proj"]["weight"])


def test_idle_experts_do_not_change():
    _, _, states, counts = run(config())
    idle = counts == 0
    assert idle[1:].any()
    assert (~idle).any()
    for before, after, is_idle in zip(states, states[1:], idle[1:], strict=False):
        for a, b in ((up_proj(before[0]), up_proj(after[0])),
                     *((before[1][name], after[1][name]) for name in after[1])):  # fmt: skip
            np.testing.assert_array_equal(a[is_idle], b[is_idle])
            moved = np.any(a != b, axis=tuple(range(2, a.ndim)))
            assert moved[~is_idle].all()
    np.testing.assert_array_equal(states[-1][1]["expert_updates"], (~idle).sum(axis=0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "axes"),
    [
        ({"grad_sync": "microbatch"}, {"dp_shard": 2, "ep": 2, "tp": 2}),
        STAGES,
    ],
    ids=str,
)
def test_skipped_experts_do_not_depend_on_the_mesh(train, axes):
    _, _, expected, counts = run(config())
    _, _, result, same = run(config(train, **axes))
    np.testing.assert_array_equal(same, counts)
    for item, other in zip(result, expected, strict=True):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=5e-5), item, other
        )
        np.testing.assert_array_equal(item[1]["expert_updates"], other[1]["expert_updates"])


@pytest.mark.slow
def test_checkpoint_of_stages_restores_counts_on_one_device(tmp_path):
    """Stages hold three layers in four rows, a checkpoint in three."""
    train, axes = STAGES
    program, state, states, _ = run(config(train, **axes))
    save_checkpoint(program, state, tmp_path)
    result = restore_checkpoint(run(config())[0], tmp_path, STEPS)
    counts = result.opt_state[1].expert_updates["layers"]["mlp"]["experts"]["up_proj"]["weight"]
    np.testing.assert_array_equal(counts, states[-1][1]["expert_updates"])


def test_rejected_step_does_not_change_expert_counts():
    program, _, _, _ = run(config())
    batches = random_batches(program.config, 2)
    state, _ = program.run(program.state(), batches[:1])
    head = state.params["output_head"]["proj"]["weight"]
    state.params["output_head"]["proj"]["weight"] = head.at[0, 0].set(jnp.nan)
    before = jax.device_get(state.opt_state)
    state, _ = program.run(state, batches[1:])
    assert int(state.guard.total) == 1
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.opt_state))


def test_state_has_no_expert_counts_without_option():
    plain = tiny_config(model=MODEL)
    names = setup(plain).state().opt_state[1]._fields
    assert names == ("updates", "mu", "nu", "mu_scales", "nu_scales")
