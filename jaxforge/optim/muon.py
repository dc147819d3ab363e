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

from jaxforge.config.optimizer import OPTIMIZERS
from jaxforge.model import mup
from jaxforge.model.linear import is_matrix
from jaxforge.optim.adamw import scale_by_adam
from jaxforge.optim.chain import Links, scale_by_rule
from jaxforge.optim.eight_bit import SIGNED
from jaxforge.optim.matrices import matrix_shape, rows_shape
from jaxforge.optim.moments import MomentStorage
from jaxforge.optim.parts import Parts
from jaxforge.optim.trees import Path, join, split, unzip
from jaxforge.parallel.sharding import Axes

_MAX_ASPECT = 10
_NORM_EPS = 1e-7
_ROW_EPS = 1e-8
_POLYNOMIAL = (3.4445, -4.7750, 2.0315)
"""Coefficients of x ← a x + b x³ + c x⁵, which multiplies a small x by a in each iteration, until
x stays between 0.68 and 1.21."""


Takes = Callable[[tuple[int, ...], Axes], bool]
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


def scale_by_muon(
    adam: optax.GradientTransformationExtraArgs,
    *,
    axes: PyTree,
    momentum: float,
    ns_steps: int,
    storage: MomentStorage,
    takes: Takes | None = None,
    variant: Variant = MUON,
) -> optax.GradientTransformationExtraArgs:
    """Return Muon's direction for some parameters, and Adam's for the others, as one transform.

    Per matrix [m, n] (one layer's) with gradient g:

        b ← momentum · b + g,   u = g + momentum · b with Nesterov's look-ahead, else b
        d = scale(m, n) · orthogonal(u)

    NorMuon (arXiv:2510.05491) divides each row of o = orthogonal(u) by its usual length, and keeps
    the norm √min(m, n) of an orthogonal matrix:

        v ← beta2 v + (1 - beta2) mean of o² over columns
        d = scale(m, n) · √min(m, n) · o' / ‖o'‖,   o' = o / √v

    Args:
        adam: `scale_by_adam` for the other parameters.
        axes: logical axes of every parameter.
        momentum: factor on b in each update.
        ns_steps: number of Newton-Schulz iterations.
        storage: storage format of b; the arithmetic is float32.
        takes: selects Muon's parameters; by default `muon_takes`.
        variant: the variant of Muon.
    """
    names, is_muon = flatten_dict(axes), takes or muon_takes

    def accumulate(_: tuple, g: Array, b: Array) -> tuple[Array, Array]:
        # The sum is not weighted by 1 - momentum: the norm is removed by `orthogonal` anyway.
        b = momentum * b + g
        return g + momentum * b if variant.nesterov else b, b

    def orthogonalize(u: Array, names: Axes, *row_nu: Array) -> tuple[Array, ...]:
        # All layers and experts are one batch of matrices, so that each iteration is one product.
        m, n = matrix_shape(u.shape, names)
        d = orthogonal(u.reshape(-1, m, n), ns_steps)
        if variant.beta2 is not None:
            (v,) = row_nu
            # v [..., m] is small, and stays in float32 under every storage format.
            d, rows = _normalize_rows(d, v.reshape(-1, m), variant.beta2)
            row_nu = (rows.reshape(v.shape),)
        return variant.scale(m, n) * d.reshape(u.shape), *row_nu

    def paths_of(tree: PyTree) -> frozenset[Path]:
        flat = flatten_dict(tree).items()
        return frozenset(path for path, leaf in flat if is_muon(leaf.shape, names[path]))

    buffers = scale_by_rule(accumulate, {"momentum": SIGNED}, storage)

    def init(params: PyTree) -> MuonState:
        paths = paths_of(params)
        matrices, of_adam = split(params, paths)
        fields = {**buffers.init(matrices)._asdict(), **adam.init(of_adam)._asdict()}
        if variant.beta2 is not None:
            zeros = lambda p, names: jnp.zeros(rows_shape(p.shape, names))  # noqa: E731
            fields["row_nu"] = jax.tree.map(zeros, matrices, split(axes, paths)[0])
        return MuonState(**fields)

    def update(
        grads: PyTree,
        state: MuonState,
        params: PyTree | None = None,
        **extra: Any,  # noqa: ANN401
    ) -> tuple[PyTree, MuonState]:
        paths = paths_of(grads)
        of_muon, of_adam = split(grads, paths)
        # Both rules count the same updates: `updates` of either is that of the state.
        momenta, new = buffers.update(of_muon, state, **extra)
        directions, adam_state = adam.update(of_adam, state, **extra)
        fields = {**new._asdict(), **adam_state._asdict()}
        row_nu = () if state.row_nu is None else (state.row_nu,)
        leaves = jax.tree.map(orthogonalize, momenta, split(axes, paths)[0], *row_nu)
        # Tuples at the leaves become one tree per entry, in the structure of the momenta.
        orthogonalized, *new_row_nu = unzip(1 + len(row_nu), leaves, momenta)
        fields["row_nu"] = new_row_nu[0] if new_row_nu else None
        return join(orthogonalized, directions), MuonState(**fields)

    return optax.GradientTransformationExtraArgs(init, update)


