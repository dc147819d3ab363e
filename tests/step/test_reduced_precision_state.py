"""Steps with bfloat16 parameters and 8-bit moments: meshes, restarts, bad steps and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.checkpoint.restore import starting_state
from jaxforge.config import check
from jaxforge.config.optimizer import OPTIMIZERS
from jaxforge.errors import UserError
from tests.conftest import tiny_config
from tests.helpers import open_checkpoints, random_batches, save_checkpoint, setup


def config_of(rounding="kahan", opt_state_dtype="8bit", **axes):
    train = {
        "param_dtype": "bfloat16",
        "param_rounding": rounding,
        "opt_state_dtype": opt_state_dtype,
    }
    model = {"n_layers": 1, "n_kv_heads": 4}
    return tiny_config(model=model, train=train, distributed={"dp_shard": 1, **axes})


SPLIT = {"dp_shard": 2, "tp": 2}


def bits(state):
    """Return the bits of all arrays, so that NaNs compare equal."""
    parts = jax.device_get((state.params, state.opt_state))
    return jax.tree.map(lambda a: np.atleast_1d(a).view(np.uint8), parts)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def start(path, program):
    saved = open_checkpoints(path, program)
    with jax.set_mesh(program.mesh):
        return starting_state(program, saved)[0]


@pytest.fixture(scope="module")
def halfway(tmp_path_factory):
    """Return a checkpoint after two updates, and losses and state after two more."""
    path, program = tmp_path_factory.mktemp("run"), setup(config_of(**SPLIT))
    batches = random_batches(program.config, 4)
    state, _ = program.run(program.state(), batches[:2])
    save_checkpoint(program, state, path)
    saved = bits(state)
    state, metrics = program.run(state, batches[2:])
    return path, saved, batches[2:], bits(state), metrics["loss"]


@pytest.mark.slow
def test_restart_is_bit_exact(halfway):
    path, saved, batches, after, _ = halfway
    program = setup(config_of(**SPLIT))
    state = start(path, program)
    assert_same(bits(state), saved)
    assert_same(bits(program.run(state, batches)[0]), after)


def test_bad_step_changes_nothing(halfway):
    path, _, batches, _, _ = halfway
    program = setup(config_of(**SPLIT))
    state = start(path, program)
    head = state.params["output_head"]["proj"]["weight"]
    state.params["output_head"]["proj"]["weight"] = head.at[0, 0].set(jnp.nan)
    before = bits(state)
    state, _ = program.run(state, batches[1:])
    assert int(state.guard.total) == 1
    assert_same(before, bits(state))


@pytest.mark.slow
def test_run_resumes_with_another_mesh_and_rounding(halfway, tmp_path):
    """Losses are close: the order of sums differs, and both rounding methods are unbiased."""
    path, saved, batches, _, losses = halfway
    program = setup(config_of("stochastic"))
    state = start(path, program)
    params, (*links, _) = saved
    assert_same(bits(state), (params, tuple(links)))
    assert jax.tree.map(lambda a: a.sharding, state.opt_state) == program.shardings.opt_state
    save_checkpoint(program, state, tmp_path)
    uninterrupted, metrics = program.run(state, batches)
    np.testing.assert_allclose(metrics["loss"], losses, rtol=2e-3)
    assert_same(bits(uninterrupted), bits(program.run(start(tmp_path, program), batches)[0]))
    kahan = start(tmp_path, setup(config_of()))
    assert not any(np.any(c) for c in jax.tree.leaves(kahan.opt_state[-1].compensation))


def staged(pp, dp_shard):
    """Return a config of three layers: one of two stages has a padding row."""
    return tiny_config(
        model={"n_layers": 3},
        train={"opt_state_dtype": "8bit", "grad_accum_steps": 2, "batch_size": 4 // dp_shard},
        distributed={"pp": pp, "dp_shard": dp_shard},
    )


@pytest.mark.slow
def test_8bit_checkpoint_resumes_on_stages_and_single_device(tmp_path):
    """Moments are equal except where the order of sums crosses a quantization step."""
    program, alone = setup(staged(2, 2)), setup(staged(1, 1))
    batches = random_batches(program.config, 4)
    state, _ = program.run(program.state(), batches[:2])
    save_checkpoint(program, state, tmp_path)
    after, metrics = program.run(state, batches[2:])
    assert_same(bits(program.run(start(tmp_path, program), batches[2:])[0]), bits(after))
    result = start(tmp_path, alone)
    expected, _ = alone.run(alone.state(), batches[:2])
    pairs = zip(
        *(jax.tree.leaves(jax.device_get(s.opt_state)) for s in (result, expected)), strict=True
    )
    differ = [np.mean(a != b) for a, b in pairs if a.dtype in (np.int8, np.uint8)]
    assert max(differ) < 0.01
    _, alone_metrics = alone.run(result, batches[2:])
    np.testing.assert_allclose(alone_metrics["loss"], metrics["loss"], rtol=1e-5)


def test_moments_of_another_dtype_raise(tmp_path):
    program, wide = setup(config_of()), setup(config_of(opt_state_dtype="float32"))
    save_checkpoint(program, program.state(), tmp_path)
    with pytest.raises(UserError, match=r"another optimizer than train\.opt_state_dtype asks for"):
        start(tmp_path, wide)


def test_split_blocks_of_8bit_moments_raise():
    with pytest.raises(UserError, match=r"o_proj.weight have 2 blocks .* dp_shard = 4\. Change"):
        setup(config_of(dp_shard=4)).state()


def test_8bit_state_raises_for_custom_optimizer(own_names):
    OPTIMIZERS.register("mine")(lambda *_: None)
    config = tiny_config(train={"opt_state_dtype": "8bit"}, optimizer={"name": "mine"})
    with pytest.raises(UserError, match=r"only adamw, lion"):
        check(config, 1)
    check(tiny_config(optimizer={"name": "mine"}), 1)
