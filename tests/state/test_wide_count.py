"""Device counters beyond 32 bits."""

import jax
import jax.numpy as jnp
import pytest

from jaxforge.state.train_state import WideCount


@pytest.mark.parametrize("start", [0, 2**30 - 1, 2**31 - 5, 2**32, 15 * 10**12, 2**60])
@pytest.mark.parametrize("steps", [[0], [1], [2**30 - 1], [2**30 - 1] * 3])
def test_wide_count_equals_integers(start, steps):
    count, plus = WideCount.of(start), jax.jit(WideCount.plus)
    for n in steps:
        count = plus(count, jnp.int32(n))
    assert int(count) == start + sum(steps)
