"""Matrices: the declaration that every parameter shares, linear maps and the token embedding."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxforge.config.model import EXPERTS, LAYERS
from jaxforge.parallel import collectives
from jaxforge.parallel.sharding import Axes, constrain

Initializer = Callable[[Array, tuple[int, ...], jnp.dtype], Array]
"""(key, shape, dtype) -> values."""


class Untrained(nnx.Variable):
    """A float array that no gradient moves: `state.train_state.TrainState.model_state`."""


class Declare(NamedTuple):
    """Declares parameters: shape, dtype, initial values and logical axes, each said once.

    Attributes:
        rngs: source of the initial values.
        dtype: dtype that parameters are stored in.
        layers: how many layers share a declaration; they are stacked along a leading axis.
    """

    rngs: nnx.Rngs
    dtype: jnp.dtype
    layers: int | None = None

    def __call__(self, shape: tuple[int, ...], axes: Axes, init: Initializer) -> nnx.Param:
        """A parameter.

        Args:
            shape: shape in one layer.
            axes: logical axis of each dimension (`parallel.sharding.RULES`).
            init: initial values.
        """
        shape, axes = self._stacked(shape, axes)
        return nnx.Param(init(self.rngs.params(), shape, self.dtype), axes=axes)

    def untrained(self, shape: tuple[int, ...], axes: Axes, init: Initializer) -> Untrained:
        """What the model keeps besides its parameters, float32; arguments as of those."""
        shape, axes = self._stacked(shape, axes)
        return Untrained(init(self.rngs.params(), shape, jnp.float32), axes=axes)

    def _stacked(self, shape: tuple[int, ...], axes: Axes) -> tuple[tuple[int, ...], Axes]:
        if self.layers is None:
            return shape, axes
        return (self.layers, *shape), (LAYERS, *axes)


def is_matrix(axes: Axes) -> bool:
    """Whether a parameter is more than a vector in each layer and expert."""
    return len([axis for axis in axes if axis not in (LAYERS, EXPERTS)]) > 1


def normal(std: float) -> Initializer:
    """N(0, std²), not truncated."""
    return jax.nn.initializers.normal(std)


class Linear(nnx.Module):
    """y = x Wᵀ + b. `weight` is [out, in] as in torch, so that conversions need no transpose.

    Args:
        out: (size, logical axis) of the output dimension.
        inp: (size, logical axis) of the input dimension.
        std: standard deviation of the initial weights.
        declare: makes the parameters.
        bias: whether there is b, which begins at zero.
    """

    def __init__(
        self,
        out: tuple[int, str],
        inp: tuple[int, str],
        *,
        std: float,
        declare: Declare,
        bias: bool = False,
    ) -> None:
        self.axes = (out[1], inp[1])
        self.weight = declare((out[0], inp[0]), self.axes, normal(std))
        self.has_bias = bias
        if bias:
            self.bias = declare((out[0],), (out[1],), jax.nn.initializers.zeros)

    def __call__(self, x: Float[Array, "... i"]) -> Float[Array, "... o"]:
        """Multiplies and adds in the dtype of `x`."""
        weight = collectives.all_gather_weight(self.weight[...].astype(x.dtype), self.axes)
        # One row a token: of a product of matrices no compiler copies a transpose.
        y = jnp.einsum("ti,oi->to", x.reshape(-1, x.shape[-1]), weight)
        if self.has_bias:
            y = y + self.bias[...].astype(x.dtype)
        return y.reshape(*x.shape[:-1], -1)


class Embedding(nnx.Module):
    """Rows of a [vocab, dim] table. The result has the dtype asked for; nothing is scaled."""

    def __init__(self, vocab: int, dim: int, *, std: float, declare: Declare) -> None:
        self.weight = declare((vocab, dim), ("vocab", "embed"), normal(std))

    def __call__(self, tokens: Int[Array, "b s"], dtype: jnp.dtype) -> Float[Array, "b s d"]:
        """Looks up `tokens`; ids outside the table are clamped (data is checked beforehand)."""
        table = self.weight[...].astype(dtype)
        if not collectives.manual_axes("vocab"):
            return table[tokens]
        # Whole over all axes but the one taken over: XLA's partitioner fails on such a gather.
        return _look_up(
            constrain(collectives.all_gather_weight(table, ("vocab", "embed")), None, None), tokens
        )


@jax.custom_vjp
def _look_up(share: Float[Array, "v d"], tokens: Int[Array, "b s"]) -> Float[Array, "b s d"]:
    """Rows of a table of which each device has a share. The gradient is that of its share."""
    rows, is_here = _own_rows(share, tokens)
    found = jnp.where(is_here[..., None], share[rows], 0)
    return collectives.psum(found, "vocab")


def _own_rows(share: Array, tokens: Array) -> tuple[Array, Array]:
    rows = tokens - collectives.first_index("vocab", share.shape[0])
    is_here = (rows >= 0) & (rows < share.shape[0])
    return jnp.where(is_here, rows, 0), is_here


def _looked_up(share: Array, tokens: Array) -> tuple[Array, tuple[Array, Array]]:
    return _look_up(share, tokens), (share, tokens)


def _spread(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, None]:
    share, tokens = saved
    rows, is_here = _own_rows(share, tokens)
    return jnp.zeros_like(share).at[rows].add(jnp.where(is_here[..., None], gradient, 0)), None


_look_up.defvjp(_looked_up, _spread)
