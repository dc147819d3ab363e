"""Updates smaller than the last digit of bfloat16 parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxforge.config import load_config
from jaxforge.errors import UserError
from jaxforge.optim.rounding import kahan, stochastic
from jaxforge.parallel.mesh import make_mesh
from tests.conftest import tiny_config

DIGIT = 2.0**-7  # last digit of numbers from 1 to 2


def unit_factors(*shape):
    return {"w": np.ones(shape, jnp.bfloat16)}


add_stochastically = jax.jit(stochastic, static_argnums=2)


def rounded(params, update, step=0):
    updates = jax.tree.map(lambda p: np.full(p.shape, update, np.float32), params)
    added = add_stochastically(params, updates, 3, np.int32(step))
    return np.asarray(added["w"], np.float64)


@pytest.mark.parametrize("share", [0.3, -0.07])
def test_stochastic_rounding_is_unbiased(share):
    digit = DIGIT if share > 0 else DIGIT / 2  # digits below 1 are finer
    digits = (rounded(unit_factors(256, 256), share * digit) - 1) / digit
    assert set(np.unique(digits)) == {0.0, np.sign(share)}
    deviation = np.sqrt(abs(share) * (1 - abs(share)) / digits.size)
    assert abs(digits.mean() - share) < 4 * deviation


def test_stochastic_rounding_depends_on_step_not_mesh():
    first = rounded(unit_factors(8, 64), DIGIT / 2)
    np.testing.assert_array_equal(first, rounded(unit_factors(8, 64), DIGIT / 2))
    assert 0.3 < np.mean(first != rounded(unit_factors(8, 64), DIGIT / 2, step=1)) < 0.7
    mesh = make_mesh(tiny_config(distributed={"dp_shard": 2, "tp": 4}), jax.devices()[:8])
    at = NamedSharding(mesh, P("tp", "dp_shard"))
    np.testing.assert_array_equal(
        first, rounded(jax.device_put(unit_factors(8, 64), at), DIGIT / 2)
    )


def test_exact_and_nonfinite_values_are_unchanged():
    assert np.all(rounded(unit_factors(8, 64), 3 * DIGIT) == 1 + 3 * DIGIT)
    assert np.all(rounded(unit_factors(8, 64), np.inf) == np.inf)
    assert np.all(np.isnan(rounded(unit_factors(8, 64), np.nan)))


@pytest.mark.parametrize("update", [DIGIT / 50, -DIGIT / 50])
def test_kahan_accumulates_small_updates(update):
    p, c = np.ones(4, jnp.bfloat16), np.zeros(4, jnp.bfloat16)
    assert (p + jnp.bfloat16(update) == p).all()
    add = jax.jit(kahan)
    for _ in range(200):
        p, c = add(p, np.full(4, update, np.float32), c)
    np.testing.assert_allclose(np.asarray(p, np.float64), 1 + 200 * update, rtol=0, atol=DIGIT)


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_param_rounding_requires_bfloat16_parameters(rounding):
    with pytest.raises(UserError, match='requires param_dtype = "bfloat16"'):
        load_config(None, [f"--train.param_rounding={rounding}"])
