"""Muon (Jordan et al., 2024) as in KempnerForge, and its variants: orthogonalized steps.

Newton-Schulz iterations bring the singular values of the momentum near 1. They run on whole
matrices, so that the result does not depend on the sharding. AdamW updates vectors, and matrices
with a large aspect ratio.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict
from jaxtyping import Array, Float, Int, PyTree

from jaxforge.model.linear import is_matrix, times
from jaxforge.optim.adamw import AdamWState, adamw
from jaxforge.optim.matrices import matrix_shape, rows_shape
from jaxforge.optim.moments import MomentStorage, init_moments
from jaxforge.optim.schedule import Schedule
from jaxforge.optim.trees import Path, join, split
from jaxforge.optim.update_rule import UpdateStep, change_of, transform
from jaxforge.parallel.sharding import Axes

_MAX_ASPECT = 10
_NORM_EPS = 1e-7
_ROW_EPS = 1e-8
_POLYNOMIAL = (3.4445, -4.7750, 2.0315)
"""Coefficients of x ← a x + b x³ + c x⁵, which multiplies a small x by a in each iteration, until
x stays between 0.68 and 1.21."""


Takes = Callable[[tuple[int, ...], tuple[str, ...]], bool]
"""(shape, logical axes) -> whether Muon updates a parameter."""


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
        row_nu: NorMuon's mean square of each row of orthogonalized momenta; None for Muon.
    """

    updates: Int[Array, ""]
    momentum: PyTree
    mu: PyTree
    nu: PyTree
    momentum_scales: PyTree | None = None
    mu_scales: PyTree | None = None
    nu_scales: PyTree | None = None
    row_nu: PyTree | None = None


class Variant(NamedTuple):
    """Variant of Muon.

    Attributes:
        nesterov: whether gradient + momentum · b is orthogonalized instead of b.
        beta2: decay rate of NorMuon's mean square of each row; None for Muon.
        scale: factor on an orthogonal step by its numbers of rows and columns.
    """

    nesterov: bool
    beta2: float | None
    scale: Callable[[float, float], float]


def spectral_scale(m: float, n: float) -> float:
    """Return Muon's √max(1, m / n): changes of the outputs of a layer have equal sizes."""
    return math.sqrt(max(1.0, m / n))


def rms_scale(m: float, n: float) -> float:
    """Return 0.2 √max(m, n): elements change as much as with AdamW (arXiv:2502.16982)."""
    return 0.2 * math.sqrt(max(m, n))


