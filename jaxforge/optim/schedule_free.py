"""Schedule-free AdamW (arXiv:2405.15682) as KempnerForge has it: averaging in place of decay.

Three sets of weights: z takes the steps, x is the weighted mean of all z so far, and the model
holds y, between the two. Gradients are taken at y, and so are losses of an evaluation and samples;
in the paper those are x's.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxforge.model.linear import times
from jaxforge.optim.adamw import bias_correction
from jaxforge.optim.eight_bit import ROOT
from jaxforge.optim.moments import Kept, Place, Turn, joined, parted, places, zeros
from jaxforge.optim.schedule import Schedule
from jaxforge.optim.trees import ones, unzip


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
    state_dtype: Kept,
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

    The update function takes `lr_scale`, a scalar factor on the learning rate (default 1), and
    `applied` (`optim.moments.Turn`).
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

    def update(
        grads: PyTree,
        state: ScheduleFreeState,
        params: PyTree | None = None,
        *,
        lr_scale: Float[Array, ""] | float = 1.0,
        applied: Bool[Array, ""] | bool = True,
        **_: object,
    ) -> tuple[PyTree, ScheduleFreeState]:
        assert params is not None
        lr = schedule(state.updates) * lr_scale
        weight = lr * (1 - b1)
        weight_sum = state.weight_sum + weight
        share = jnp.where(weight_sum > 0, weight / weight_sum, 1.0)  # no step yet: x is z
        correction2 = bias_correction(b2, state.updates + 1)
        is_first = state.updates == 0

        turn = Turn(state_dtype, state.updates, applied)

        def one(
            y: Array,
            g: Array,
            v: Array,
            x: Array,
            z: Array,
            decay: float,
            factor: float,
            at: Place,
        ) -> tuple[Array, ...]:
            dtype = y.dtype
            direction, v = turn.advance(moved, at, g, v, scalars=(correction2,))
            y, x, z = (a.astype(jnp.float32) for a in (y, x, z))
            z = jnp.where(is_first, y, z)
            z = (z - times(lr, factor) * direction) * (1 - lr * decay)
            x = _lerp(x, z, share)
            return _lerp(z, x, b1) - y, v, x.astype(dtype), z.astype(dtype)

        nu, at = joined(state.nu, state.nu_scales), places(params, state_dtype)
        trees = params, grads, nu, state.x, state.z, weight_decay
        factors = ones(params) if lr_factors is None else lr_factors
        leaves = jax.tree.map(one, *trees, factors, at)
        updates, nu, x, z = unzip(4, leaves, params)
        nu, scales = parted(nu)
        count = optax.safe_increment(state.updates)
        return updates, ScheduleFreeState(count, nu, x, z, weight_sum, scales)

    return optax.GradientTransformationExtraArgs(init, update)


def _lerp(start: Array, end: Array, share: Array | float) -> Array:
    """(1 - share) start + share · end, exact at either end (as `torch.lerp`)."""
    step = end - start
    return jnp.where(jnp.asarray(share) < 0.5, start + share * step, end - (1 - share) * step)
