"""Lion (arXiv:2302.06675): steps of equal size in every element, by the sign of the momentum."""

from typing import NamedTuple

import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree

from jaxforge.model.linear import times
from jaxforge.optim.moments import MomentStorage, init_moments
from jaxforge.optim.schedule import Schedule
from jaxforge.optim.update_rule import UpdateStep, change_of, transform


class LionState(NamedTuple):
    """State of Lion.

    Attributes:
        updates: number of updates made.
        mu: running mean of the gradient, per parameter.
        mu_scales: scales of 8-bit `mu`; None for other storage formats.
    """

    updates: Int[Array, ""]
    mu: PyTree
    mu_scales: PyTree | None = None


def lion(
    schedule: Schedule,
    *,
    betas: tuple[float, float],
    weight_decay: PyTree,
    state_dtype: MomentStorage,
    lr_factors: PyTree | None = None,
    is_cautious: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Return Lion as one optax transform.

    With lr = schedule(updates) · lr_scale, per parameter p with gradient g:

        p ← p (1 - lr · weight_decay) - lr · sign(b1 m + (1 - b1) g)
        m ← b2 m + (1 - b2) g

    Args:
        schedule: learning rate by the number of updates made.
        betas: b1, b2.
        weight_decay: tree of floats, one per parameter.
        state_dtype: storage format of m; the arithmetic is float32.
        lr_factors: as in `adamw`.
        is_cautious: as in `adamw`.

    `optim.update_rule.transform` documents the arguments of the update function.
    """
    b1, b2 = betas

    def init(params: PyTree) -> LionState:
        return LionState(jnp.zeros((), jnp.int32), *init_moments(params, state_dtype))

    def advance(_: tuple, g: Array, m: Array) -> tuple[Array, Array]:
        return jnp.sign(b1 * m + (1 - b1) * g), b2 * m + (1 - b2) * g

    def update(step: UpdateStep, grads: PyTree, state: LionState, params: PyTree) -> tuple:
        def change(p: Array, direction: Array, decay: float, factor: float) -> tuple[Array]:
            p_step = times(step.lr, factor) * direction
            return (change_of(p, p_step, step.lr * decay, is_cautious=is_cautious),)

        trees = params, grads, weight_decay, lr_factors
        return step.advance(state, ("mu",), advance, change, *trees)

    return transform(schedule, state_dtype, init, update)
