"""Inverses of unit lower triangular matrices, for the gated delta rule by chunks."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

SMALLEST = 16
"""Smallest size of a matrix, and size of the diagonal blocks that `_invert_block` inverts."""

_EXACT = jax.lax.Precision.HIGHEST


@jax.custom_vjp
def invert_unit_lower(strict: Float[Array, "*b c c"]) -> Float[Array, "*b c c"]:
    """Return (I + A)⁻¹ of strictly lower triangular matrices A.

    The inverse is built from blocks of twice the size in each step, which is as stable as forward
    substitution. (The shorter product (I - A)(I + A²)(I + A⁴)… has terms that grow like binomial
    coefficients if keys repeat.) Products are exact, because later products depend on them.

        ⎡ P 0 ⎤⁻¹   ⎡ P⁻¹          0   ⎤
        ⎣ L Q ⎦   = ⎣ -Q⁻¹ L P⁻¹   Q⁻¹ ⎦

    Args:
        strict: the matrices A; c is a power of two of at least 16.
    """
    return _invert(strict)


def _invert(strict: Array) -> Array:
    # XLA:TPU has a kernel for small triangular systems. It compiles exact products of small
    # matrices slowly, and pads them to tiles of 8 x 128 elements.
    return jax.lax.platform_dependent(strict, tpu=invert_by_rows, default=_invert_by_blocks)


def invert_by_rows(strict: Float[Array, "*b c c"]) -> Float[Array, "*b c c"]:
    """Return (I + A)⁻¹ by forward substitution."""
    identity = jnp.broadcast_to(jnp.eye(strict.shape[-1], dtype=strict.dtype), strict.shape)
    return jax.lax.linalg.triangular_solve(
        strict, identity, left_side=True, lower=True, unit_diagonal=True
    )


def _invert_by_blocks(strict: Array) -> Array:
    size = strict.shape[-1]
    if size <= SMALLEST:
        return _invert_block(strict)
    half = size // 2
    corners = jnp.stack([strict[..., :half, :half], strict[..., half:, half:]])
    upper, lower = _invert_by_blocks(corners)
    below = -_product(lower, _product(strict[..., half:, :half], upper))
    return jnp.concatenate(
        [
            jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1),
            jnp.concatenate([below, lower], axis=-1),
        ],
        axis=-2,
    )


def _invert_block(strict: Array) -> Array:
    """Invert small blocks: the same recursion by masks, without arrays of a few elements."""
    size = strict.shape[-1]
    i = np.arange(size)
    row, column = i[:, None], i
    inverse = jnp.eye(size, dtype=strict.dtype) - strict * (row // 2 == column // 2)
    block = 2
    while block < size:
        is_pair = row // (2 * block) == column // (2 * block)
        below = strict * (is_pair & (row // block != column // block))
        inverse = inverse - _product(inverse, _product(below, inverse))
        block *= 2
    return inverse


def _product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=_EXACT)


def _invert_backward(inverse: Array, gradient: Array) -> tuple[Array]:
    """Return -T⁻ᵀ dT T⁻ᵀ for the inverse T; callers mask elements that are not variables."""
    transposed = inverse.swapaxes(-1, -2)
    return (-_product(transposed, _product(gradient, transposed)),)


invert_unit_lower.defvjp(lambda strict: (_invert(strict),) * 2, _invert_backward)
