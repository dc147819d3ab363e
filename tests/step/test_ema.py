"""Exponential moving average of the parameters, compared with torch and with its formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from jaxforge.optim.ema import build_average
from jaxforge.step import train_step
from jaxforge.step.train_step import Controls
from tests.conftest import tiny_config
from tests.helpers import lowered, new_setup, random_batches, setup

DECAY = 0.9
SMALL = {"n_layers": 1, "dim": 16, "n_heads": 2, "n_kv_heads": 1, "vocab_size": 32}
EXPERTS = {**SMALL, "n_layers": 2, "num_experts": 4, "moe_top_k": 2, "moe_router": "sigmoid_topk"}


def config(model=SMALL, optimizer=None, distributed=None, **train):
    train = {"ema_decay": DECAY, "batch_size": 4, **train}
    axes = {"dp_shard": 1, **(distributed or {})}
    return tiny_config(model=model, train=train, optimizer=optimizer or {}, distributed=axes)


def trajectory(program, batches):
    """Return the parameters before each step and after the last one, and the last state."""
    state = program.state()
    params = [jax.device_get(state.params)]
    for batch in batches:
        state, _ = program.run(state, [batch])
        params.append(jax.device_get(state.params))
    return params, state


def averaged(params, decay=DECAY):
    """Return the average over parameters in float64, from the first ones."""
    mean = jax.tree.map(np.float64, params[0])
    for new in params[1:]:
        mean = jax.tree.map(lambda m, p: decay * m + (1 - decay) * p, mean, new)
    return mean


def assert_close(result, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7),
        jax.device_get(result), expected,
    )  # fmt: skip


@pytest.mark.parametrize("copies_first", [False, True])
def test_average_equals_that_of_torch(copies_first):
    """With ema_start = 1, as torch by default: its first update copies the parameters."""
    program = setup(config(ema_start=int(copies_first)))
    params, state = trajectory(program, random_batches(program.config, 4))
    leaves = [[torch.tensor(leaf) for leaf in jax.tree.leaves(p)] for p in params]
    module = torch.nn.ParameterList(leaves[0])
    model = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    model.n_averaged.fill_(0 if copies_first else 1)
    for new in leaves[1:]:
        with torch.no_grad():
            torch._foreach_copy_(list(module), new)
        model.update_parameters(module)
    expected = [p.detach().numpy() for p in model.module]
    assert_close(jax.tree.leaves(state.ema), expected)


def test_interval_and_start_select_updates():
    program = setup(config(ema_interval=3, ema_start=2))
    params, state = trajectory(program, random_batches(program.config, 8))
    assert_close(state.ema, averaged([params[2], params[3], params[6]]))


def test_skipped_step_leaves_average_unchanged():
    """Skipped steps are not counted: the interval continues after them."""
    program = setup(config(ema_interval=2))
    first, second, third = random_batches(program.config, 3)
    state, _ = program.run(program.state(), [first])
    before = jax.device_get(state)
    with jax.set_mesh(program.mesh):
        state, _ = program.step(state, program.put(second), Controls(apply=jnp.array(False)))
    no_labels = {**second, "labels": np.full_like(second["labels"], -100)}
    state, metrics = program.run(state, [no_labels])
    assert metrics["skipped"] == [2]
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.ema), before.ema)
    state, _ = program.run(state, [third])
    assert_close(state.ema, averaged([before.ema, jax.device_get(state.params)]))


def test_average_has_trained_parameters_alone():
    program = setup(config(optimizer={"freeze_patterns": ["token_embedding.*"]}))
    params, state = trajectory(program, random_batches(program.config, 3))
    assert params[0].keys() - state.ema.keys() == {"token_embedding"}
    expected = averaged(params)
    frozen = jax.device_get(state.averaged_variables)["token_embedding"]
    jax.tree.map(np.testing.assert_array_equal, frozen, params[0]["token_embedding"])
    assert_close(state.averaged_variables, expected)


MESHES = [
    pytest.param(
        {**SMALL, "n_layers": 5}, {"pp": 2, "dp_shard": 2}, {}, id="uneven-stages"
    ),
    *(
        pytest.param(*values, marks=pytest.mark.slow, id=name)
        for name, *values in [
            ("fsdp-tp", SMALL, {"dp_shard": 2, "dp_replicate": 2, "tp": 2}, {}),
            ("fsdp", SMALL, {"dp_shard": 4}, {"grad_sync": "microbatch"}),
            ("cp", SMALL, {"cp": 2, "dp_shard": 2}, {}),
            ("interleaved", {**SMALL, "n_layers": 4},
             {"pp": 2, "pp_schedule": "interleaved_1f1b", "dp_shard": 2}, {}),
            ("experts", EXPERTS, {"ep": 2, "dp_shard": 2}, {}),
            ("experts-stages", EXPERTS, {"pp": 2, "ep": 2, "tp": 2}, {}),
            ("bfloat16", SMALL, {"dp_shard": 2, "tp": 2}, {"param_dtype": "bfloat16"}),
            ("8bit", SMALL, {"dp_shard": 2}, {"opt_state_dtype": "8bit"}),
        ]
    ),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("model", "axes", "train"), MESHES)
def test_average_on_mesh_equals_formula(model, axes, train):
    train = {"grad_accum_steps": 2, "batch_size": 2, **train}
    program = setup(config(model, distributed=axes, **train))
    params, state = trajectory(program, random_batches(program.config, 3))
    assert {leaf.dtype for leaf in jax.tree.leaves(state.ema)} == {np.dtype("float32")}
    assert_close(state.ema, averaged(params))
    same = jax.tree.map(lambda a, b: a.sharding == b.sharding, state.ema, state.params)
    assert all(jax.tree.leaves(same))


def test_bfloat16_average_is_unbiased():
    """Rounded to the nearest number, the average would stay at 1."""
    train = config(ema_decay=0.99, ema_dtype="bfloat16").train
    average = jax.jit(build_average(train))
    ema = {"weight": jnp.ones((256, 256), jnp.bfloat16)}
    params = {"weight": jnp.full((256, 256), 1.1, jnp.float32)}
    for update in range(1, 101):
        ema = average(ema, params, jnp.int32(update))
    assert ema["weight"].dtype == jnp.bfloat16
    expected = 1.1 - 0.1 * 0.99**100
    # Each update rounds by less than one digit, 2^-7; the standard error is that of 65,536 values.
    error = 2**-7 * 10 / 256
    assert abs(float(jnp.mean(ema["weight"].astype(jnp.float32))) - expected) < error


def test_state_and_step_without_average_are_unchanged(monkeypatch):
    job = config(ema_decay=0.0)
    program = setup(job)
    assert not jax.tree.leaves(program.abstract_state().ema)
    text = lowered(program).as_text()
    monkeypatch.setattr(train_step, "build_average", lambda *_: lambda ema, *__: ema)
    assert lowered(new_setup(job)).as_text() == text
    assert lowered(setup(config())).as_text() != text
