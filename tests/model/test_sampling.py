"""Tests of sampling."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.model.sampling import Sampling, sample


@functools.cache
def keys(n):
    return jax.random.split(jax.random.key(0), n)


compiled = jax.jit(sample, static_argnums=1)
"""Sampling in one program; tests with common shapes run operations, which are compiled once."""


def draws(probabilities, how, n=4000):
    """Return n draws from a distribution."""
    logits = np.log(np.broadcast_to(np.array(probabilities, np.float32), (n, len(probabilities))))
    return np.asarray(sample(jnp.asarray(logits), how, keys(n)))


def drawn(probabilities, **how):
    return {int(token) for token in draws(probabilities, Sampling(**how))}


def test_temperature_zero_is_greedy():
    logits = np.random.default_rng(0).standard_normal((16, 10)).astype(np.float32)
    tokens = compiled(logits, Sampling(0.0, top_k=3, top_p=0.1), keys(16))
    np.testing.assert_array_equal(tokens, logits.argmax(-1))


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 5e-324])
def test_temperature_near_zero_is_greedy(temperature):
    logits = jnp.array([[1.0, 30.0, 2.0, 29.9], [-50.0, -40.0, -60.0, -45.0]])
    keys = jax.random.split(jax.random.key(0), 2)
    np.testing.assert_array_equal(sample(logits, Sampling(temperature), keys), [1, 1])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_divides_the_logits(temperature):
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    tokens = draws(probabilities, Sampling(temperature))
    expected = probabilities ** (1 / temperature)
    expected /= expected.sum()
    seen = np.bincount(tokens, minlength=4) / len(tokens)
    standard_error = np.sqrt(expected * (1 - expected) / len(tokens))
    assert (np.abs(seen - expected) < 5 * standard_error).all()


@pytest.mark.parametrize(
    ("k", "expected"),
    [(0, {0, 1, 2, 3, 4}), (1, {0}), (2, {0, 1, 2}), (3, {0, 1, 2}), (4, {0, 1, 2, 3}),
     (5, {0, 1, 2, 3, 4}), (99, {0, 1, 2, 3, 4})],
)  # fmt: skip
def test_top_k_includes_ties_with_last_token(k, expected):
    assert drawn([0.4, 0.2, 0.2, 0.15, 0.05], top_k=k) == expected


@pytest.mark.parametrize(
    ("p", "expected"),
    [(0.0, {2}), (0.49, {2}), (0.51, {0, 2}), (0.79, {0, 2}), (0.81, {0, 2, 3}),
     (0.94, {0, 2, 3}), (0.96, {0, 1, 2, 3}), (1.0, {0, 1, 2, 3})],
)  # fmt: skip
def test_top_p_drops_tokens_after_p_is_reached(p, expected):
    assert drawn([0.3, 0.05, 0.5, 0.15], top_p=p) == expected


def test_top_p_counts_equally_likely_tokens_one_by_one():
    assert len(drawn([0.25, 0.25, 0.25, 0.25], top_p=0.6)) == 3


def test_top_p_stops_exactly_at_p():
    assert len(drawn([0.25, 0.25, 0.25, 0.25], top_p=0.5)) == 2


@pytest.mark.parametrize("how", [{"top_k": 1}, {"top_p": 0.3}], ids=str)
def test_each_row_has_its_own_threshold(how):
    logits = np.log(np.array([[0.9, 0.05, 0.05], [0.2, 0.3, 0.5]] * 100, np.float32))
    tokens = compiled(logits, Sampling(**how), keys(200))
    np.testing.assert_array_equal(tokens, [0, 2] * 100)


def test_top_p_applies_after_temperature():
    probabilities = [0.5, 0.3, 0.15, 0.05]
    assert drawn(probabilities, top_p=0.55) == {0, 1}
    # The same at temperature 4: .31 .28 .23 .18
    assert drawn(probabilities, top_p=0.55, temperature=4.0) == {0, 1}
    assert drawn(probabilities, top_p=0.7, temperature=4.0) == {0, 1, 2}
    assert drawn(probabilities, top_p=0.7) == {0, 1}


def test_top_p_applies_after_top_k():
    probabilities = [0.4, 0.3, 0.2, 0.1]
    assert drawn(probabilities, top_p=0.5) == {0, 1}
    assert drawn(probabilities, top_p=0.5, top_k=2) == {0}


def test_rows_draw_by_their_own_keys():
    logits, five = np.zeros((5, 1000), np.float32), keys(5)
    tokens = np.asarray(compiled(logits, Sampling(), five))
    assert len(set(tokens.tolist())) == 5
    np.testing.assert_array_equal(compiled(logits, Sampling(), five[::-1]), tokens[::-1])
    np.testing.assert_array_equal(compiled(logits[:2], Sampling(), five[3:]), tokens[3:])


@pytest.mark.parametrize("how", [{"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 3}], ids=str)
def test_ids_beyond_the_vocabulary_are_never_drawn(how):
    assert drawn([0.1, 0.1, 0.4, 0.4], **how, vocab_size=2) <= {0, 1}
