"""Lion (arXiv:2302.06675): a step of the same size in every element, by the sign of a momentum."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxforge.model.linear import times
from jaxforge.optim.moments import Kept, Place, Turn, joined, parted, places, zeros
from jaxforge.optim.schedule import Schedule
from jaxforge.optim.trees import ones, unzip


class LionState(NamedTuple):
    """Updates made, and the running mean of the gradient, with scales if it is in eight bits."""

    updates: Int[Array, ""]
    mu: PyTree
    mu_scales: PyTree | None = None


def lion(
    schedule: Schedule,
    *,
    betas: tuple[float, float],
    weight_decay: PyTree,
    state_dtype: Kept,
    lr_factors: PyTree | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Lion as one transform.

    With lr = schedule(updates) · lr_scale, per parameter p with gradient g:

        p ← p (1 - lr · weight_decay) - lr · sign(b1 m + (1 - b1) g)
        m ← b2 m + (1 - b2) g

    Args:
        schedule: learning rate by the number of updates made.
        betas: b1, b2.
        weight_decay: a tree of floats, one per parameter.
        state_dtype: what m is stored in; the arithmetic is float32.
        lr_factors: as of `adamw`.

    The update function takes `lr_scale`, a scalar factor on the learning rate (default 1), and
    `applied` (`optim.moments.Turn`).
    """
    b1, b2 = betas

    def init(params: PyTree) -> LionState:
        return LionState(jnp.zeros((), jnp.int32), *zeros(params, state_dtype))

    def moved(_: tuple, g: Array, m: Array) -> tuple[Array, Array]:
        return jnp.sign(b1 * m + (1 - b1) * g), b2 * m + (1 - b2) * g

    def update(
        grads: PyTree,
        state: LionState,
        params: PyTree | None = None,
        *,
        lr_scale: Float[Array, ""] | float = 1.0,
        applied: Bool[Array, ""] | bool = True,
        **_: object,
    ) -> tuple[PyTree, LionState]:
        assert params is not None
        lr = schedule(state.updates) * lr_scale

        turn = Turn(state_dtype, state.updates, applied)

        def one(p: Array, g: Array, m: Array, decay: float, factor: float, at: Place) -> tuple:
            direction, m = turn.advance(moved, at, g, m)
            p32 = p.astype(jnp.float32)
            return p32 * (1 - lr * decay) - times(lr, factor) * direction - p32, m

        mu, at = joined(state.mu, state.mu_scales), places(params, state_dtype)
        factors = ones(params) if lr_factors is None else lr_factors
        leaves = jax.tree.map(one, params, grads, mu, weight_decay, factors, at)
        updates, mu = unzip(2, leaves, params)
        return updates, LionState(optax.safe_increment(state.updates), *parted(mu))

    return optax.GradientTransformationExtraArgs(init, update)
