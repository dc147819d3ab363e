"""Guarantees of every `optimizer.name`."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.config.optimizer import BUILT_IN, OPTIMIZERS, OptimizerConfig
from jaxforge.optim.chain import updates_made
from jaxforge.optim.optimizer import build_optimizer
from tests.conftest import tiny_config
from tests.helpers import random_batches, setup
from tests.optim import problem

NAMES = OPTIMIZERS.names()
LR = 1e-3
every_optimizer = pytest.mark.parametrize("name", NAMES)
few_optimizers = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in ("adamw", "muon")))
        for name in NAMES
    ],
)


def config_of(name, **optimizer):
    """Return a config with a warm-up of four updates."""
    averages = name == "schedule_free_adamw"
    warmup = {name: {"warmup_steps": 4}} if averages else {}
    return tiny_config(
        optimizer={"name": name, **warmup, **optimizer},
        scheduler={"name": "none"} if averages else {},
    )


@functools.cache
def make(name, **optimizer):
    return build_optimizer(config_of(name, **optimizer), problem.AXES)


def assert_close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-7), a, b)


def test_every_setting_of_a_table_is_compared():
    """A new optimizer is a file, an entry of `BUILT_IN` and a table of its name (CONTRIBUTING)."""
    for name in BUILT_IN:
        importlib.import_module(f"jaxforge.optim.{name}")
        table = OptimizerConfig.model_fields.get(name)
        settings = () if table is None else table.annotation.model_fields
        assert {f"{name}.{key}" for key in settings} <= CONSTANTS[name].keys() | INACTIVE


@few_optimizers
def test_lr_scale_multiplies_the_rate(name):
    scaled = problem.run(make(name, lr=LR), 10, lr_scale=2)
    assert_close(scaled, problem.run(make(name, lr=2 * LR), 10))
    change = scaled[0]["norm"] - problem.run(make(name, lr=LR), 10)[0]["norm"]
    assert np.abs(change).max() > 1e-3


@every_optimizer
def test_zero_rate_changes_only_moments_and_count(name):
    params, (_, state, *_) = problem.run(make(name, lr=LR), 5, lr_scale=0.0)
    jax.tree.map(np.testing.assert_array_equal, params, problem.initial())
    assert state.updates == 5
    moments = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
    assert all(np.abs(leaf).max() > 0 for leaf in moments)


@every_optimizer
def test_count_increases_only_with_updates(name):
    params = problem.initial()
    init, update = problem.programs_of(make(name, lr=LR))
    state = init(params)
    for n, grads in enumerate(problem.gradients(3)):
        update(params, state, grads, 1.0)  # discarded
        assert updates_made(state) == n
        _, state = update(params, state, grads, 1.0)
    assert updates_made(state) == 3


@every_optimizer
def test_warmup_follows_config(name):
    """Norm weights have no decay: a first step from zero moments is as long as the rate."""
    params, _ = problem.run(make(name, lr=LR), 2)
    step = np.abs(params["norm"] - problem.initial()["norm"]).max()
    # f(0) = 0 and f(1) = 1/4; schedule-free: 1/4 and 2/4, mostly in y.
    low, high = (0.4, 0.8) if name == "schedule_free_adamw" else (0.15, 0.36)
    assert low < step / LR < high


@every_optimizer
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_moments_have_configured_dtype(name, dtype):
    config = config_of(name)
    train = config.train.model_copy(update={"opt_state_dtype": dtype})
    tx = build_optimizer(config.model_copy(update={"train": train}), problem.AXES)
    params = problem.initial()
    first = jax.eval_shape(tx.init, params)
    assert jax.eval_shape(tx.update, params, first, params)[1] == first
    fields = first[1]._asdict()
    moments = [leaf for key in fields.keys() & {"mu", "nu", "momentum"} for leaf in
               jax.tree.leaves(fields[key])]  # fmt: skip
    assert {leaf.dtype for leaf in moments} == {jnp.dtype(dtype)}


ADAM = {"betas": (0.5, 0.5), "eps": 1e-2, "weight_decay": 1.0}
CONSTANTS = {
    "adamw": ADAM,
    "lion": {"betas": (0.0, 0.5), "weight_decay": 1.0, "cautious_weight_decay": True},
    "muon": {
        **ADAM, "muon.momentum": 0.5, "muon.ns_steps": 2, "muon.adam_lr": 1e-2,
        "muon.nesterov": True, "muon.variant": "normuon", "muon.scale": "rms",
        "cautious_weight_decay": True,
    },
    "schedule_free_adamw": {**ADAM, "schedule_free_adamw.warmup_steps": 2},
    "soap": {
        **ADAM, "soap.precondition_frequency": 1, "soap.max_precond_dim": 8,
        "soap.shampoo_beta": 0.5, "cautious_weight_decay": True,
    },
}  # fmt: skip


INACTIVE = {"muon.beta2"}  # without NorMuon


@functools.cache
def three_updates(name, key=None):
    """Return a Muon parameter and a decaying AdamW parameter after three updates."""
    constant = {} if key is None else {key: CONSTANTS[name][key]}
    if key and "." in key:
        table, _, setting = key.partition(".")
        constant = {table: {setting: CONSTANTS[name][key]}}
    axes, params = (
        {k: tree[k] for k in ("square", "longer")} for tree in (problem.AXES, problem.initial())
    )
    return problem.run(build_optimizer(config_of(name, **constant), axes), 3, params)[0]


@pytest.mark.parametrize(("name", "key"), [(n, key) for n in NAMES for key in CONSTANTS[n]])
def test_every_config_constant_changes_updates(name, key):
    params = three_updates(name, key)
    change = jax.tree.map(lambda a, b: np.abs(a - b).max(), params, three_updates(name))
    assert max(jax.tree.leaves(change)) > 1e-5


@functools.cache
def model_with(name):
    return setup(config_of(name))


@few_optimizers
def test_model_overfits_a_batch(name):
    program = model_with(name)
    _, metrics = program.run(program.state(), random_batches(program.config, 1) * 15)
    assert metrics["loss"][-1] < metrics["loss"][0] - 0.5


@every_optimizer
def test_nonfinite_step_changes_only_counts(name):
    program = model_with(name)
    batches = random_batches(program.config, 3)
    state, _ = program.run(program.state(), batches[:2])
    weight = state.params["output_head"]["proj"]["weight"]
    state.params["output_head"]["proj"]["weight"] = weight.at[0, 0].set(jnp.nan)
    before = jax.device_get((state.params, state.opt_state))
    state, metrics = program.run(state, batches[2:])
    assert np.isnan(metrics["loss"][0])
    assert int(state.guard.total) == 1
    after = jax.device_get((state.params, state.opt_state))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert updates_made(state.opt_state) == 2
