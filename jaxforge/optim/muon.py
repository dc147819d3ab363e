"""Muon (Jordan et al., 2024) as in KempnerForge: orthogonalized steps for matrices.

Newton-Schulz iterations bring the singular values of the momentum near 1. They run on whole
matrices, so that the result does not depend on the sharding. AdamW updates vectors, and matrices
with a large aspect ratio.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict
from jaxtyping import Array, Float, Int, PyTree

from jaxforge.config.model import EXPERTS, LAYERS
from jaxforge.model.linear import is_matrix, times
from jaxforge.optim.adamw import AdamWState, adamw
from jaxforge.optim.moments import MomentStorage, init_moments
from jaxforge.optim.schedule import Schedule
from jaxforge.optim.trees import Path, join, split
from jaxforge.optim.update_rule import UpdateStep, transform

_MAX_ASPECT = 10
_NORM_EPS = 1e-7
_POLYNOMIAL = (3.4445, -4.7750, 2.0315)
"""Coefficients of x ← a x + b x³ + c x⁵, which multiplies a small x by a in each iteration, until
x stays between 0.68 and 1.21."""


Takes = Callable[[tuple[int, ...], tuple[str, ...]], bool]
"""(shape, logical axes) -> whether Muon updates a parameter."""

Size = TypeVar("Size", int, float)


class MuonState(NamedTuple):
    """State of Muon. A parameter is in `momentum`, or in both `mu` and `nu`.

    Attributes:
        updates: number of updates made.
        momentum: Muon's momentum.
        mu: AdamW's running mean of the gradient.
        nu: AdamW's running mean of the squared gradient.
        momentum_scales: scales of 8-bit `momentum`; None for other storage formats.
        mu_scales: scales of 8-bit `mu`.
        nu_scales: scales of 8-bit `nu`.
    """

    updates: Int[Array, ""]
    momentum: PyTree
    mu: PyTree
    nu: PyTree
    momentum_scales: PyTree | None = None
    mu_scales: PyTree | None = None
    nu_scales: PyTree | None = None


def muon(
    schedule: Schedule,
    adam_schedule: Schedule,
    *,
    axes: PyTree,
    momentum: float,
    ns_steps: int,
    betas: tuple[float, float],
    eps: float,
    weight_decay: PyTree,
    state_dtype: MomentStorage,
    lr_factors: PyTree | None = None,
    muon_factors: PyTree | None = None,
    takes: Takes | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return Muon for some parameters (`muon_takes`) and AdamW for the others, as one transform.

    With lr = schedule(updates) · lr_scale, per matrix p [m, n] (one layer's) with gradient g:

        b ← momentum · b + g
        p ← p (1 - lr · weight_decay) - lr · √max(1, m / n) · orthogonal(b)

    Args:
        schedule: Muon's learning rate by the number of updates made.
        adam_schedule: AdamW's learning rate by the number of updates made.
        axes: logical axes of every parameter.
        momentum: factor on b in each update.
        ns_steps: number of Newton-Schulz iterations.
        betas: AdamW's b1, b2.
        eps: constant added to AdamW's denominator.
        weight_decay: tree of floats, one per parameter.
        state_dtype: storage format of b and AdamW's moments; the arithmetic is float32.
        lr_factors: as in `adamw`, for AdamW's parameters.
        muon_factors: as `lr_factors`, for Muon's parameters.
        takes: selects Muon's parameters; by default `muon_takes`.

    `optim.update_rule.transform` documents the arguments of the update function. `lr_scale`
    multiplies both learning rates.
    """

    def for_muon(params: PyTree) -> frozenset[Path]:
        names, flat = flatten_dict(axes), flatten_dict(params)
        is_muon = takes or muon_takes
        return frozenset(path for path, p in flat.items() if is_muon(p.shape, names[path]))

    def adam(paths: frozenset[Path]) -> optax.GradientTransformationExtraArgs:
        _, decay = split(weight_decay, paths)
        factors = None if lr_factors is None else split(lr_factors, paths)[1]
        return adamw(
            adam_schedule, betas=betas, eps=eps, weight_decay=decay, state_dtype=state_dtype,
            lr_factors=factors,
        )  # fmt: skip

    def accumulate(_: tuple, g: Array, b: Array) -> tuple[Array, Array]:
        b = momentum * b + g
        return b, b

    def init(params: PyTree) -> MuonState:
        paths = for_muon(params)
        matrices, others = split(params, paths)
        updates, mu, nu, *scales = adam(paths).init(others)
        buffers, buffers_scales = init_moments(matrices, state_dtype)
        return MuonState(updates, buffers, mu, nu, buffers_scales, *scales)

    def update(step: UpdateStep, grads: PyTree, state: MuonState, params: PyTree) -> tuple:
        paths = for_muon(params)

        def change(
            p: Array, b: Array, decay: float, factor: float, names: tuple[str, ...]
        ) -> tuple[Array]:
            m, n = _matrix_shape(p.shape, names)
            direction = orthogonal(b.reshape(-1, m, n), ns_steps).reshape(p.shape)
            p32, scale = p.astype(jnp.float32), math.sqrt(max(1.0, m / n))
            scaled = times(step.lr, factor) * scale * direction
            return (p32 * (1 - step.lr * decay) - scaled - p32,)

        trees = (tree and split(tree, paths)[0] for tree in (weight_decay, muon_factors, axes))
        (matrices, others), (matrix_grads, other_grads) = split(params, paths), split(grads, paths)
        matrix_updates, new = step.advance(
            state, ("momentum",), accumulate, change, matrices, matrix_grads, *trees
        )
        other_updates, adams = adam(paths).update(
            other_grads,
            AdamWState(state.updates, state.mu, state.nu, state.mu_scales, state.nu_scales),
            others,
            lr_scale=step.lr_scale,
            applied=step.moment_update.applied,
        )
        return join(matrix_updates, other_updates), new._replace(**adams._asdict())

    return transform(schedule, state_dtype, init, update)


