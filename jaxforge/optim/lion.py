"""Lion (arXiv:2302.06675): a step of the same size in every element, by the sign of a momentum."""

from typing import NamedTuple

import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree

from jaxforge.model.linear import times
from jaxforge.optim.moments import MomentStorage, zeros
from jaxforge.optim.schedule import Schedule
from jaxforge.optim.update_rule import Step, transform


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
    state_dtype: MomentStorage,
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

    The update function is that of `optim.update_rule.transform`.
    """
    b1, b2 = betas

    def init(params: PyTree) -> LionState:
        return LionState(jnp.zeros((), jnp.int32), *zeros(params, state_dtype))

    def moved(_: tuple, g: Array, m: Array) -> tuple[Array, Array]:
        return jnp.sign(b1 * m + (1 - b1) * g), b2 * m + (1 - b2) * g

    def update(step: Step, grads: PyTree, state: LionState, params: PyTree) -> tuple:
        def change(p: Array, direction: Array, decay: float, factor: float) -> tuple[Array]:
            p32 = p.astype(jnp.float32)
            return (p32 * (1 - step.lr * decay) - times(step.lr, factor) * direction - p32,)

        trees = params, grads, weight_decay, lr_factors
        return step.advance(state, ("mu",), moved, change, *trees)

    return transform(schedule, state_dtype, init, update)
