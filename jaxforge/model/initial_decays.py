"""Initial values of the decays of recurrent mixers, as in Mamba-2 (arXiv:2405.21060)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxforge.model.linear import Initializer

_LARGEST_RATE = 16.0


def log_rates(least: float) -> Initializer:
    """Return an initializer of logarithms of rates that are uniform up to 16.

    Args:
        least: smallest initial rate.
    """

    def draw(key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
        return jnp.log(jax.random.uniform(key, shape, dtype, least, _LARGEST_RATE))

    return draw


def time_step_biases(least: float, most: float) -> Initializer:
    """Return an initializer of biases whose softplus is uniform in its logarithm.

    Args:
        least: smallest initial time step, the softplus of a bias.
        most: largest initial time step.
    """

    def draw(key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
        steps = jnp.exp(jax.random.uniform(key, shape, jnp.float32, jnp.log(least), jnp.log(most)))
        return (steps + jnp.log(-jnp.expm1(-steps))).astype(dtype)  # inverse of softplus

    return draw
