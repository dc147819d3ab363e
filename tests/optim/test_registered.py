"""Custom update rules and schedules."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxforge.checkpoint import layout
from jaxforge.errors import UserError
from jaxforge.optim.chain import updates_made
from jaxforge.optim.from_optax import from_optax
from jaxforge.optim.optimizer import build_optimizer, decay_groups, register_optimizer
from jaxforge.optim.schedule import learning_rate, register_scheduler, warmup_then
from jaxforge.state.progress import Progress
from jaxforge.state.train_state import Counts, GuardState, TrainState
from jaxforge.step.train_step import Controls
from tests.conftest import tiny_config
from tests.helpers import random_batches, setup
from tests.optim import problem
from torch_compat.checkpoint.optimizer_state import optimizer_layout

pytestmark = pytest.mark.usefixtures("own_names")


@pytest.fixture
def adam_of_optax(own_names):
    @register_optimizer("adam_of_optax")
    def build(config, schedule, axes):
        o = config.optimizer
        mask = jax.tree.map(lambda decay: decay > 0, decay_groups(axes, o))
        return from_optax(
            optax.adamw(schedule, *o.betas, eps=o.eps, weight_decay=o.weight_decay, mask=mask)
        )


def config_of(**sections):
    optimizer = {"name": "adam_of_optax", **sections.pop("optimizer", {})}
    return tiny_config(optimizer=optimizer, **sections)


@pytest.mark.usefixtures("adam_of_optax")
def test_optax_adamw_matches_builtin_adamw():
    """AdamW of optax and the built-in one differ only by rounding."""
    expected, _ = problem.run(build_optimizer(config_of(), problem.AXES), 5)
    program, _ = problem.run(build_optimizer(tiny_config(), problem.AXES), 5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), expected, program
    )


@pytest.mark.usefixtures("adam_of_optax")
def test_optax_state_is_named_and_restored():
    tx = build_optimizer(config_of(), problem.AXES)
    params, opt_state = problem.run(tx, 3)
    assert opt_state[1]._fields == ("updates", "count", "mu", "nu", "count_2")
    assert updates_made(opt_state) == 3
    counters = GuardState.fresh(), Counts.of(Progress())
    state = TrainState(jnp.int32(3), params, opt_state, *counters)
    tree = layout.to_tree(state)
    assert tree["optimizer"].keys() == {"updates", "count", "mu", "nu", "count_2"}
    fresh = TrainState(jnp.int32(0), params, tx.init(params), *counters)
    restored = layout.from_tree(tree, fresh)
    jax.tree.map(np.testing.assert_array_equal, restored, state)


@pytest.mark.usefixtures("adam_of_optax")
def test_lr_scale_multiplies_optax_updates():
    scaled, _ = problem.run(build_optimizer(config_of(), problem.AXES), 2, lr_scale=0)
    jax.tree.map(np.testing.assert_array_equal, scaled, problem.initial())


@pytest.mark.usefixtures("adam_of_optax")
def test_optax_moments_are_sharded_like_parameters():
    program = setup(config_of(train={"batch_size": 4}, distributed={"dp_shard": 2}))
    shardings = program.shardings
    assert shardings.opt_state[1].mu == shardings.params
    state = program.abstract_state()
    with jax.set_mesh(program.mesh):
        (batch,) = random_batches(program.config, 1)
        after, _ = jax.eval_shape(program.step, state, program.put(batch), Controls())
    assert jax.tree.structure(after) == jax.tree.structure(state)


@pytest.mark.usefixtures("adam_of_optax")
def test_optax_state_has_no_pytorch_counterpart():
    with pytest.raises(UserError, match=r'"adam_of_optax": its counterpart in PyTorch'):
        optimizer_layout(config_of())


def test_custom_schedule_sets_learning_rate():
    """The first update of torchtitan's warm-up has rate 1 / warmup_steps."""

    @register_scheduler("from_one")
    def build(config, max_steps, stages):
        return lambda n: jnp.minimum((n + 1) / config.warmup_steps, max_steps / 20)

    rate = learning_rate(tiny_config(scheduler={"name": "from_one"}, optimizer={"lr": 2.0}))
    np.testing.assert_allclose([rate(jnp.int32(n)) for n in (0, 1, 3, 9)], [0.5, 1.0, 2.0, 2.0])


def test_custom_decay_with_warmup_follows_batch_ramp():
    @register_scheduler("straight")
    def build(config, max_steps, stages):
        return warmup_then(lambda p, floor: 1 - (1 - floor) * p, config, max_steps, stages)

    ramp = [{"grad_accum_steps": 1}, {"start": 3, "grad_accum_steps": 4}]
    train = {"grad_accum_steps": 4, "batch_ramp": ramp}
    custom, builtin = (
        learning_rate(tiny_config(train=train, scheduler={"name": name, "unit": "samples"}))
        for name in ("straight", "linear")
    )
    np.testing.assert_array_equal(*([rate(n) for n in range(21)] for rate in (custom, builtin)))
