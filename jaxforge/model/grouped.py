"""Rows times the weights of the group they belong to: the products of a mixture of experts.

    blocks   blocks of rows in plain XLA, anywhere (`grouped_blocks.py`)

`jax.lax.ragged_dot` is none of them: but for TPU it multiplies every row with every group's weights.
"""

import functools

import jax
from jaxtyping import Array, Float, Int

from jaxforge.model import grouped_blocks
from jaxforge.model.grouped_blocks import axes_of, varying


def grouped_matmul(
    x_MI: Float[Array, "m i"],
    w_GOI: Float[Array, "g o i"],
    sizes_G: Int[Array, "g"],
    backend: str,
) -> Float[Array, "m o"]:
    """y[m] = w[g] x[m], for the group g of row m.

    Args:
        x_MI: rows, sorted by group. Those beyond the last group's give zeros, and no gradient.
        w_GOI: a matrix for each group.
        sizes_G: int32, rows of each group; M at most together.
        backend: a key of `GROUPED`.

    Returns:
        In the dtype of `x_MI`, summed in float32.
    """
    arrays = x_MI, w_GOI, sizes_G
    # The gradient of each is then summed over the axes that it did not vary over.
    axes = frozenset().union(*map(axes_of, arrays))
    return _matmul(backend, *(varying(array, axes) for array in arrays))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(backend: str, x_MI: Array, w_GOI: Array, sizes_G: Array) -> Array:
    return GROUPED[backend].matmul(x_MI, w_GOI, sizes_G)


def _forward(backend: str, x_MI: Array, w_GOI: Array, sizes_G: Array) -> tuple[Array, tuple]:
    return _matmul(backend, x_MI, w_GOI, sizes_G), (x_MI, w_GOI, sizes_G)


def _backward(backend: str, saved: tuple, dy_MO: Array) -> tuple[Array, Array, None]:
    x_MI, w_GOI, sizes_G = saved
    kernel = GROUPED[backend]
    dx_MI = kernel.gradient_of_rows(dy_MO, w_GOI, sizes_G)
    dw_GOI = kernel.gradient_of_weights(x_MI, dy_MO, sizes_G)
    return dx_MI, dw_GOI.astype(w_GOI.dtype), None


_matmul.defvjp(_forward, _backward)

GROUPED = {"blocks": grouped_blocks}
