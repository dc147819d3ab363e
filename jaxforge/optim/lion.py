"""Lion (arXiv:2302.06675): a step of the same size in every element, by the sign of a momentum."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from jaxforge.optim.schedule import Schedule
from jaxforge.optim.trees import unzip


class LionState(NamedTuple):
    """Updates made, and the running mean of the gradient."""

    updates: Int[Array, ""]
    mu: PyTree


def lion(
    schedule: Schedule,
    *,
    betas: tuple[float, float],
    weight_decay: PyTree,
    state_dtype: jnp.dtype,
) -> optax.GradientTransformationExtraArgs:
    """Lion as one transform.

    With lr = schedule(updates) · lr_scale, per parameter p with gradient g:

        p ← p (1 - lr · weight_decay) - lr · sign(b1 m + (1 - b1) g)
        m ← b2 m + (1 - b2) g

    Args:
        schedule: learning rate by the number of updates made.
        betas: b1, b2.
        weight_decay: a tree of floats, one per parameter.
        state_dtype: dtype that m is stored in; the arithmetic is float32.

    The update function takes `lr_scale`, a scalar factor on the learning rate (default 1).
    """
    b1, b2 = betas

    def init(params: PyTree) -> LionState:
        mu = jax.tree.map(lambda p: jnp.zeros_like(p, state_dtype), params)
        return LionState(jnp.zeros((), jnp.int32), mu)

    def update(
        grads: PyTree,
        state: LionState,
        params: PyTree | None = None,
        *,
        lr_scale: Float[Array, ""] | float = 1.0,
        **_: object,
    ) -> tuple[PyTree, LionState]:
        assert params is not None
        lr = schedule(state.updates) * lr_scale

        def one(p: Array, g: Array, m: Array, decay: float) -> tuple[Array, Array]:
            p32, g, m = (a.astype(jnp.float32) for a in (p, g, m))
            new = p32 * (1 - lr * decay) - lr * jnp.sign(b1 * m + (1 - b1) * g)
            return new - p32, (b2 * m + (1 - b2) * g).astype(state_dtype)

        leaves = jax.tree.map(one, params, grads, state.mu, weight_decay)
        updates, mu = unzip(2, leaves, params)
        return updates, LionState(optax.safe_increment(state.updates), mu)

    return optax.GradientTransformationExtraArgs(init, update)
