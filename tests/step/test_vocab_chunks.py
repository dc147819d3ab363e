"""Tests of the chunks of a vocabulary."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.step.vocab_chunks import join_vocab, split_vocab


@pytest.mark.parametrize(
    ("vocab", "size", "shape"),
    [
        (50304, 1024, (50, 1024)),  # equal chunks would have 1,007 entries
        pytest.param(32000, 4096, (8, 4096), marks=pytest.mark.slow),
        pytest.param(50304, 8192, (7, 7296), marks=pytest.mark.slow),
        (1000, 512, (2, 512)),
        (1000, 500, (2, 500)),  # not more than the limit
        (10, 4, (3, 4)),
        (128, 1024, (1, 128)),
    ],
)
def test_chunks_fill_the_tiles_of_matrix_units(vocab, size, shape):
    head = jnp.arange(vocab, dtype=jnp.float32)[:, None]
    chunks = split_vocab(head, size)
    assert chunks.ids.shape == shape
    entries = chunks.ids.ravel()
    np.testing.assert_array_equal(entries[entries >= 0], np.arange(vocab))
    np.testing.assert_array_equal(chunks.weights.ravel()[entries >= 0], np.arange(vocab))
    np.testing.assert_array_equal(join_vocab(chunks.weights, vocab), head)
