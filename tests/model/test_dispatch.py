"""Tests of the dispatch of tokens to experts; rows without an assignment have no effect."""

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
    stable_order,
    sum_by_token,
)

TOKENS, K, KEYS, WIDTH = 12, 3, 5, 4


def drawn():
    """Return tokens, keys of their assignments (some have no row), weights, and a gradient."""
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((2, TOKENS, WIDTH)).astype(np.float32)
    keys = rng.integers(0, KEYS + 1, (TOKENS, K)).astype(np.int32)
    weights = rng.random((TOKENS, K)).astype(np.float32)
    return x, keys, weights, dy


def dispatched(x, weights, keys):
    """Apply a function by key to each row; rows without an assignment become NaN."""
    assignments, sizes = sort_assignments(keys, KEYS)
    n = TOKENS * K
    key_of_row = jnp.repeat(jnp.arange(KEYS), sizes, total_repeat_length=n)
    rows = jnp.sin(gather_tokens(x, assignments)) * (1 + key_of_row[:, None])
    rows = rows * gather_weights(weights, assignments)[:, None]
    return sum_by_token(_with_nan_beyond(rows, jnp.sum(sizes)), assignments)


@jax.custom_vjp
def _with_nan_beyond(rows, end):
    """Set rows beyond the last to NaN, in the result and in the gradient."""
    return jnp.where(jnp.arange(len(rows))[:, None] < end, rows, jnp.nan)


_with_nan_beyond.defvjp(
    lambda rows, end: (_with_nan_beyond(rows, end), end),
    lambda end, d: (jnp.where(jnp.arange(len(d))[:, None] < end, d, jnp.nan), None),
)


def direct_sum(x, weights, keys):
    factor = jnp.where(keys < KEYS, 1 + keys, 0) * weights
    return jnp.sin(x) * jnp.sum(factor, axis=1, keepdims=True)


def total(f, x, weights, keys, dy):
    return jnp.sum(f(x, weights, keys) * dy)


@pytest.mark.parametrize("full", [False, True], ids=["some have no row", "all have rows"])
def test_dispatch_and_combination_match_direct_sum(full):
    x, keys, weights, dy = drawn()
    keys = keys % KEYS if full else keys
    result, expected = (
        jax.jit(jax.value_and_grad(functools.partial(total, f), (0, 1)))(x, weights, keys, dy)
        for f in (dispatched, direct_sum)
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), result, expected
    )


def test_permutation_is_stable_and_invertible():
    keys = np.array([2, 0, 3, 1, 0, 3], np.int32)
    rows = np.arange(12, dtype=np.float32).reshape(6, 2)

    @jax.jit
    def ordered(keys, rows):
        order, sizes = sort_by_key(keys, 3)
        permuted, pull = jax.vjp(lambda r: permute_rows(r, order), rows)
        return order.row, sizes, permuted, permute_rows(permuted, order.inverse), *pull(rows)

    row, sizes, permuted, again, gradient = ordered(keys, rows)
    np.testing.assert_array_equal(sizes, [2, 1, 1])
    np.testing.assert_array_equal(row, [1, 4, 3, 0, 2, 5])
    np.testing.assert_array_equal(permuted, rows[row])
    np.testing.assert_array_equal(again, rows)
    np.testing.assert_array_equal(gradient, rows[np.argsort(row)])


@pytest.mark.parametrize(
    ("rows", "n_keys"),
    [(1, 3), (257, 8), (256, 2**24 - 1), (257, 2**24 - 1)],
    ids=["one row", "few keys", "all 32 bits of packed keys", "too many keys to pack"],
)
def test_keys_sort_stably(rows, n_keys):
    choices = np.array([0, 1, (n_keys + 1) // 2, n_keys], np.int32)
    keys = np.random.default_rng(0).choice(choices, rows)
    order = jax.jit(lambda keys: stable_order(keys, n_keys))(keys)
    np.testing.assert_array_equal(order, np.argsort(keys, stable=True))
