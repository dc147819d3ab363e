"""Schedule-free AdamW (arXiv:2405.15682) as KempnerForge has it: averaging in place of decay.

Three sets of weights: z takes the steps, x is the weighted mean of all z so far, and the model
holds y, between the two. Gradients are taken at y, and so are losses of an evaluation and samples;
in the paper those are x's.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from jaxforge.model.linear import times
from jaxforge.optim.adamw import bias_correction
from jaxforge.optim.eight_bit import ROOT
from jaxforge.optim.moments import MomentStorage, zeros
from jaxforge.optim.schedule import Schedule
from jaxforge.optim.update_rule import Step, transform


class ScheduleFreeState(NamedTuple):
    """Updates made, the mean of squared gradients, the weights x and z, the sum of x's shares.

    Before the first update x and z are zero: z begins as whatever the parameters are then. Scales
    are those of `nu` in eight bits.
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
    """Schedule-free AdamW as one transform; its parameters are y.

    With lr = schedule(updates) · lr_scale and k = updates + 1, per parameter y with gradient g:

        v ← b2 v + (1 - b2) g²
        z ← (z - lr · g / (√(v / (1 - b2^k)) + eps)) (1 - lr · weight_decay),   z = y before k = 1
        x ← x + c (z - x),   c = lr (1 - b1) / Σ lr (1 - b1) over all updates up to this one
        y ← (1 - b1) z + b1 x

    Args:
        schedule: learning rate by the number of updates made, with its warm-up in it.
        betas: b1, the share of the mean in y, and b2.
        eps: added to the denominator.
        weight_decay: a tree of floats, one per parameter.
        state_dtype: what v is stored in; x and z are weights and keep the parameters' dtype.
            The arithmetic is float32.
        lr_factors: as of `adamw`.

    The update function is that of `optim.update_rule.transform`.
    """
    b1, b2 = betas

    def init(params: PyTree) -> ScheduleFreeState:
        nu, scales = zeros(params, state_dtype, ROOT)
        x, z = (jax.tree.map(jnp.zeros_like, params) for _ in "xz")
        count, weight_sum = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32)
        return ScheduleFreeState(count, nu, x, z, weight_sum, scales)

    def moved(scalars: tuple[Array, ...], g: Array, v: Array) -> tuple[Array, Array]:
        (correction2,) = scalars
        v = b2 * v + (1 - b2) * (g * g)
        return g / (jnp.sqrt(v / correction2) + eps), v

    def update(step: Step, grads: PyTree, state: ScheduleFreeState, params: PyTree) -> tuple:
        lr = step.lr
        weight = lr * (1 - b1)
        weight_sum = state.weight_sum + weight
        share = jnp.where(weight_sum > 0, weight / weight_sum, 1.0)  # no step yet: x is z
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
            state, ("nu",), moved, change, params, grads, weight_decay, lr_factors,
            weights=("x", "z"), scalars=(correction2,),
        )  # fmt: skip
        return updates, new._replace(weight_sum=weight_sum)

    return transform(schedule, state_dtype, init, update)


def _lerp(start: Array, end: Array, share: Array | float) -> Array:
    """(1 - share) start + share · end, exact at either end (as `torch.lerp`)."""
    step = end - start
    return jnp.where(jnp.asarray(share) < 0.5, start + share * step, end - (1 - share) * step)
