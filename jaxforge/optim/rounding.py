"""Parameters in bfloat16: rounding of updates smaller than their last digit.

    nearest      p ← bf16(p + u): what is below half of the last digit of p is lost
    stochastic   up or down at random, so that E[p] = p + u: with r of 16 random bits, the bits of
                 p + u in float32, plus r, less the last 16
    kahan        c ← (u + c) - (p' - p),  p' = bf16(p + (u + c)): what was lost is added next time

The latter two are those of arXiv:2010.06192. The compensation c is kept in bfloat16.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from jaxforge.config.train import COMPENSATION, TrainConfig
from jaxforge.optim.random_bits import key_of, words_of
from jaxforge.optim.trees import unzip

Apply = Callable[[PyTree, PyTree, PyTree, Int[Array, ""]], tuple[PyTree, PyTree]]
"""(parameters, updates, optimizer state, step) -> parameters and optimizer state after it."""


class CompensationState(NamedTuple):
    """Compensation of rounding errors for each parameter."""

    compensation: PyTree


def compensation() -> optax.GradientTransformation:
    """Holds the compensation in the state of the chain; `kahan` has the rule."""

    def init(params: PyTree) -> CompensationState:
        return CompensationState(jax.tree.map(jnp.zeros_like, params))

    return optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))


def applying(train: TrainConfig) -> Apply:
    """Return the function that adds updates to parameters, as `train.param_rounding` selects."""
    if train.param_rounding == "stochastic":
        return lambda params, updates, state, step: (
            stochastic(params, updates, train.seed, step), state
        )  # fmt: skip
    if train.param_rounding == "kahan":
        return _kahan_of_state
    return lambda params, updates, state, step: (optax.apply_updates(params, updates), state)


def stochastic(params: PyTree, updates: PyTree, seed: int, step: Int[Array, ""]) -> PyTree:
    """Parameters of bfloat16 after an update, rounded up or down by chance.

    Args:
        params: the parameters.
        updates: float32.
        seed: of the run.
        step: steps made; each has bits of its own.
    """

    def round_leaf(path: jax.tree_util.KeyPath, p: Array, u: Array) -> Array:
        if p.dtype != jnp.bfloat16:  # a part of the model that is always wider
            return (p + u).astype(p.dtype)
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        key = key_of(seed, f"params/{name}", step)
        return round_up_or_down(p.astype(jnp.float32) + u, words_of(key, p.shape))

    return jax.tree_util.tree_map_with_path(round_leaf, params, updates)


def round_up_or_down(x: Float[Array, "..."], bits: Array) -> Array:
    """X in bfloat16, to one of its two neighbours, the nearer the likelier.

    Args:
        x: float32.
        bits: random, uint32; the upper 16 count.
    """
    raised = jax.lax.bitcast_convert_type(x, jnp.uint32) + (bits >> 16)
    cut = jax.lax.bitcast_convert_type((raised >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), cut, x.astype(jnp.bfloat16))


def kahan(p: Array, u: Array, c: Array) -> tuple[Array, Array]:
    """The parameter and its compensation after an update, in the dtype of the parameter."""
    info = jnp.finfo(p.dtype)
    p32, whole = p.astype(jnp.float32), u + c.astype(jnp.float32)
    # XLA may keep more digits of what it fuses, and there would be nothing to compensate.
    new = jax.lax.reduce_precision(p32 + whole, info.nexp, info.nmant)
    return new.astype(p.dtype), (whole - (new - p32)).astype(c.dtype)


def _kahan_of_state(
    params: PyTree, updates: PyTree, state: PyTree, step: Int[Array, ""]
) -> tuple[PyTree, PyTree]:
    pairs = jax.tree.map(kahan, params, updates, optax.tree.get(state, COMPENSATION))
    params, residuals = unzip(2, pairs, params)
    return params, optax.tree.set(state, **{COMPENSATION: residuals})
