"""Rounding of updates of bfloat16 parameters that are smaller than the last digit.

    nearest      p ← bf16(p + u): updates below half of the last digit of p are lost
    stochastic   round up or down at random, so that E[p] = p + u: add 16 random bits to the float32
                 bits of p + u, then drop the last 16 bits
    kahan        p' = bf16(p + (u + c)),  c ← (u + c) - (p' - p): the next update adds the
                 rounding error of this one

Source of the latter two: arXiv:2010.06192. The compensation c is stored in bfloat16.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from jaxforge.config.train import COMPENSATION, TrainConfig
from jaxforge.optim.random_bits import draw_key, random_words
from jaxforge.optim.trees import unzip

Apply = Callable[[PyTree, PyTree, PyTree, Int[Array, ""]], tuple[PyTree, PyTree]]
"""(parameters, updates, optimizer state, step) -> new parameters and optimizer state."""


class CompensationState(NamedTuple):
    """Compensation of rounding errors for each parameter."""

    compensation: PyTree


def compensation() -> optax.GradientTransformation:
    """Return a transform that stores the compensation of `kahan` in the state of the chain."""

    def init(params: PyTree) -> CompensationState:
        return CompensationState(jax.tree.map(jnp.zeros_like, params))

    return optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))


def build_apply(train: TrainConfig) -> Apply:
    """Return the function that adds updates to parameters, as `train.param_rounding` selects."""
    if train.param_rounding == "stochastic":
        return lambda params, updates, state, step: (
            stochastic(params, updates, train.seed, step), state
        )  # fmt: skip
    if train.param_rounding == "kahan":
        return _apply_kahan
    return lambda params, updates, state, step: (optax.apply_updates(params, updates), state)


def stochastic(params: PyTree, updates: PyTree, seed: int, step: Int[Array, ""]) -> PyTree:
    """Add updates to bfloat16 parameters with stochastic rounding.

    Args:
        params: the parameters.
        updates: updates, float32.
        seed: seed of the run.
        step: number of steps made; each step has its own random bits.
    """

    def round_leaf(path: jax.tree_util.KeyPath, p: Array, u: Array) -> Array:
        if p.dtype != jnp.bfloat16:  # some parameters are always float32
            return (p + u).astype(p.dtype)
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        key = draw_key(seed, f"params/{name}", step)
        return stochastic_round(p.astype(jnp.float32) + u, random_words(key, p.shape))

    return jax.tree_util.tree_map_with_path(round_leaf, params, updates)


def stochastic_round(x: Float[Array, "..."], bits: Array) -> Array:
    """Round to one of the two neighbouring bfloat16 numbers, in proportion to their closeness.

    Args:
        x: numbers, float32.
        bits: random uint32; only the upper 16 bits are used.
    """
    # float32  s eeeeeeee mmmmmmm|mmmmmmmmmmmmmmmm   bfloat16 is the upper half, truncated
    # bits >> 16                 |rrrrrrrrrrrrrrrr   the sum carries into the upper half with
    #                                                probability (lower half) / 2^16
    # The sign is separate from the magnitude, so "up" is away from zero. A carry out of the
    # mantissa increments the exponent: the next bfloat16 number.
    raised = jax.lax.bitcast_convert_type(x, jnp.uint32) + (bits >> 16)
    truncated = jax.lax.bitcast_convert_type((raised >> 16).astype(jnp.uint16), jnp.bfloat16)
    # Truncation would turn a NaN whose payload is in the lower half into an infinity, and a carry
    # would turn 0x7fff.... into -0.
    return jnp.where(jnp.isfinite(x), truncated, x.astype(jnp.bfloat16))


def kahan(p: Array, u: Array, c: Array) -> tuple[Array, Array]:
    """Return a parameter and its compensation after an update, in the dtype of the parameter."""
    info = jnp.finfo(p.dtype)
    p32, total = p.astype(jnp.float32), u + c.astype(jnp.float32)
    # XLA may drop a cast to bfloat16 and back inside a fusion: `new - p32` would then equal
    # `total`, and the compensation would be lost. `reduce_precision` is never dropped.
    new = jax.lax.reduce_precision(p32 + total, info.nexp, info.nmant)
    return new.astype(p.dtype), (total - (new - p32)).astype(c.dtype)


def _apply_kahan(
    params: PyTree, updates: PyTree, state: PyTree, step: Int[Array, ""]
) -> tuple[PyTree, PyTree]:
    pairs = jax.tree.map(kahan, params, updates, optax.tree.get(state, COMPENSATION))
    params, residuals = unzip(2, pairs, params)
    return params, optax.tree.set(state, **{COMPENSATION: residuals})
