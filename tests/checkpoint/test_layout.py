"""Contents of a checkpoint for every optimizer: names, chunks, and a complete restore."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts

from jaxforge.checkpoint import layout
from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.checkpoint.restore import starting_state
from jaxforge.optim.optimizer import build_optimizer
from jaxforge.state.progress import Progress
from jaxforge.state.train_state import Counts, GuardState, TrainState
from tests.conftest import tiny_config
from tests.helpers import open_checkpoints, progress_of, random_batches, setup
from torch_compat.formats import ocdbt

FIELDS = {
    "adamw": {"updates", "mu", "nu"},
    "lion": {"updates", "mu"},
    "muon": {"updates", "momentum", "mu", "nu"},
    "schedule_free_adamw": {"updates", "nu", "x", "z", "weight_sum"},
}


def config_of(name, **distributed):
    return tiny_config(
        optimizer={"name": name},
        scheduler={"name": "none" if name == "schedule_free_adamw" else "cosine"},
        train={"batch_size": 8 // distributed.get("dp_shard", 1)},
        distributed={"dp_shard": 1, **distributed},
    )


@functools.cache
def trained(name):
    """Return a run, its state after 2 steps, the parameters after 4 steps and the batches."""
    program = setup(config_of(name))
    batches = random_batches(program.config, 4)
    state, _ = program.run(program.state(), batches[:2])
    copy = jax.device_get(state)
    state, _ = program.run(state, batches[2:])
    return program, copy, jax.device_get(state.params), batches


def on_device(program, state):
    with jax.set_mesh(program.mesh):
        return jax.device_put(state, jax.tree.map(lambda a: a.sharding, program.state()))


@pytest.mark.parametrize(
    "name", [pytest.param("lion", marks=pytest.mark.slow), "muon", "schedule_free_adamw"]
)
def test_run_resumes_bit_exactly(tmp_path, name):
    program, state, final, batches = trained(name)
    saved = open_checkpoints(tmp_path, program)
    saved.save(progress_of(state), on_device(program, state))
    saved.close()
    restored = restore(tmp_path, program)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored), state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    restored, _ = program.run(restored, batches[2:])
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored.params), final)


def test_partial_moments_restore_onto_another_mesh(tmp_path):
    program, state, final, batches = trained("muon")
    saved = open_checkpoints(tmp_path, program)
    saved.save(progress_of(state), on_device(program, state))
    saved.close()
    target = setup(config_of("muon", dp_shard=2, tp=2))
    restored = restore(tmp_path, target)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored), state)
    restored, _ = target.run(restored, batches[2:])
    close = functools.partial(np.testing.assert_allclose, atol=2e-4)
    jax.tree.map(close, jax.device_get(restored.params), final)


@pytest.mark.parametrize("rows", [16, 200])
def test_optimizer_with_empty_moments_restores(tmp_path, rows):
    """Muon without parameters for AdamW, and with all parameters for AdamW."""
    axes = {"layers": {"weight": ("layers", "mlp", "embed")}}
    params = {"layers": {"weight": jnp.ones((2, rows, 16))}}
    tx = build_optimizer(config_of("muon"), axes)
    _, opt_state = tx.update(params, tx.init(params), params)
    empty = opt_state[1].mu if rows == 16 else opt_state[1].momentum
    assert empty == {}
    counts = Counts.of(Progress())
    state = TrainState(
        jnp.int32(1), params, (opt_state[0], opt_state[1]), GuardState.fresh(), counts
    )
    saved = Checkpoints(tmp_path, config_of("muon").checkpoint, axes)
    saved.save(Progress(step=1), state)
    saved.wait()
    like = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state
    )
    restored, _ = saved.restore(like, 1)
    saved.close()
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)


@pytest.mark.parametrize("name", FIELDS)
def test_optimizer_fields_are_named_and_chunked_by_layer(name):
    program = setup(config_of(name))
    tree = layout.to_tree(program.abstract_state())
    assert tree["optimizer"].keys() == FIELDS[name]
    args = layout.save_args(tree, program.model.axes)
    assert jax.tree.structure(args) == jax.tree.structure(tree)
    for path, arg in jax.tree_util.tree_leaves_with_path(args):
        keys = [key.key for key in path]
        assert arg.shard_axes == ((0,) if "layers" in keys else ()), keys


def test_experts_are_stored_as_chunks(tmp_path):
    experts = {"num_experts": 4, "moe_top_k": 2, "n_layers": 2}
    program = setup(tiny_config(model=experts, distributed={"ep": 2, "dp_shard": 1}))
    saved = open_checkpoints(tmp_path, program)
    saved.save(Progress(), program.state())
    saved.close()
    store = tmp_path / "checkpoints" / "step_0" / "state"
    weight = ts.open(ocdbt.spec(store, "params.layers.mlp.experts.up_proj.weight")).result()
    assert weight.shape[:2] == (2, 4)
    assert weight.chunk_layout.write_chunk.shape == (1, 1, *weight.shape[2:])


def restore(path, program):
    saved = open_checkpoints(path, program)
    with jax.set_mesh(program.mesh):
        state, progress = starting_state(program, saved)
    saved.close()
    assert progress == dataclasses.replace(progress_of(state), run_id=progress.run_id)
    return state
