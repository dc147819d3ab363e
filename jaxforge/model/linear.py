"""Matrices: the declaration that every parameter shares, linear maps and the token embedding."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxforge.parallel.sharding import Axes

Initializer = Callable[[Array, tuple[int, ...], jnp.dtype], Array]
"""(key, shape, dtype) -> values."""


def declare(
    shape: tuple[int, ...],
    axes: Axes,
    init: Initializer,
    *,
    layers: int | None = None,
    dtype: jnp.dtype,
    rngs: nnx.Rngs,
) -> nnx.Param:
    """A parameter: shape, dtype, initial values and logical axes, said once.

    Args:
        shape: shape in one layer.
        axes: logical axis of each dimension (`parallel.sharding.RULES`).
        init: initial values.
        layers: how many layers share this declaration; they are stacked along a leading axis.
        dtype: dtype of the stored parameter.
        rngs: source of the initializer's key.
    """
    if layers is not None:
        shape, axes = (layers, *shape), ("layers", *axes)
    return nnx.Param(init(rngs.params(), shape, dtype), axes=axes)


def is_matrix(axes: Axes) -> bool:
    """Whether a parameter is more than a vector in each layer."""
    return len([axis for axis in axes if axis != "layers"]) > 1


def normal(std: float) -> Initializer:
    """N(0, std²), not truncated."""
    return jax.nn.initializers.normal(std)


class Linear(nnx.Module):
    """y = x Wᵀ, no bias. `weight` is [out, in] as in torch, so that conversions need no transpose.

    Args:
        out: (size, logical axis) of the output dimension.
        inp: (size, logical axis) of the input dimension.
        std: standard deviation of the initial weights.
        layers: see `declare`; also `dtype` and `rngs`.
    """

    def __init__(
        self,
        out: tuple[int, str],
        inp: tuple[int, str],
        *,
        std: float,
        layers: int | None = None,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ) -> None:
        shape, axes = (out[0], inp[0]), (out[1], inp[1])
        self.weight = declare(shape, axes, normal(std), layers=layers, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "... i"]) -> Float[Array, "... o"]:
        """Multiplies in the dtype of `x`."""
        return jnp.einsum("...i,oi->...o", x, self.weight[...].astype(x.dtype))


class Embedding(nnx.Module):
    """Rows of a [vocab, dim] table. The result has the dtype asked for; nothing is scaled."""

    def __init__(
        self, vocab: int, dim: int, *, std: float, dtype: jnp.dtype, rngs: nnx.Rngs
    ) -> None:
        self.weight = declare((vocab, dim), ("vocab", "embed"), normal(std), dtype=dtype, rngs=rngs)

    def __call__(self, tokens: Int[Array, "b s"], dtype: jnp.dtype) -> Float[Array, "b s d"]:
        """Looks up `tokens`; ids outside the table are clamped (data is checked before training)."""
        return self.weight[...].astype(dtype)[tokens]
