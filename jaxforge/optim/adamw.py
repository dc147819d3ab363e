"""AdamW (arXiv:1711.05101) in the order of operations of `torch.optim.AdamW`.

optax adds the decay to the update; torch shrinks the parameter first. The mathematics is the same
and the rounding is not: in this order a run taken over from torch drifts from it far less.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from jaxforge.optim.schedule import Schedule
from jaxforge.optim.trees import unzip


class AdamWState(NamedTuple):
    """Updates made, and the running means of the gradient and of its square."""

    updates: Int[Array, ""]
    mu: PyTree
    nu: PyTree


def adamw(
    schedule: Schedule,
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: PyTree,
    state_dtype: jnp.dtype,
) -> optax.GradientTransformationExtraArgs:
    """AdamW as one transform.

    With lr = schedule(updates) · lr_scale and t = updates + 1, per parameter p with gradient g:

        p ← p (1 - lr · weight_decay)
        m ← b1 m + (1 - b1) g,   v ← b2 v + (1 - b2) g²
        p ← p - lr / (1 - b1^t) · m / (√v / √(1 - b2^t) + eps)

    Args:
        schedule: learning rate by the number of updates made.
        betas: b1, b2.
        eps: added to the denominator.
        weight_decay: a tree of floats, one per parameter.
        state_dtype: dtype that m and v are stored in; the arithmetic is float32.

    The update function takes `lr_scale`, a scalar factor on the learning rate (default 1).
    """
    b1, b2 = betas

    def init(params: PyTree) -> AdamWState:
        mu, nu = (jax.tree.map(lambda p: jnp.zeros_like(p, state_dtype), params) for _ in "mv")
        return AdamWState(jnp.zeros((), jnp.int32), mu, nu)

    def update(
        grads: PyTree,
        state: AdamWState,
        params: PyTree | None = None,
        *,
        lr_scale: Float[Array, ""] | float = 1.0,
        **_: object,
    ) -> tuple[PyTree, AdamWState]:
        assert params is not None
        lr = schedule(state.updates) * lr_scale
        t = state.updates + 1
        step_size = lr / bias_correction(b1, t)
        root_correction2 = jnp.sqrt(bias_correction(b2, t))

        def one(p: Array, g: Array, m: Array, v: Array, decay: float) -> tuple[Array, ...]:
            p32, g, m, v = (a.astype(jnp.float32) for a in (p, g, m, v))
            m = b1 * m + (1 - b1) * g
            v = b2 * v + (1 - b2) * (g * g)
            new = p32 * (1 - lr * decay) - step_size * (m / (jnp.sqrt(v) / root_correction2 + eps))
            return new - p32, m.astype(state_dtype), v.astype(state_dtype)

        leaves = jax.tree.map(one, params, grads, state.mu, state.nu, weight_decay)
        updates, mu, nu = unzip(3, leaves, params)
        return updates, AdamWState(optax.safe_increment(state.updates), mu, nu)

    return optax.GradientTransformationExtraArgs(init, update)


def bias_correction(beta: float, t: Int[Array, ""]) -> Float[Array, ""]:
    """1 - beta^t, without the cancellation that costs it four digits when beta is near 1."""
    log_beta = math.log(beta) if beta else -math.inf
    return -jnp.expm1(t.astype(jnp.float32) * log_beta)
