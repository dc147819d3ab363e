"""Schedules compared with KempnerForge, and the update of each value."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxforge.config.batch_ramp import Stage
from jaxforge.config.optimizer import SchedulerConfig
from jaxforge.optim.optimizer import build_optimizer
from jaxforge.optim.schedule import build_schedule, learning_rate
from tests.conftest import tiny_config

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "golden_small.json").read_text())
BY_STEP = GOLDEN["schedules_lr_by_step_index"]

SETTINGS = {
    "cosine": {"name": "cosine"},
    "linear": {"name": "linear"},
    "wsd_cosine": {"name": "wsd", "stable_steps": 5, "wsd_decay_type": "cosine"},
    "wsd_linear": {"name": "wsd", "stable_steps": 5, "wsd_decay_type": "linear"},
    "wsd_sqrt": {"name": "wsd", "stable_steps": 5, "wsd_decay_type": "sqrt"},
    "constant": {"name": "constant"},
    "rex": {"name": "rex", "rex_alpha": 2.0},
    "none": {"name": "none"},
    "cosine_decay10": {"name": "cosine", "decay_steps": 10},
}


def schedule_of(max_steps=20, **settings):
    config = SchedulerConfig(**{"warmup_steps": 4, "min_lr_ratio": 0.1, **settings})
    return build_schedule(config, max_steps)


def factors(n, max_steps=20, **settings):
    """Return f(0), ..., f(n - 1)."""
    schedule = schedule_of(max_steps, **settings)
    return np.array([schedule(i) for i in range(n)])


def test_golden_schedules_have_settings():
    assert SETTINGS.keys() == BY_STEP.keys()


@pytest.mark.parametrize("name", BY_STEP)
def test_factors_match_kempnerforge(name):
    golden = BY_STEP[name]
    traced = jax.jit(jax.vmap(schedule_of(**SETTINGS[name])))(jnp.arange(len(golden)))
    np.testing.assert_allclose(traced, golden, rtol=0, atol=1e-6)
    outside = factors(len(golden), **SETTINGS[name])
    np.testing.assert_allclose(outside, golden, rtol=0, atol=1e-6)
    assert traced.dtype == outside.dtype == np.float32


@pytest.mark.parametrize("name", [n for n in SETTINGS if n not in ("constant", "none")])
def test_rate_beyond_end_stays_at_minimum(name):
    schedule = build_schedule(
        SchedulerConfig(warmup_steps=4, min_lr_ratio=0.1, **SETTINGS[name]), 20
    )
    beyond = [schedule(jnp.int32(n)) for n in (20, 21, 1000, 10**8)]
    np.testing.assert_allclose(beyond, 0.1, rtol=1e-6)


@pytest.mark.parametrize("name", ["cosine", "linear", "rex", "wsd"])
def test_default_decay_steps_fill_the_run(name):
    stable = {"stable_steps": 5} if name == "wsd" else {}
    unset, zero, all_left = (
        factors(24, name=name, decay_steps=n, **stable) for n in (None, 0, 11 if stable else 16)
    )
    np.testing.assert_array_equal(zero, unset)
    np.testing.assert_array_equal(all_left, unset)
    assert unset[10] > unset[11]


@pytest.mark.parametrize("name", ["cosine", "linear", "rex", "wsd", "constant"])
def test_warmup_only_run_reaches_peak_without_decay(name):
    np.testing.assert_allclose(factors(5, name=name, max_steps=4), [0, 0.25, 0.5, 0.75, 1])


def test_plateau_until_end_does_not_decay():
    units = factors(24, name="wsd", stable_steps=16)[4:]
    np.testing.assert_array_equal(units, np.ones(20))


@pytest.mark.parametrize("name", ["cosine", "linear", "rex", "wsd", "constant", "none"])
def test_first_update_without_warmup_has_peak_rate(name):
    assert factors(1, name=name, warmup_steps=0)[0] == 1


def test_stable_steps_apply_only_to_wsd():
    np.testing.assert_array_equal(
        factors(20, name="cosine", stable_steps=5), factors(20, name="cosine")
    )


@pytest.mark.parametrize("name", ["cosine", "wsd_linear", "none"])
def test_update_n_uses_rate_of_step_n_minus_one(name):
    """Adam's steps on a constant gradient have exactly the size of the learning rate."""
    scheduler = {"warmup_steps": 4, "min_lr_ratio": 0.1, **SETTINGS[name]}
    optimizer = {"lr": 0.5, "weight_decay": 0.0, "eps": 1e-30}
    config = tiny_config(scheduler=scheduler, optimizer=optimizer)
    tx = build_optimizer(config, {"w": ("norm",)})
    params, grads = {"w": jnp.zeros(1)}, {"w": jnp.ones(1)}
    state, update, steps = tx.init(params), jax.jit(tx.update), []
    for _ in range(20):
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        steps.append(-updates["w"][0])
    np.testing.assert_allclose(steps, 0.5 * np.array(BY_STEP[name][:20]), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(learning_rate(config)(7), 0.5 * BY_STEP[name][7], rtol=1e-6)


@pytest.mark.parametrize("name", ["cosine", "linear", "rex", "wsd", "constant"])
def test_warmup_offset_starts_above_zero(name):
    shifted, usual = (factors(20, name=name, warmup_offset=offset) for offset in (1, 0))
    np.testing.assert_allclose(shifted[:4], [0.25, 0.5, 0.75, 1])
    np.testing.assert_array_equal(shifted[4:], usual[4:])


@pytest.mark.parametrize(
    ("keys", "boundaries"),
    [
        ({}, (4, 4, 20)),
        ({"decay_steps": 10}, (4, 4, 14)),
        ({"stable_steps": 5}, (4, 4, 20)),
        ({"name": "wsd", "stable_steps": 5}, (4, 9, 20)),
        ({"name": "wsd", "stable_steps": 5, "decay_steps": 3}, (4, 9, 12)),
        ({"name": "rex", "warmup_steps": 20}, (20, 20, 21)),
    ],
)
def test_boundaries_match_settings(keys, boundaries):
    assert SchedulerConfig(**{"warmup_steps": 4, **keys}).boundaries(20) == boundaries


RAMP = (Stage(0, 1), Stage(2, 2), Stage(8, 4))


def test_batch_ramp_does_not_change_schedule_in_updates():
    config = SchedulerConfig(warmup_steps=4)
    assert build_schedule(config, 20, RAMP)(3) == build_schedule(config, 20)(3) == 0.75


def test_schedule_of_samples_follows_the_ramp():
    """The warm-up of 4 updates reads 6 microbatches, the decay of 16 updates 56."""
    config = SchedulerConfig(name="linear", warmup_steps=4, min_lr_ratio=0, unit="samples")
    schedule = build_schedule(config, 20, RAMP)
    got = np.asarray(jax.vmap(schedule)(jnp.arange(22)))
    read = np.concatenate([[0], np.cumsum([1] * 2 + [2] * 6 + [4] * 13)])
    want = np.where(np.arange(22) < 4, read / 6, 1 - np.clip((read - 6) / 56, 0, 1))
    np.testing.assert_allclose(got, want, atol=1e-6)
    np.testing.assert_allclose([schedule(n) for n in range(22)], want, atol=1e-6)


def test_samples_equal_updates_without_batch_ramp():
    samples, updates = (factors(22, unit=unit) for unit in ("samples", "updates"))
    np.testing.assert_array_equal(samples, updates)


def test_learning_rate_follows_batch_ramp():
    ramp = [{"grad_accum_steps": 1}, {"start": 3, "grad_accum_steps": 4}]
    train = {"max_steps": 20, "grad_accum_steps": 4, "batch_ramp": ramp}
    scheduler = {"warmup_steps": 4, "unit": "samples"}
    config = tiny_config(train=train, scheduler=scheduler, optimizer={"lr": 0.7})
    np.testing.assert_allclose(learning_rate(config)(3), 0.7 * 3 / 7, rtol=1e-6)


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd_cosine", "constant", "rex"])
def test_schedule_works_beyond_32_bit_steps(name):
    schedule = build_schedule(SchedulerConfig(warmup_steps=10, **SETTINGS[name]), 3_000_000_000)
    factors = [float(jax.jit(schedule)(jnp.int32(n))) for n in (0, 5, 10, 2**31 - 1)]
    assert factors[:3] == pytest.approx([0, 0.5, 1])
    assert 0 < factors[3] <= 1