@OPTIMIZERS.register("muon")
def build(parts: Parts) -> Links:
    """Return Muon's links of the chain."""
    optimizer, model, settings = parts.optimizer, parts.model, parts.optimizer.muon

    def takes(shape: tuple[int, ...], axes: Axes) -> bool:
        # A wider model of muP must use Muon for the same parameters as the model of base width.
        return muon_takes(mup.base_shape(model, shape, axes), axes)

    # Muon's factor differs from Adam's: the size of an orthogonal step depends on the matrix.
    def of_mup(shape: tuple[int, ...], axes: Axes) -> float:
        return (mup.muon_factor if takes(shape, axes) else mup.lr_factor)(model, axes)

    def group(shape: tuple[int, ...], axes: Axes) -> float:
        if takes(shape, axes) or settings.adam_lr is None:
            return 1.0
        return settings.adam_lr / optimizer.lr

    direction = scale_by_muon(
        scale_by_adam(optimizer.betas, parts.eps, parts.storage),
        axes=parts.axes,
        momentum=settings.momentum,
        ns_steps=settings.ns_steps,
        storage=parts.storage,
        takes=takes,
        variant=Variant(
            settings.nesterov,
            settings.beta2 if settings.variant == "normuon" else None,
            rms_scale if settings.scale == "rms" else spectral_scale,
        ),
    )
    return [direction, *parts.scaling(of_mup, group), parts.decay(group)]


def muon_takes(shape: tuple[float, ...], axes: Axes) -> bool:
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

    # The Frobenius norm bounds the largest singular value, so that all begin in [0, 1]: the
    # iteration would diverge for much larger ones.
    norm = jnp.sqrt(jnp.sum(g * g, axis=(-2, -1), keepdims=True))
    return jax.lax.fori_loop(0, steps, iterate, g / (norm + _NORM_EPS))


def _normalize_rows(
    o: Float[Array, "l m n"], v: Float[Array, "l m"], beta2: float
) -> tuple[Float[Array, "l m n"], Float[Array, "l m"]]:
    """Return NorMuon's step of norm √min(m, n) for orthogonalized momenta, and the new v."""
    m, n = o.shape[-2:]
    v = beta2 * v + (1 - beta2) * jnp.mean(o * o, axis=-1)
    # The row of an expert or head without gradient has v = 0, and stays 0.
    o = o / (jnp.sqrt(v) + _ROW_EPS)[..., None]
    norm = jnp.sqrt(jnp.sum(o * o, axis=(-2, -1), keepdims=True))
    return o * (math.sqrt(min(m, n)) / (norm + _NORM_EPS)), v
