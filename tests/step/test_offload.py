"""Moments in host memory: numbers do not change. The average of the parameters stays on devices."""

import functools

import jax
import numpy as np
import pytest

from jaxforge.checkpoint.restore import starting_state
from jaxforge.config import check
from jaxforge.config.optimizer import OPTIMIZERS
from jaxforge.errors import UserError
from jaxforge.parallel.device_memory import bytes_per_device
from tests.conftest import tiny_config
from tests.helpers import open_checkpoints, progress_of, random_batches, setup


def config_of(optimizer="adamw", *, offload=("optimizer",)):
    return tiny_config(
        train={"offload": offload, "ema_decay": 0.9}, optimizer={"name": optimizer},
        distributed={"dp_shard": 2, "tp": 2},
    )  # fmt: skip


def on_host(tree):
    """Return the names of arrays in host memory."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, leaf in leaves
        if leaf.sharding.memory_kind == "pinned_host"
    }


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, (a, b)))


def assert_near(a, b):
    """Check equality up to the last digits: XLA fuses other operations."""
    near = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-8)
    jax.tree.map(near, *map(jax.device_get, (a, b)))


@pytest.fixture(scope="module")
def three_updates():
    """Return AdamW runs without and with offloaded moments; the second step is bad."""
    batches = random_batches(config_of(), 3)
    result = []
    for offload in ((), ("optimizer",)):
        program = setup(config_of(offload=offload))
        state, _ = program.run(program.state(), batches[:1])
        head = state.params["output_head"]["proj"]["weight"]
        valid = np.asarray(head)
        state.params["output_head"]["proj"]["weight"] = head.at[0, 0].set(np.nan)
        state, _ = program.run(state, batches[1:2])
        assert int(state.guard.total) == 1
        state.params["output_head"]["proj"]["weight"] = jax.device_put(valid, head.sharding)
        result.append((program, *program.run(state, batches[2:])))
    return result


@pytest.mark.slow
def test_offload_does_not_change_losses_or_state(three_updates):
    (_, plain, plain_metrics), (_, offloaded, metrics) = three_updates
    assert_near(offloaded.params, plain.params)
    assert_near(offloaded.opt_state, plain.opt_state)
    assert_near(offloaded.ema, plain.ema)
    assert_same(metrics["loss"], plain_metrics["loss"])


def test_moments_of_matrices_stay_on_host(three_updates):
    program, state, _ = three_updates[1]
    names = on_host(state.opt_state)
    assert names == on_host(program.abstract_state().opt_state)
    assert {name.rsplit(".", 1)[0] for name in names} >= {"1.mu.layers.attention.q_proj"}
    assert not any("norm" in name for name in names)
    assert not on_host((state.params, state.ema))
    plain = three_updates[0][1]
    assert bytes_per_device(state.opt_state) < bytes_per_device(plain.opt_state) / 50


def test_restart_restores_moments_on_host(three_updates, tmp_path):
    program, state, _ = three_updates[1]
    saved = open_checkpoints(tmp_path, program)
    saved.save(progress_of(state), state)
    saved.wait()
    with jax.set_mesh(program.mesh):
        restored, _ = starting_state(program, saved)
    saved.close()
    assert on_host(restored.opt_state) == on_host(state.opt_state)
    assert_same(restored.opt_state, state.opt_state)
    assert not on_host(restored.ema)
    assert_same(restored.ema, state.ema)


@pytest.mark.slow  # the code is the same for every optimizer
def test_offload_works_with_muon():
    batches = random_batches(config_of("muon"), 2)
    states = []
    for offload in ((), ("optimizer",)):
        program = setup(config_of("muon", offload=offload))
        states.append(program.run(program.state(), batches)[0])
    assert_near(states[1].params, states[0].params)
    assert any("momentum" in name for name in on_host(states[1].opt_state))


def test_unsupported_offload_is_refused(own_names):
    OPTIMIZERS.register("mine")(lambda *_: None)
    with pytest.raises(UserError, match="moments stay on the device"):
        check(tiny_config(train={"offload": ["optimizer"]}, optimizer={"name": "mine"}), 1)
    with pytest.raises(ValueError, match="moments of a floating-point dtype"):
        tiny_config(train={"offload": ["optimizer"], "opt_state_dtype": "8bit"})
