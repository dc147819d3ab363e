"""Lion compared with its formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.optim.lion import scale_by_lion
from tests.optim import problem

BETAS = (0.9, 0.95)
N = 100


def make(schedule=problem.rate, dtype=jnp.float32):
    return problem.rule(scale_by_lion(BETAS, jnp.dtype(dtype)), schedule=schedule)


def update(p, g, state, k, decay):
    (b1, b2), m, lr = BETAS, state.get("mu", np.zeros_like(p)), float(problem.rate(k - 1))
    state["mu"] = b2 * m + (1 - b2) * g
    return p * (1 - lr * decay) - lr * np.sign(b1 * m + (1 - b1) * g)


def test_hundred_updates_match_formula():
    expected, states = problem.reference(update, N)
    params, state = problem.run(make(), N)
    problem.assert_params(params, expected, atol=1e-6)
    problem.assert_moments(state.mu, states, "mu", rtol=1e-6)
    assert state.updates == N


def test_bfloat16_moment_is_updated_in_float32():
    expected, states = problem.reference(update, 5, problem.BFLOAT16)
    params, state = problem.run(make(dtype=jnp.bfloat16), 5)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.mu)} == {np.dtype(problem.BFLOAT16)}
    problem.assert_params(params, expected, atol=1e-7)
    problem.assert_moments(state.mu, states, "mu", rtol=2**-8)


@pytest.mark.parametrize("size", [1e-30, 1e20])
def test_step_size_does_not_depend_on_gradient_size(size):
    params = {"w": np.zeros((2, 2), np.float32)}
    grads = {"w": np.array([[size, -size], [0, size]], np.float32)}
    direction = scale_by_lion(BETAS, jnp.dtype("float32"))
    tx = problem.rule(direction, schedule=lambda n: jnp.float32(0.5), decay={"w": 0.1})
    updates = jax.jit(lambda g, p: tx.update(g, tx.init(p), p)[0])(grads, params)
    np.testing.assert_array_equal(updates["w"], [[-0.5, 0.5], [0, -0.5]])
