"""Optimizers of optax by their names, compared with optax."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxforge.config.optimizer import OptimizerConfig
from jaxforge.errors import UserError
from jaxforge.optim.optimizer import build_optimizer
from tests.conftest import tiny_config
from tests.helpers import assert_resumes_bit_exactly, random_batches, setup
from tests.optim import problem

NO_RULES = {"scale_by_learning_rate", "scale_by_rprop", "scale_by_madgrad"}
OTHER_INPUTS = {  # the loss, a function of it, another optimizer, or a constant rate
    "optax.lbfgs", "optax.optimistic_adam", "optax.rprop", "optax.sm3", "optax.contrib.dpsgd",
    "optax.contrib.momo", "optax.contrib.momo_adam", "optax.contrib.schedule_free",
    "optax.contrib.sophia",
}  # fmt: skip

OF_EACH_KIND = {  # with and without decay, with a mask, and with state of other shapes
    "optax.adafactor", "optax.adan", "optax.sgd", "optax.contrib.ademamix",
    "optax.contrib.madgrad", "optax.contrib.muon",
}  # fmt: skip


def names():
    """Return the names of optax's functions that take a learning rate."""
    return [
        f"{prefix}.{name}"
        for prefix, module in (("optax", optax), ("optax.contrib", optax.contrib))
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and name not in NO_RULES
        and not name.startswith("_")
        and "learning_rate" in inspect.signature(function).parameters
    ]


def factory(name):
    return getattr(optax.contrib if "contrib" in name else optax, name.rpartition(".")[2])


def config_of(name, **sections):
    optimizer = {"name": name, "lr": 1e-2, **sections.pop("optimizer", {})}
    return tiny_config(optimizer=optimizer, train={"grad_clip_norm": 1e9}, **sections)


@pytest.mark.parametrize(
    "name",
    [name if name in OF_EACH_KIND else pytest.param(name, marks=pytest.mark.slow)
     for name in sorted(set(names()) - OTHER_INPUTS)],
)  # fmt: skip
def test_named_optimizer_equals_that_of_optax(name):
    """Weights decay at the learning rate, vectors not; three updates of a warm-up."""
    config = config_of(name, scheduler={"name": "constant", "warmup_steps": 4})
    params, _ = problem.run(build_optimizer(config, problem.AXES), 3)

    def rate(n):
        return 1e-2 * jnp.minimum(n / 4, 1)

    takes = inspect.signature(factory(name)).parameters
    mask = {"mask", "weight_decay_mask"} & takes.keys()
    is_decayed = jax.tree.map(lambda decay: decay > 0, problem.DECAY)
    own = {}
    if "weight_decay" in takes:
        own = {"weight_decay": 0.1, mask.pop(): is_decayed} if mask else {"weight_decay": 0.0}
    is_ours = "weight_decay" not in own or not own["weight_decay"]
    tx = factory(name)(learning_rate=rate, **own)
    expected = jax.tree.map(jnp.asarray, problem.initial())
    state = tx.init(expected)

    @jax.jit
    def update(params, state, grads, n):
        updates, state = tx.update(grads, state, params)
        if is_ours:
            updates = jax.tree.map(
                lambda u, p, decay: u - rate(n) * decay * p, updates, params, problem.DECAY
            )
        return optax.apply_updates(params, updates), state

    for n, grads in enumerate(problem.gradients(3)):
        expected, state = update(expected, state, grads, n)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7),
                 params, jax.device_get(expected))  # fmt: skip


@pytest.mark.parametrize("name", sorted(OTHER_INPUTS & set(names())))
def test_optimizer_with_other_inputs_is_refused(name):
    with pytest.raises(UserError, match="cannot be used by name: register a builder of your own"):
        build_optimizer(config_of(name), problem.AXES)


def test_options_are_arguments():
    plain = build_optimizer(config_of("optax.adan"), problem.AXES)
    other = build_optimizer(
        config_of("optax.adan", optimizer={"options": {"b3": 0.5}}), problem.AXES
    )
    change = jax.tree.map(lambda a, b: np.abs(a - b).max(),
                          problem.run(plain, 3)[0], problem.run(other, 3)[0])  # fmt: skip
    assert max(jax.tree.leaves(change)) > 1e-4


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("optax.adamv", {}, 'has no such optimizer; did you mean "optax.adam'),
        ("optax.adan", {"b9": 1.0}, r'optax.adan takes b1, b2, .*, not "b9"'),
        ("optax.adan", {"weight_decay": 1.0}, "set optimizer.lr and optimizer.weight_decay"),
    ],
)
def test_mistakes_are_explained(name, options, message):
    with pytest.raises(UserError, match=message):
        build_optimizer(config_of(name, optimizer={"options": options}), problem.AXES)


def test_options_need_an_optimizer_of_optax():
    with pytest.raises(ValueError, match='name = "adamw" is not one of them: remove options'):
        OptimizerConfig(options={"b1": 0.9})


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["optax.contrib.muon", "optax.adafactor", "optax.contrib.ademamix"]
)
def test_run_is_sharded_and_resumes(name, tmp_path):
    """State with other shapes than parameters, or of some of them, on two devices."""
    job = config_of(name, distributed={"dp_shard": 2})
    program = setup(job)
    batches = random_batches(job, 2)
    state, metrics = program.run(program.state(), batches[:1])
    alone = setup(config_of(name))
    _, expected = alone.run(alone.state(), batches[:1])
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-6)
    assert_resumes_bit_exactly(program, state, batches[1:], tmp_path)
