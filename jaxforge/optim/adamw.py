"""AdamW (arXiv:1711.05101) with the arithmetic of `torch.optim.AdamW`."""

import math

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jaxforge.config.optimizer import OPTIMIZERS
from jaxforge.optim.chain import Links, scale_by_rule
from jaxforge.optim.eight_bit import ROOT, SIGNED
from jaxforge.optim.moments import MomentStorage
from jaxforge.optim.parts import Parts


def scale_by_adam(
    betas: tuple[float, float], eps: float, storage: MomentStorage
) -> optax.GradientTransformationExtraArgs:
    """Return Adam's direction d of a gradient g as an optax transform.

    With t = updates + 1:

        m ← b1 m + (1 - b1) g,   v ← b2 v + (1 - b2) g²
        d = m / (1 - b1^t) / (√v / √(1 - b2^t) + eps)

    The state has `updates`, `mu` (m) and `nu` (v).

    Args:
        betas: b1, b2.
        eps: constant added to the denominator.
        storage: storage format of m and v; the arithmetic is float32.
    """
    b1, b2 = betas

    def rule(scalars: tuple[Array, ...], g: Array, m: Array, v: Array) -> tuple[Array, ...]:
        inverse_correction1, root_correction2 = scalars
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * (g * g)
        return inverse_correction1 * (m / (jnp.sqrt(v) / root_correction2 + eps)), m, v

    def scalars(t: Int[Array, "..."]) -> tuple[Array, ...]:
        return 1 / bias_correction(b1, t), jnp.sqrt(bias_correction(b2, t))

    return scale_by_rule(rule, {"mu": SIGNED, "nu": ROOT}, storage, scalars)


def bias_correction(beta: float, t: Int[Array, "..."]) -> Float[Array, "..."]:
    """Return 1 - beta^t without the cancellation that costs four digits when beta is near 1."""
    log_beta = math.log(beta) if beta else -math.inf
    return -jnp.expm1(t.astype(jnp.float32) * log_beta)


@OPTIMIZERS.register("adamw")
def build(parts: Parts) -> Links:
    """Return AdamW's links of the chain."""
    direction = scale_by_adam(parts.optimizer.betas, parts.eps, parts.storage)
    return [direction, *parts.scaling(), parts.decay()]
