"""SOAP (Vyas et al., 2024, arXiv:2409.11321): AdamW in the eigenbases of Shampoo's matrices.

Shampoo averages G Gᵀ and Gᵀ G of the gradients G of a matrix. In the bases of their eigenvectors,
the elements of a gradient are nearly independent, so that a step by Adam's rule suits them better.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float, Int, PyTree

from jaxforge.config.optimizer import OPTIMIZERS
from jaxforge.model.linear import is_matrix
from jaxforge.optim.adamw import bias_correction
from jaxforge.optim.chain import Links
from jaxforge.optim.matrices import matrix_shape, rows_shape
from jaxforge.optim.moments import init_moments
from jaxforge.optim.parts import Parts
from jaxforge.optim.trees import Path
from jaxforge.parallel.sharding import Axes

RowsAndColumns = tuple[dict[Path, Array], dict[Path, Array]]
"""Square matrices [..., m, m] for rows and [..., n, n] for columns, by path of the parameter."""

_ROWS, _COLUMNS = -2, -1
_EXACT = jax.lax.Precision.HIGHEST
"""Precision of products that determine eigenvectors."""


class SoapState(NamedTuple):
    """State of SOAP. Vectors are in `mu` and `nu` only, as is a side that is too long.

    Attributes:
        updates: number of updates made, including the first one, which changes no parameter.
        mu: running mean of the gradient, per parameter.
        nu: running mean of the squared gradient in the eigenbases, per parameter.
        row_gram: running mean of G Gᵀ, per matrix.
        row_basis: approximate eigenvectors of `row_gram`, in columns.
        column_gram: running mean of Gᵀ G, per matrix.
        column_basis: approximate eigenvectors of `column_gram`, in columns.
    """

    updates: Int[Array, ""]
    mu: PyTree
    nu: PyTree
    row_gram: PyTree
    row_basis: PyTree
    column_gram: PyTree
    column_basis: PyTree


class Preconditioning(NamedTuple):
    """Settings of the eigenbases.

    Attributes:
        beta: decay rate of the running means of G Gᵀ and Gᵀ G.
        interval: updates from one change of the bases to the next.
        largest: rows or columns beyond which a side keeps its own basis.
    """

    beta: float
    interval: int
    largest: int


def scale_by_soap(
    axes: PyTree,
    betas: tuple[float, float],
    eps: float,
    dtype: jnp.dtype,
    preconditioning: Preconditioning,
) -> optax.GradientTransformationExtraArgs:
    """Return SOAP's direction D as an optax transform.

    With t = updates, per matrix [m, n] (one layer's) with gradient G, and the bases R [m, m] and
    C [n, n] of the updates before:

        M ← b1 M + (1 - b1) G,   V ← b2 V + (1 - b2) (Rᵀ G C)²
        D = R [(Rᵀ M C) / (√V / √(1 - b2^t) + eps)] Cᵀ / (1 - b1^t)
        A ← beta A + (1 - beta) G Gᵀ,   B ← beta B + (1 - beta) Gᵀ G

    Every `interval` updates, one power iteration changes the bases: columns of R are sorted by
    diag(Rᵀ A R), rows of V alike, and R ← QR(A R); C and B in the same way. The first update
    (t = 0) only sets A, B and their eigenvectors, as in the authors' code: no step depends on its
    own gradient through a basis. A side with more than `largest` elements keeps R or C = 1. Vectors
    have no bases, which is Adam.

    Args:
        axes: logical axes of every parameter.
        betas: b1, b2.
        eps: constant added to the denominator.
        dtype: dtype of M and V. Arithmetic, A, B, R and C are float32.
        preconditioning: settings of the bases.
    """
    names, (beta, interval, largest) = flatten_dict(axes), preconditioning

    def init(params: PyTree) -> SoapState:
        mu, nu = (init_moments(params, dtype)[0] for _ in range(2))
        zeros: RowsAndColumns = {}, {}
        for path, p in flatten_dict(params).items():
            if is_matrix(names[path]):
                *stacked, _ = rows_shape(p.shape, names[path])
                for square, size in zip(zeros, matrix_shape(p.shape, names[path]), strict=True):
                    if size <= largest:
                        # Zeros until the first update sets eigenvectors; its direction is dropped.
                        square[path] = jnp.zeros((*stacked, size, size))
        rows, columns = map(unflatten_dict, zeros)
        return SoapState(jnp.zeros((), jnp.int32), mu, nu, rows, rows, columns, columns)

    def update(
        grads: PyTree, state: SoapState, params: PyTree | None = None, **_: object
    ) -> tuple[PyTree, SoapState]:
        rates = _Rates.of_update(state.updates, betas, eps)
        bases: RowsAndColumns = flatten_dict(state.row_basis), flatten_dict(state.column_basis)
        grams: RowsAndColumns = flatten_dict(state.row_gram), flatten_dict(state.column_gram)

        def advance(path: Path, g: Array, m: Array, v: Array) -> tuple[Array, ...]:
            # None on a side without a basis, where the basis is 1.
            basis = [by_path.get(path) for by_path in bases]
            matrices = (_as_matrices(x, names[path]) for x in (g, m, v))
            # Of vectors both sides are None, and the rule is Adam's.
            direction, *moments = _adam_in_bases(rates, basis, *matrices)
            reshaped = (x.reshape(g.shape).astype(m.dtype) for x in moments)
            return direction.reshape(g.shape), *reshaped

        # 1. Adam's direction in the bases of the updates before.
        flat = [flatten_dict(tree) for tree in (grads, state.mu, state.nu)]
        results = {path: advance(path, *(tree[path] for tree in flat)) for path in flat[0]}
        directions, mu, nu = ({path: r[i] for path, r in results.items()} for i in range(3))
        # 2. The averages of G Gᵀ and Gᵀ G.
        gradients = {path: _as_matrices(g, names[path]) for path, g in flat[0].items()}
        grams = _averaged(grams, gradients, beta)
        # 3. The bases of the next updates.
        change_bases = jnp.where(
            state.updates == 0, 0, jnp.where(state.updates % interval == 0, 1, 2)
        )
        # V belongs to the rows and columns of the bases: a change of their order must move it, too.
        variances = {path: _as_matrices(v, names[path]) for path, v in nu.items()}
        # A switch and not a select: eigenvectors are computed in one update of `interval` only.
        bases, variances = jax.lax.switch(
            change_bases, (_first_bases, _next_bases, _same_bases), grams, bases, variances
        )
        nu = {path: variances[path].reshape(v.shape).astype(v.dtype) for path, v in nu.items()}
        fields = mu, nu, grams[0], bases[0], grams[1], bases[1]
        updates = optax.safe_increment(state.updates)
        return unflatten_dict(directions), SoapState(updates, *map(unflatten_dict, fields))

    return optax.GradientTransformationExtraArgs(init, update)


def without_first_update() -> optax.GradientTransformationExtraArgs:
    """Return a transform that changes no parameter in the first update, not even by its decay."""

    def update(
        updates: PyTree,
        state: optax.EmptyState,
        params: PyTree | None = None,
        *,
        updates_made: Int[Array, ""],
        **_: object,
    ) -> tuple[PyTree, optax.EmptyState]:
        is_first = updates_made == 0
        return jax.tree.map(lambda u: jnp.where(is_first, 0.0, u), updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


@OPTIMIZERS.register("soap")
def build(parts: Parts) -> Links:
    """Return SOAP's links of the chain."""
    settings, betas = parts.optimizer.soap, parts.optimizer.betas
    beta = betas[1] if settings.shampoo_beta is None else settings.shampoo_beta
    preconditioning = Preconditioning(
        beta, settings.precondition_frequency, settings.max_precond_dim
    )
    assert isinstance(parts.storage, jnp.dtype)  # `rules` refuses other formats
    direction = scale_by_soap(parts.axes, betas, parts.eps, parts.storage, preconditioning)
    return [direction, *parts.scaling(), parts.decay(), without_first_update()]


class _Rates(NamedTuple):
    """Rates of one update, which are those of `scale_by_soap` except in the first one.

    Attributes:
        b1: decay rate of M.
        b2: decay rate of V.
        correction: 1 - b1^t.
        root_correction2: √(1 - b2^t).
        eps: constant added to the denominator.
    """

    b1: Array
    b2: Array
    correction: Array
    root_correction2: Array
    eps: float

    @classmethod
    def of_update(cls, updates: Int[Array, ""], betas: tuple[float, float], eps: float) -> "_Rates":
        """Return the rates after a number of updates: the first one changes no moment."""
        # A rate of 1 keeps M and V at zero in the first update. t of at least 1 avoids 0 / 0.
        is_first, t = updates == 0, jnp.maximum(updates, 1)
        b1, b2 = (jnp.where(is_first, 1.0, beta) for beta in betas)
        correction, correction2 = (bias_correction(beta, t) for beta in betas)
        return cls(b1, b2, correction, jnp.sqrt(correction2), eps)


def _adam_in_bases(
    rates: _Rates, basis: list[Array | None], g: Array, m: Array, v: Array
) -> tuple[Array, Array, Array]:
    """Return Adam's direction for a parameter, out of the bases, and the new M and V."""
    m = rates.b1 * m + (1 - rates.b1) * g
    v = rates.b2 * v + (1 - rates.b2) * jnp.square(_into(basis, g))
    direction = _into(basis, m) / (jnp.sqrt(v) / rates.root_correction2 + rates.eps)
    # M is kept out of the bases, so that a change of bases does not touch it.
    return _out_of(basis, direction) * (1 / rates.correction), m, v


def _as_matrices(x: Array, axes: Axes) -> Float[Array, "..."]:
    """Return a parameter's array in float32, with its matrices in the last two dimensions."""
    x = x.astype(jnp.float32)
    if not is_matrix(axes):
        return x
    *stacked, _ = rows_shape(x.shape, axes)
    return x.reshape(*stacked, *matrix_shape(x.shape, axes))


def _into(basis: list[Array | None], x: Array) -> Array:
    """Return Rᵀ x C."""
    rows, columns = basis
    x = x if rows is None else rows.mT @ x
    return x if columns is None else x @ columns


def _out_of(basis: list[Array | None], x: Array) -> Array:
    """Return R x Cᵀ."""
    rows, columns = basis
    x = x if rows is None else rows @ x
    return x if columns is None else x @ columns.mT


def _averaged(grams: RowsAndColumns, gradients: dict[Path, Array], beta: float) -> RowsAndColumns:
    """Return the running means of G Gᵀ and Gᵀ G."""

    def averaged(path: Path, gram: Array, product: str) -> Array:
        g = gradients[path]
        return beta * gram + (1 - beta) * jnp.einsum(product, g, g, precision=_EXACT)

    rows, columns = grams
    return (
        {path: averaged(path, a, "...mn,...kn->...mk") for path, a in rows.items()},
        {path: averaged(path, b, "...mn,...mk->...nk") for path, b in columns.items()},
    )


def _first_bases(grams: RowsAndColumns, bases: RowsAndColumns, nu: dict[Path, Array]) -> tuple:
    """Return eigenvectors."""
    result: RowsAndColumns = {}, {}
    last = jnp.zeros(())
    for matrices, new in zip(grams, result, strict=True):
        # A fixed order, in which `_after` chains the decompositions.
        for path in sorted(matrices):
            last = new[path] = jnp.linalg.eigh(_after(last, matrices[path]))[1]
    return result, nu


def _next_bases(grams: RowsAndColumns, bases: RowsAndColumns, nu: dict[Path, Array]) -> tuple:
    """Return bases after a power iteration, and variances with their rows and columns sorted."""
    nu = dict(nu)
    result: RowsAndColumns = {}, {}
    last = jnp.zeros(())
    for axis, old, matrices, new in zip((_ROWS, _COLUMNS), bases, grams, result, strict=True):
        for path in sorted(old):
            basis = _after(last, old[path])
            product = jnp.matmul(matrices[path], basis, precision=_EXACT)
            # Estimates of eigenvalues: the diagonal of Rᵀ A R. QR keeps the order of its columns.
            order = jnp.argsort(-jnp.sum(basis * product, axis=_ROWS), axis=-1)
            last = new[path] = jnp.linalg.qr(_sorted(product, order, _COLUMNS))[0]
            nu[path] = _sorted(nu[path], order, axis)
    return result, nu


def _after(last: Array, x: Array) -> Array:
    """Return x, available only after `last` has been computed.

    XLA's CPU runtime would decompose independent batches of matrices at once. Each waits for
    threads of one pool, and with few threads all of them wait forever.
    """
    return x + 0.0 * last.ravel()[0]


def _same_bases(grams: RowsAndColumns, bases: RowsAndColumns, nu: dict[Path, Array]) -> tuple:
    """Return the bases unchanged."""
    del grams
    return bases, nu


def _sorted(x: Float[Array, "... m n"], order: Int[Array, "... k"], axis: int) -> Array:
    """Return matrices with their rows or columns in the given order."""
    return jnp.take_along_axis(
        x, jnp.expand_dims(order, _COLUMNS if axis == _ROWS else _ROWS), axis=axis
    )
