"""Rows go to their experts and back; what rows without an assignment hold does not matter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.model.dispatch import (
    gather_tokens,
    gather_weights,
    permute_rows,
    sort_assignments,
    sort_by_key,
    sum_by_token,
)

TOKENS, K, KEYS, WIDTH = 12, 3, 5, 4


def drawn():
    """Tokens, the keys of their assignments (some have none), weights, a gradient."""
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((2, TOKENS, WIDTH)).astype(np.float32)
    keys = rng.integers(0, KEYS + 1, (TOKENS, K)).astype(np.int32)
    weights = rng.random((TOKENS, K)).astype(np.float32)
    return x, keys, weights, dy


def there_and_back(x, weights, keys):
    """A function of each row, by its key; rows that have none give what is not a number."""
    assignments, sizes = sort_assignments(keys, KEYS)
    n = TOKENS * K
    key_of_row = jnp.repeat(jnp.arange(KEYS), sizes, total_repeat_length=n)
    rows = jnp.sin(gather_tokens(x, assignments)) * (1 + key_of_row[:, None])
    rows = rows * gather_weights(weights, assignments)[:, None]
    return sum_by_token(_spoiled(rows, jnp.sum(sizes)), assignments)


@jax.custom_vjp
def _spoiled(rows, end):
    """NaN after the last row; what comes back there must not matter either."""
    return jnp.where(jnp.arange(len(rows))[:, None] < end, rows, jnp.nan)


_spoiled.defvjp(
    lambda rows, end: (_spoiled(rows, end), end),
    lambda end, d: (jnp.where(jnp.arange(len(d))[:, None] < end, d, jnp.nan), None),
)


def directly(x, weights, keys):
    factor = jnp.where(keys < KEYS, 1 + keys, 0) * weights
    return jnp.sin(x) * jnp.sum(factor, axis=1, keepdims=True)


def total(f, x, weights, keys, dy):
    return jnp.sum(f(x, weights, keys) * dy)


@pytest.mark.parametrize("full", [False, True], ids=["some have no row", "all have rows"])
def test_there_and_back(full):
    x, keys, weights, dy = drawn()
    keys = keys % KEYS if full else keys
    got, expected = (
        jax.jit(jax.value_and_grad(functools.partial(total, f), (0, 1)))(x, weights, keys, dy)
        for f in (there_and_back, directly)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, expected)


def test_order_is_stable_and_undone():
    keys = np.array([2, 0, 3, 1, 0, 3], np.int32)
    rows = np.arange(12, dtype=np.float32).reshape(6, 2)

    @jax.jit
    def ordered(keys, rows):
        order, sizes = sort_by_key(keys, 3)
        there, pull = jax.vjp(lambda r: permute_rows(r, order), rows)
        return order.row, sizes, there, permute_rows(there, order.inverse), *pull(rows)

    row, sizes, there, again, gradient = ordered(keys, rows)
    np.testing.assert_array_equal(sizes, [2, 1, 1])
    np.testing.assert_array_equal(row, [1, 4, 3, 0, 2, 5])
    np.testing.assert_array_equal(there, rows[row])
    np.testing.assert_array_equal(again, rows)
    np.testing.assert_array_equal(gradient, rows[np.argsort(row)])
