"""AdamW (arXiv:1711.05101) in the order of operations of `torch.optim.AdamW`.

optax adds the decay to the update; torch shrinks the parameter first. The mathematics is the same
and the rounding is not: in this order a run taken over from torch drifts from it far less.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from jaxforge.model.linear import times
from jaxforge.optim.eight_bit import ROOT
from jaxforge.optim.moments import MomentStorage, zeros
from jaxforge.optim.schedule import Schedule
from jaxforge.optim.update_rule import Step, transform


class AdamWState(NamedTuple):
    """Updates made, and the running means of the gradient and of its square.

    Scales are of moments in eight bits.
    """

    updates: Int[Array, ""]
    mu: PyTree
    nu: PyTree
    mu_scales: PyTree | None = None
    nu_scales: PyTree | None = None


def adamw(
    schedule: Schedule,
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: PyTree,
    state_dtype: MomentStorage,
    lr_factors: PyTree | None = None,
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
        state_dtype: what m and v are stored in; the arithmetic is float32.
        lr_factors: a tree of floats, one per parameter: multiply its step, and not its decay.

    The update function is that of `optim.update_rule.transform`.
    """
    b1, b2 = betas

    def init(params: PyTree) -> AdamWState:
        mu, mu_scales = zeros(params, state_dtype)
        nu, nu_scales = zeros(params, state_dtype, ROOT)
        return AdamWState(jnp.zeros((), jnp.int32), mu, nu, mu_scales, nu_scales)

    def moved(scalars: tuple[Array, ...], g: Array, m: Array, v: Array) -> tuple[Array, ...]:
        (root_correction2,) = scalars
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * (g * g)
        return m / (jnp.sqrt(v) / root_correction2 + eps), m, v

    def update(step: Step, grads: PyTree, state: AdamWState, params: PyTree) -> tuple:
        lr, t = step.lr, state.updates + 1
        step_size = lr / bias_correction(b1, t)

        def change(p: Array, direction: Array, decay: float, factor: float) -> tuple[Array]:
            p32 = p.astype(jnp.float32)
            return (p32 * (1 - lr * decay) - times(step_size, factor) * direction - p32,)

        return step.advance(
            state, ("mu", "nu"), moved, change, params, grads, weight_decay, lr_factors,
            scalars=(jnp.sqrt(bias_correction(b2, t)),),
        )  # fmt: skip

    return transform(schedule, state_dtype, init, update)


def bias_correction(beta: float, t: Int[Array, ""]) -> Float[Array, ""]:
    """1 - beta^t, without the cancellation that costs it four digits when beta is near 1."""
    log_beta = math.log(beta) if beta else -math.inf
    return -jnp.expm1(t.astype(jnp.float32) * log_beta)