def muon_takes(shape: tuple[float, ...], axes: tuple[str, ...]) -> bool:
    """Return whether Muon updates a parameter: a matrix per layer, of an aspect ratio up to 10.

    No other property matters: Muon also updates an embedding or output head of such a shape.
    """
    if not is_matrix(axes):
        return False
    m, n = _matrix_shape(shape, axes)
    return max(m, n) <= _MAX_ASPECT * min(m, n)


def orthogonal(g: Float[Array, "l m n"], steps: int) -> Float[Array, "l m n"]:
    """Return matrices with the singular vectors of `g` and singular values near 1.

        X = g / (‖g‖ + 1e-7), then in each step A = X Xᵀ, X ← a X + (b A + c A²) X

    Products have the precision of the run: float32 with `mixed_precision = "fp32"`.

    Args:
        g: matrices, float32.
        steps: number of Newton-Schulz iterations.
    """
    a, b, c = _POLYNOMIAL
    is_tall = g.shape[-2] > g.shape[-1]

    def iterate(_: int, x: Array) -> Array:
        if is_tall:  # (X Xᵀ) X = X (Xᵀ X): the smaller of the two Gram matrices suffices
            gram = x.mT @ x
            return a * x + x @ (b * gram + c * (gram @ gram))
        gram = x @ x.mT
        return a * x + (b * gram + c * (gram @ gram)) @ x

    norm = jnp.sqrt(jnp.sum(g * g, axis=(-2, -1), keepdims=True))
    return jax.lax.fori_loop(0, steps, iterate, g / (norm + _NORM_EPS))


def _matrix_shape(shape: tuple[Size, ...], axes: tuple[str, ...]) -> tuple[Size, Size]:
    """Return rows and columns per layer or expert; all dimensions but the first are columns."""
    sizes = zip(shape, axes, strict=True)
    rows, *columns = (size for size, axis in sizes if axis not in (LAYERS, EXPERTS))
    return rows, math.prod(columns)
