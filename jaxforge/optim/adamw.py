"""AdamW (arXiv:1711.05101) in the order of operations of `torch.optim.AdamW`.

optax adds the decay to the update, while PyTorch shrinks the parameter first. The results differ
only by rounding. With PyTorch's order, a run that continues from a PyTorch checkpoint stays much
closer to the original run.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from jaxforge.model.linear import times
from jaxforge.optim.eight_bit import ROOT
from jaxforge.optim.moments import MomentStorage, init_moments
from jaxforge.optim.schedule import Schedule
from jaxforge.optim.update_rule import UpdateStep, change_of, transform


class AdamWState(NamedTuple):
    """State of AdamW.

    Attributes:
        updates: number of updates made.
        mu: running mean of the gradient, per parameter.
        nu: running mean of the squared gradient, per parameter.
        mu_scales: scales of 8-bit `mu`; None for other storage formats.
        nu_scales: scales of 8-bit `nu`; None for other storage formats.
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
    is_cautious: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Return AdamW as one optax transform.

    With lr = schedule(updates) · lr_scale and t = updates + 1, per parameter p with gradient g:

        p ← p (1 - lr · weight_decay)
        m ← b1 m + (1 - b1) g,   v ← b2 v + (1 - b2) g²
        p ← p - lr / (1 - b1^t) · m / (√v / √(1 - b2^t) + eps)

    Args:
        schedule: learning rate by the number of updates made.
        betas: b1, b2.
        eps: constant added to the denominator.
        weight_decay: tree of floats, one per parameter.
        state_dtype: storage format of m and v; the arithmetic is float32.
        lr_factors: tree of floats, one per parameter, that multiply the step but not the decay.
        is_cautious: whether to decay only elements that the step moves towards zero (`change_of`).

    `optim.update_rule.transform` documents the arguments of the update function.
    """
    b1, b2 = betas

    def init(params: PyTree) -> AdamWState:
        mu, mu_scales = init_moments(params, state_dtype)
        nu, nu_scales = init_moments(params, state_dtype, ROOT)
        return AdamWState(jnp.zeros((), jnp.int32), mu, nu, mu_scales, nu_scales)

    def advance(scalars: tuple[Array, ...], g: Array, m: Array, v: Array) -> tuple[Array, ...]:
        (root_correction2,) = scalars
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * (g * g)
        return m / (jnp.sqrt(v) / root_correction2 + eps), m, v

    def update(step: UpdateStep, grads: PyTree, state: AdamWState, params: PyTree) -> tuple:
        lr, t = step.lr, state.updates + 1
        step_size = lr / bias_correction(b1, t)

        def change(p: Array, direction: Array, decay: float, factor: float) -> tuple[Array]:
            p_step = times(step_size, factor) * direction
            return (change_of(p, p_step, lr * decay, is_cautious=is_cautious),)

        return step.advance(
            state, ("mu", "nu"), advance, change, params, grads, weight_decay, lr_factors,
            scalars=(jnp.sqrt(bias_correction(b2, t)),),
        )  # fmt: skip

    return transform(schedule, state_dtype, init, update)


def bias_correction(beta: float, t: Int[Array, ""]) -> Float[Array, ""]:
    """Return 1 - beta^t without the cancellation that costs four digits when beta is near 1."""
    log_beta = math.log(beta) if beta else -math.inf
    return -jnp.expm1(t.astype(jnp.float32) * log_beta)
