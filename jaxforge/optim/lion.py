"""Lion (arXiv:2302.06675): steps of equal size in every element, by the sign of the momentum."""

import jax.numpy as jnp
import optax
from jaxtyping import Array

from jaxforge.config.optimizer import OPTIMIZERS
from jaxforge.optim.chain import Links, scale_by_rule
from jaxforge.optim.eight_bit import SIGNED
from jaxforge.optim.moments import MomentStorage
from jaxforge.optim.parts import Parts


def scale_by_lion(
    betas: tuple[float, float], storage: MomentStorage
) -> optax.GradientTransformationExtraArgs:
    """Return Lion's direction d of a gradient g as an optax transform.

        d = sign(b1 m + (1 - b1) g)
        m ← b2 m + (1 - b2) g

    The state has `updates` and `mu` (m).

    Args:
        betas: b1, b2.
        storage: storage format of m; the arithmetic is float32.
    """
    b1, b2 = betas

    def rule(_: tuple, g: Array, m: Array) -> tuple[Array, Array]:
        return jnp.sign(b1 * m + (1 - b1) * g), b2 * m + (1 - b2) * g

    return scale_by_rule(rule, {"mu": SIGNED}, storage)


@OPTIMIZERS.register("lion")
def build(parts: Parts) -> Links:
    """Return Lion's links of the chain."""
    direction = scale_by_lion(parts.optimizer.betas, parts.storage)
    return [direction, *parts.scaling(), parts.decay()]
