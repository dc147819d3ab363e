"""Schedule-free AdamW (arXiv:2405.15682) as in KempnerForge: averaging instead of decay.

There are three sets of weights: z takes the steps, x is the weighted mean of all z so far, and the
model holds y, an interpolation of both. Gradients, evaluation losses and samples use y; the paper
evaluates x. The chain ends with the averaging, which therefore includes the weight decay:

    scale_by_root_mean_square -> scale_by_factors -> scale_by_rate -> average_steps
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from jaxforge.config.optimizer import OPTIMIZERS
from jaxforge.model.linear import times
from jaxforge.optim.adamw import bias_correction
from jaxforge.optim.chain import Factors, Links, scale_by_rule
from jaxforge.optim.eight_bit import ROOT
from jaxforge.optim.moments import MomentStorage
from jaxforge.optim.parts import Parts
from jaxforge.optim.trees import unzip


class AverageState(NamedTuple):
    """State of the averaging.

    Attributes:
        x: weighted mean of z; zeros before the first update.
        z: weights that take the steps; zeros before the first update, which starts z at the
            parameters.
        weight_sum: sum of the weights of the mean.
    """

    x: PyTree
    z: PyTree
    weight_sum: Float[Array, ""]


def scale_by_root_mean_square(
    b2: float, eps: float, storage: MomentStorage
) -> optax.GradientTransformationExtraArgs:
    """Return the direction g / (√(v / (1 - b2^k)) + eps) with v ← b2 v + (1 - b2) g².

    The state has `updates` and `nu` (v).

    Args:
        b2: decay rate of v.
        eps: constant added to the denominator.
        storage: storage format of v; the arithmetic is float32.
    """

    def rule(scalars: tuple[Array, ...], g: Array, v: Array) -> tuple[Array, Array]:
        (correction2,) = scalars
        v = b2 * v + (1 - b2) * (g * g)
        return g / (jnp.sqrt(v / correction2) + eps), v

    def scalars(k: Int[Array, "..."]) -> tuple[Array]:
        return (bias_correction(b2, k),)

    return scale_by_rule(rule, {"nu": ROOT}, storage, scalars)


def average_steps(b1: float, decays: Factors) -> optax.GradientTransformationExtraArgs:
    """Return a transform that averages the weights after each step u; the parameters are y.

        z ← (z + u) (1 - lr · decay),   z = y before the first update
        x ← x + c (z - x),   c = lr (1 - b1) / Σ lr (1 - b1) over all updates up to this one
        y ← (1 - b1) z + b1 x

    x and z have the dtype of the parameters; the arithmetic is float32.

    Args:
        b1: weight of the mean x in y.
        decays: as in `chain.decay_weights`.
    """

    def init(params: PyTree) -> AverageState:
        x, z = (jax.tree.map(jnp.zeros_like, params) for _ in "xz")
        return AverageState(x, z, jnp.zeros((), jnp.float32))

    def update(
        steps: PyTree,
        state: AverageState,
        params: PyTree | None = None,
        *,
        lr: Float[Array, ""],
        **_: object,
    ) -> tuple[PyTree, AverageState]:
        weight = lr * (1 - b1)
        weight_sum = state.weight_sum + weight
        share = jnp.where(weight_sum > 0, weight / weight_sum, 1.0)  # x = z while all rates are 0
        # As long as all rates were 0, z has not left the parameters.
        is_first = state.weight_sum == 0

        def average(u: Array, y: Array, x: Array, z: Array, decay: float) -> tuple[Array, ...]:
            dtype = y.dtype
            y, x, z = (a.astype(jnp.float32) for a in (y, x, z))
            z = (jnp.where(is_first, y, z) + u) * (1 - times(lr, decay))
            x = _lerp(x, z, share)
            return _lerp(z, x, b1) - y, x.astype(dtype), z.astype(dtype)

        leaves = jax.tree.map(average, steps, params, state.x, state.z, decays(steps))
        changes, x, z = unzip(3, leaves, steps)
        return changes, AverageState(x, z, weight_sum)

    return optax.GradientTransformationExtraArgs(init, update)


def _lerp(start: Array, end: Array, share: Array | float) -> Array:
    """Return (1 - share) start + share · end, exact at both ends (as `torch.lerp`)."""
    step = end - start
    return jnp.where(jnp.asarray(share) < 0.5, start + share * step, end - (1 - share) * step)


@OPTIMIZERS.register("schedule_free_adamw")
def build(parts: Parts) -> Links:
    """Return the links of schedule-free AdamW."""
    b1, b2 = parts.optimizer.betas
    direction = scale_by_root_mean_square(b2, parts.eps, parts.storage)
    return [direction, *parts.scaling(), average_steps(b1, parts.decays())]
