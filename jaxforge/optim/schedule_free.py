"""Schedule-free AdamW (arXiv:2405.15682) as in KempnerForge: averaging instead of decay.

There are three sets of weights: z takes the steps, x is the weighted mean of all z so far, and the
model holds y, an interpolation of both. Gradients, evaluation losses and samples use y; the paper
evaluates x.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from jaxforge.model.linear import times
from jaxforge.optim.adamw import bias_correction
from jaxforge.optim.eight_bit import ROOT
from jaxforge.optim.moments import MomentStorage, init_moments
from jaxforge.optim.schedule import Schedule
from jaxforge.optim.update_rule import UpdateStep, transform


class ScheduleFreeState(NamedTuple):
    """State of schedule-free AdamW.

    Attributes:
        updates: number of updates made.
        nu: running mean of the squared gradient, per parameter.
        x: weighted mean of z; zeros before the first update.
        z: weights that take the steps; zeros before the first update, which starts z at the
            parameters.
        weight_sum: sum of the weights of the mean.
        nu_scales: scales of 8-bit `nu`; None for other storage formats.
    """

    updates: Int[Array, ""]
    nu: PyTree
    x: PyTree
    z: PyTree
    weight_sum: Float[Array, ""]
    nu_scales: PyTree | None = None


def schedule_free_adamw(
    schedule: Schedule,
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: PyTree,
    state_dtype: MomentStorage,
    lr_factors: PyTree | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return schedule-free AdamW as one optax transform, whose parameters are y.

    With lr = schedule(updates) · lr_scale and k = updates + 1, per parameter y with gradient g:

        v ← b2 v + (1 - b2) g²
        z ← (z - lr · g / (√(v / (1 - b2^k)) + eps)) (1 - lr · weight_decay),   z = y before k = 1
        x ← x + c (z - x),   c = lr (1 - b1) / Σ lr (1 - b1) over all updates up to this one
        y ← (1 - b1) z + b1 x

    Args:
        schedule: learning rate by the number of updates made, including warm-up.
        betas: b1, the weight of the mean x in y, and b2.
        eps: constant added to the denominator.
        weight_decay: tree of floats, one per parameter.
        state_dtype: storage format of v; x and z have the dtype of the parameters. The arithmetic
            is float32.
        lr_factors: as in `adamw`.

    `optim.update_rule.transform` documents the arguments of the update function.
    """
    b1, b2 = betas

    def init(params: PyTree) -> ScheduleFreeState:
        nu, scales = init_moments(params, state_dtype, ROOT)
        x, z = (jax.tree.map(jnp.zeros_like, params) for _ in "xz")
        count, weight_sum = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32)
        return ScheduleFreeState(count, nu, x, z, weight_sum, scales)

    def advance(scalars: tuple[Array, ...], g: Array, v: Array) -> tuple[Array, Array]:
        (correction2,) = scalars
        v = b2 * v + (1 - b2) * (g * g)
        return g / (jnp.sqrt(v / correction2) + eps), v

    def update(step: UpdateStep, grads: PyTree, state: ScheduleFreeState, params: PyTree) -> tuple:
        lr = step.lr
        weight = lr * (1 - b1)
        weight_sum = state.weight_sum + weight
        share = jnp.where(weight_sum > 0, weight / weight_sum, 1.0)  # x = z while all rates are 0
        correction2 = bias_correction(b2, state.updates + 1)
        is_first = state.updates == 0

        def change(
            y: Array, direction: Array, x: Array, z: Array, decay: float, factor: float
        ) -> tuple[Array, ...]:
            dtype = y.dtype
            y, x, z = (a.astype(jnp.float32) for a in (y, x, z))
            z = jnp.where(is_first, y, z)
            z = (z - times(lr, factor) * direction) * (1 - lr * decay)
            x = _lerp(x, z, share)
            return _lerp(z, x, b1) - y, x.astype(dtype), z.astype(dtype)

        updates, new = step.advance(
            state, ("nu",), advance, change, params, grads, weight_decay, lr_factors,
            weights=("x", "z"), scalars=(correction2,),
        )  # fmt: skip
        return updates, new._replace(weight_sum=weight_sum)

    return transform(schedule, state_dtype, init, update)


def _lerp(start: Array, end: Array, share: Array | float) -> Array:
    """Return (1 - share) start + share · end, exact at both ends (as `torch.lerp`)."""
    step = end - start
    return jnp.where(jnp.asarray(share) < 0.5, start + share * step, end - (1 - share) * step)