MUON = Variant(nesterov=False, beta2=None, scale=spectral_scale)
"""Muon as in KempnerForge."""


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
    is_cautious: bool = False,
    variant: Variant = MUON,
) -> optax.GradientTransformationExtraArgs:
    """Return Muon for some parameters (`muon_takes`) and AdamW for the others, as one transform.

    With lr = schedule(updates) · lr_scale, per matrix p [m, n] (one layer's) with gradient g:

        b ← momentum · b + g,   u = g + momentum · b with Nesterov's look-ahead, else b
        p ← p (1 - lr · weight_decay) - lr · scale(m, n) · orthogonal(u)

    NorMuon (arXiv:2510.05491) divides each row of o = orthogonal(u) by its usual length, and keeps
    the norm √min(m, n) of an orthogonal matrix:

        v ← beta2 v + (1 - beta2) mean of o² over columns
        p ← p (1 - lr · weight_decay) - lr · scale(m, n) · √min(m, n) · o' / ‖o'‖,   o' = o / √v

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
        is_cautious: as in `adamw`.
        variant: the variant of Muon.

    `optim.update_rule.transform` documents the arguments of the update function. `lr_scale`
    multiplies both learning rates.
    """
    rule = _MatrixRule(momentum, ns_steps, variant)

    def for_muon(params: PyTree) -> frozenset[Path]:
        names, flat = flatten_dict(axes), flatten_dict(params)
        is_muon = takes or muon_takes
        return frozenset(path for path, p in flat.items() if is_muon(p.shape, names[path]))

    def adam(paths: frozenset[Path]) -> optax.GradientTransformationExtraArgs:
        _, decay = split(weight_decay, paths)
        factors = None if lr_factors is None else split(lr_factors, paths)[1]
        return adamw(
            adam_schedule, betas=betas, eps=eps, weight_decay=decay, state_dtype=state_dtype,
            lr_factors=factors, is_cautious=is_cautious,
        )  # fmt: skip

    def init(params: PyTree) -> MuonState:
        paths = for_muon(params)
        matrices, others = split(params, paths)
        adam_state = adam(paths).init(others)
        buffers, scales = init_moments(matrices, state_dtype)
        row_nu = rule.init_row_nu(matrices, split(axes, paths)[0])
        return MuonState(
            momentum=buffers, momentum_scales=scales, row_nu=row_nu, **adam_state._asdict()
        )

    def update(step: UpdateStep, grads: PyTree, state: MuonState, params: PyTree) -> tuple:
        def change(p: Array, u: Array, *details: Any) -> tuple[Array, ...]:  # noqa: ANN401
            *row_nu, decay, factor, names = details
            direction, *row_nu = rule.orthogonalize(u, names, *row_nu)
            scale = variant.scale(*matrix_shape(p.shape, names))
            p_step = times(step.lr, factor) * scale * direction
            return change_of(p, p_step, step.lr * decay, is_cautious=is_cautious), *row_nu

        paths = for_muon(params)
        trees = (tree and split(tree, paths)[0] for tree in (weight_decay, muon_factors, axes))
        (matrices, others), (matrix_grads, other_grads) = split(params, paths), split(grads, paths)
        matrix_updates, new = step.advance(
            state, ("momentum",), rule.accumulate, change, matrices, matrix_grads, *trees,
            weights=() if state.row_nu is None else ("row_nu",),
        )  # fmt: skip
        other_updates, adam_state = adam(paths).update(
            other_grads,
            AdamWState(*(getattr(state, field) for field in AdamWState._fields)),
            others,
            lr_scale=step.lr_scale,
            applied=step.moment_update.applied,
        )
        return join(matrix_updates, other_updates), new._replace(**adam_state._asdict())

    return transform(schedule, state_dtype, init, update)


class _MatrixRule(NamedTuple):
    """Muon's arithmetic for a parameter [layers, m, n]; `muon` documents the fields."""

    momentum: float
    ns_steps: int
    variant: Variant

    def init_row_nu(self, matrices: PyTree, axes: PyTree) -> PyTree | None:
        """Return NorMuon's v before the first update."""
        if self.variant.beta2 is None:
            return None
        return jax.tree.map(lambda p, names: jnp.zeros(rows_shape(p.shape, names)), matrices, axes)

    def accumulate(self, _: tuple, g: Array, b: Array) -> tuple[Array, Array]:
        """Return u and the new b."""
        b = self.momentum * b + g
        return g + self.momentum * b if self.variant.nesterov else b, b

    def orthogonalize(self, u: Array, axes: Axes, *row_nu: Array) -> tuple[Array, ...]:
        """Return orthogonal(u), for NorMuon with normalized rows, and the new v."""
        m, n = matrix_shape(u.shape, axes)
        direction = orthogonal(u.reshape(-1, m, n), self.ns_steps)
        if self.variant.beta2 is not None:
            (v,) = row_nu
            direction, rows = _normalize_rows(direction, v.reshape(-1, m), self.variant.beta2)
            row_nu = (rows.reshape(v.shape),)
        return direction.reshape(u.shape), *row_nu


def muon_takes(shape: tuple[float, ...], axes: tuple[str, ...]) -> bool:
    """Return whether Muon updates a parameter: a matrix per layer, of an aspect ratio up to 10.

    No other property matters: Muon also updates an embedding or output head of such a shape.
    """
    if not is_matrix(axes):
        return False
    m, n = matrix_shape(shape, axes)
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


def _normalize_rows(
    o: Float[Array, "l m n"], v: Float[Array, "l m"], beta2: float
) -> tuple[Float[Array, "l m n"], Float[Array, "l m"]]:
    """Return NorMuon's step of norm √min(m, n) for orthogonalized momenta, and the new v."""
    m, n = o.shape[-2:]
    v = beta2 * v + (1 - beta2) * jnp.mean(o * o, axis=-1)
    o = o / (jnp.sqrt(v) + _ROW_EPS)[..., None]
    norm = jnp.sqrt(jnp.sum(o * o, axis=(-2, -1), keepdims=True))
    return o * (math.sqrt(min(m, n)) / (norm + _NORM_EPS)), v
