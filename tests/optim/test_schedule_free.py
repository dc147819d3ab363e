"""Schedule-free AdamW compared with its formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.optim.schedule import learning_rate, schedule_free_warmup
from jaxforge.optim.schedule_free_adamw import average_steps, scale_by_root_mean_square
from tests.conftest import tiny_config
from tests.optim import problem

BETAS, EPS, LR, WARMUP = (0.9, 0.95), 1e-8, 1e-3, 7
N = 100


def rate(n):
    return LR * schedule_free_warmup(WARMUP)(n)


def make(schedule=rate, dtype=jnp.float32):
    direction = scale_by_root_mean_square(BETAS[1], EPS, jnp.dtype(dtype))
    average = average_steps(BETAS[0], lambda _: problem.DECAY)
    no_decay = jax.tree.map(lambda _: 0.0, problem.DECAY)  # `average_steps` has the decay
    return problem.rule(direction, average, schedule=schedule, decay=no_decay)


def update(p, g, state, k, decay, warmup_steps=WARMUP):
    """Apply the rule of KempnerForge's class; x exists from the first update on."""
    b1, b2 = BETAS
    lr = LR * (min(1, k / warmup_steps) if warmup_steps else 1)
    v = b2 * state.get("nu", np.zeros_like(p)) + (1 - b2) * g * g
    z = state.get("z", p) - lr * g / (np.sqrt(v / (1 - b2**k)) + EPS)
    if decay:
        z = z * (1 - lr * decay)
    weight_sum = state.get("weight_sum", 0.0) + lr * (1 - b1)
    share = lr * (1 - b1) / weight_sum
    x = (1 - share) * state["x"] + share * z if "x" in state else z
    state.update(nu=v, z=z, x=x, weight_sum=weight_sum)
    return (1 - b1) * z + b1 * x


def test_hundred_updates_match_formula():
    expected, states = problem.reference(update, N)
    params, state = problem.run(make(), N)
    problem.assert_params(params, expected, atol=1e-6)
    for name, moments in (("nu", state.nu), ("x", state.x), ("z", state.z)):
        problem.assert_moments(moments, states, name, rtol=1e-5)
    np.testing.assert_allclose(state.weight_sum, states["norm", 0]["weight_sum"], rtol=1e-5)
    assert state.updates == N


def test_state_dtype_applies_to_moment_only():
    params, state = problem.run(make(dtype=jnp.bfloat16), 5)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.nu)} == {np.dtype(problem.BFLOAT16)}
    weights = jax.tree.leaves((state.x, state.z, state.weight_sum))
    assert {leaf.dtype for leaf in weights} == {np.dtype(np.float32)}

    def half(p, g, state, k, decay):
        new = update(p, g, state, k, decay)
        state["nu"] = state["nu"].astype(problem.BFLOAT16)
        return new

    expected, _ = problem.reference(half, 5)
    problem.assert_params(params, expected, atol=2e-7)


def test_weights_in_state_have_dtype_of_parameters():
    half = jax.tree.map(lambda leaf: leaf.astype(problem.BFLOAT16), problem.initial())
    params, state = problem.run(make(), 3, half)
    leaves = jax.tree.leaves((params, state.x, state.z))
    assert {leaf.dtype for leaf in leaves} == {np.dtype(problem.BFLOAT16)}
    assert {leaf.dtype for leaf in jax.tree.leaves(state.nu)} == {np.dtype(np.float32)}


def test_zero_rate_updates_have_no_weight():
    """KempnerForge raises a ZeroDivisionError here."""
    idle = make(lambda n: jnp.where((n < 3) | (n == 8), 0.0, LR))
    params, state = problem.run(idle, 3)
    for tree in (params, state.x, state.z):
        jax.tree.map(np.testing.assert_array_equal, tree, problem.initial())
    assert state.weight_sum == 0
    params, state = problem.run(idle, 4)
    jax.tree.map(np.testing.assert_array_equal, state.x, state.z)  # the mean of a single step
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-8)  # noqa: E731
    jax.tree.map(close, params, state.z)
    assert np.abs(params["norm"] - problem.initial()["norm"]).max() > LR / 2
    # An update at rate zero in between leaves x and z bit-exact.
    before, after = (problem.run(idle, n)[1] for n in (8, 9))
    jax.tree.map(np.testing.assert_array_equal, (before.x, before.z), (after.x, after.z))
    assert before.weight_sum == after.weight_sum


def test_schedule_free_starts_at_first_parameters():
    """Weights may be loaded after the state was created."""
    tx, params = make(), problem.initial()

    @jax.jit
    def first_updates(init_params):
        return tx.update(problem.gradients(1)[0], tx.init(init_params), params)[0]

    updates, expected = map(first_updates, (jax.tree.map(np.zeros_like, params), params))
    jax.tree.map(np.testing.assert_array_equal, updates, expected)
    updates = jax.device_get(updates)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(updates)) < 2 * LR


@pytest.mark.parametrize(("steps", "factors"), [(0, [1, 1, 1]), (2, [0.5, 1, 1]), (1, [1, 1])])
def test_warmup_starts_above_zero_and_is_logged(steps, factors):
    config = tiny_config(
        optimizer={
            "name": "schedule_free_adamw", "lr": 0.5,
            "schedule_free_adamw": {"warmup_steps": steps},
        },
        scheduler={"name": "none"},
    )  # fmt: skip
    rates = [float(learning_rate(config)(n)) for n in range(len(factors))]
    assert rates == [0.5 * factor for factor in factors]
