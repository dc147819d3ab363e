"""Matrices: the declaration that every parameter shares, linear maps and the token embedding."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxforge.config.model import AMAX_HISTORIES, EXPERTS, LAYERS
from jaxforge.errors import UserError
from jaxforge.kernels import fp8
from jaxforge.parallel import collectives
from jaxforge.parallel.sharding import (
    Axes,
    automatic_size,
    constrain,
    parts_of_sequences,
    whole_sequences,
)

Initializer = Callable[[Array, tuple[int, ...], jnp.dtype], Array]
"""(key, shape, dtype) -> values."""


FLOAT32 = jnp.dtype(jnp.float32)


class Untrained(nnx.Variable):
    """A float array that no gradient moves: `state.train_state.TrainState.model_state`."""


class Backward(NamedTuple):
    """Backward pass of a product with a matrix that is split over devices.

    Attributes:
        dtype: in which devices add up their gradients of it.
        regathers: gathers the matrix again, instead of keeping whole what the forward pass has
            gathered: for blocks that are not computed again. Activations of feed-forwards are
            computed again for the same blocks.
    """

    dtype: jnp.dtype = FLOAT32
    regathers: bool = True


class Declare(NamedTuple):
    """Declares parameters: shape, dtype, initial values and logical axes, each said once.

    Attributes:
        rngs: source of the initial values.
        dtype: dtype that parameters are stored in.
        layers: how many layers share a declaration; they are stacked along a leading axis.
        backward: through a matrix.
        init_factor: on the initial values of a parameter, by its logical axes (`model.mup`).
        splits_sequences: as of `Runtime`.
    """

    rngs: nnx.Rngs
    dtype: jnp.dtype
    layers: int | None = None
    backward: Backward = Backward()
    init_factor: Callable[[Axes], float] = lambda axes: 1.0
    splits_sequences: bool = False

    def __call__(self, shape: tuple[int, ...], axes: Axes, init: Initializer) -> nnx.Param:
        """A parameter.

        Args:
            shape: shape in one layer.
            axes: logical axis of each dimension (`parallel.sharding.RULES`).
            init: initial values.
        """
        shape, axes = self._stacked(shape, axes)
        values, factor = init(self.rngs.params(), shape, self.dtype), self.init_factor(axes)
        return nnx.Param(values if factor == 1.0 else values * factor, axes=axes)

    def untrained(self, shape: tuple[int, ...], axes: Axes, init: Initializer) -> Untrained:
        """Declare non-trainable float32 state; arguments as for parameters."""
        shape, axes = self._stacked(shape, axes)
        return Untrained(init(self.rngs.params(), shape, jnp.float32), axes=axes)

    def _stacked(self, shape: tuple[int, ...], axes: Axes) -> tuple[tuple[int, ...], Axes]:
        if self.layers is None:
            return shape, axes
        return (self.layers, *shape), (LAYERS, *axes)


def is_matrix(axes: Axes) -> bool:
    """Return whether a parameter has a matrix in each layer and expert."""
    return len([axis for axis in axes if axis not in (LAYERS, EXPERTS)]) > 1


def normal(std: float) -> Initializer:
    """N(0, std²), not truncated."""
    return jax.nn.initializers.normal(std)


def times(x: Float[Array, "..."], factor: float) -> Float[Array, "..."]:
    """A multiple, in the dtype of x; x itself where the factor is 1."""
    return x if factor == 1.0 else x * jnp.asarray(factor, x.dtype)


class Linear(nnx.Module):
    """y = x Wᵀ + b. `weight` is [out, in] as in torch, so that conversions need no transpose.

    Args:
        out: (size, logical axis) of the output dimension.
        inp: (size, logical axis) of the input dimension.
        std: standard deviation of the initial weights.
        declare: makes the parameters.
        bias: whether there is b, which begins at zero.

    Attributes:
        fp8: how it multiplies in layers whose products are in 8 bits; None: as in others.
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
        self.axes, self.backward = (out[1], inp[1]), declare.backward
        self.splits_sequences = declare.splits_sequences
        self.fp8: fp8.Fp8 | None = None
        self.weight = declare((out[0], inp[0]), self.axes, normal(std))
        self.has_bias = bias
        if bias:
            self.bias = declare((out[0],), (out[1],), jax.nn.initializers.zeros)

    def __call__(
        self, x: Float[Array, "b s i"], precision: fp8.LayerPrecision | None = None
    ) -> Float[Array, "b s o"]:
        """Multiply and add in the dtype of `x`.

        Args:
            x: activations.
            precision: precision of the block; None where the model has no layers in 8 bits.

        Raises:
            UserError: the layer multiplies in 8 bits, and a block of one's own gave no precision.
        """
        bias = self.bias[...] if self.has_bias else None
        x_PSI = parts_of_sequences(x)
        rows = x_PSI if self.splits_sequences else x_PSI.reshape(-1, x.shape[-1])
        if self.fp8 is None or (precision is not None and precision.in_8_bits is False):
            product = product_for(self.backward, x.dtype)
            y = product(self.axes, x.dtype, self.backward, rows, self.weight[...], bias)
        elif precision is None:
            raise UserError(
                f"linear layer {self.fp8.name} multiplies in 8 bits and was called without a "
                "precision. Pass it that of the block (docs/library.md), or name it in "
                "train.fp8_exclude"
            )
        else:
            y = fp8.product(self.fp8, rows, self.weight[...], bias, self._amaxes(), precision)
        return whole_sequences(y.reshape(*x_PSI.shape[:-1], -1), len(x))

    def _amaxes(self) -> fp8.Amaxes | None:
        """The largest of the last updates, where scales go by those."""
        if not hasattr(self, "input_amax_history"):
            return None
        return fp8.Amaxes(*(jnp.max(getattr(self, name)[...]) for name in AMAX_HISTORIES))


def product_for(backward: Backward, dtype: jnp.dtype) -> Callable[..., Array]:
    """Return the product of a linear layer whose activations have a dtype.

    Called with the logical axes of the weight, the dtype of the result, `backward`, x (a row for
    each token), and weight [out, in] and bias as they are stored.
    """
    return (
        _product_reduced_apart
        if collectives.reduces_in_other_dtype(backward.dtype, dtype)
        else _product
    )


def _product(
    axes: Axes, dtype: jnp.dtype, backward: Backward, x: Array, weight: Array, bias: Array | None
) -> Array:
    weight_OI = collectives.all_gather_weight(weight.astype(x.dtype), axes)
    y = jnp.einsum("...i,oi->...o", x, weight_OI, preferred_element_type=dtype)
    return y if bias is None else y + bias.astype(dtype)


_product_reduced_apart = jax.custom_vjp(_product, nondiff_argnums=(0, 1, 2))
"""`_product` on devices that split the batch, and add up gradients in another dtype.

Gradients of weight and bias are made in the dtype in which they are to be added up: XLA's
partitioner adds up the products of split rows in the dtype of the products, before any cast. The
saved weight is the device's own part, or the whole one that was gathered.
"""


def _reduced_apart_forward(
    axes: Axes, dtype: jnp.dtype, backward: Backward, x: Array, weight: Array, bias: Array | None
) -> tuple[Array, tuple]:
    # Policies of rematerialization see this product, and no weight that is one.
    weight_OI = collectives.all_gather_weight(weight.astype(x.dtype), axes)
    saved, like = weight if backward.regathers else weight_OI, jnp.zeros((), weight.dtype)
    y = jnp.einsum("...i,oi->...o", x, weight_OI, preferred_element_type=dtype)
    return y if bias is None else y + bias.astype(dtype), (x, saved, like, bias)


def _reduced_apart_backward(
    axes: Axes, dtype: jnp.dtype, backward: Backward, saved: tuple, d_y: Array
) -> tuple[Array, Array, Array | None]:
    x, weight_OI, like, bias = saved
    if backward.regathers:
        weight_OI = collectives.all_gather_weight(weight_OI.astype(x.dtype), axes)
    d_x = jnp.einsum("...o,oi->...i", d_y, weight_OI).astype(x.dtype)
    sums = jnp.promote_types(backward.dtype, d_y.dtype)
    d_weight = jnp.einsum("...o,...i->oi", d_y, x, preferred_element_type=sums)
    d_weight = constrain(d_weight, *axes).astype(like.dtype)
    if bias is None:
        return d_x, d_weight, None
    tokens = tuple(range(d_y.ndim - 1))
    return d_x, d_weight, jnp.sum(d_y, tokens, sums).astype(bias.dtype)


_product_reduced_apart.defvjp(_reduced_apart_forward, _reduced_apart_backward)


class Embedding(nnx.Module):
    """Rows of a [vocab, dim] table. The result has the dtype asked for; nothing is scaled."""

    def __init__(self, vocab: int, dim: int, *, std: float, declare: Declare) -> None:
        self.reduce_dtype = declare.backward.dtype
        self.weight = declare((vocab, dim), _TABLE, normal(std))

    def __call__(self, tokens: Int[Array, "b s"], dtype: jnp.dtype) -> Float[Array, "b s d"]:
        """Looks up `tokens`; ids outside the table are clamped (data is checked beforehand)."""
        find = _rows_of_share if collectives.split_over("vocab") else _rows
        return look_up(find, self.weight[...], tokens, _TABLE, dtype, self.reduce_dtype)


_TABLE = ("vocab", "embed")

Find = Callable[[Array, Array], Array]
"""(table as it is stored, but in the dtype of the result, tokens) -> their rows."""


def look_up(
    find: Find,
    weight: Float[Array, "v d"],
    tokens: Int[Array, "b s"],
    axes: Axes,
    dtype: jnp.dtype,
    reduce_dtype: jnp.dtype,
) -> Float[Array, "b s d"]:
    """Rows of a table in `dtype`, by a function that finds them.

    Args:
        find: the function, differentiable in the table.
        weight: the table as it is stored.
        tokens: the rows' numbers.
        axes: logical axes of the table.
        dtype: of the result.
        reduce_dtype: of the gradient of the table, as devices add it up.
    """
    if collectives.reduces_in_other_dtype(reduce_dtype, dtype):
        return _look_up_reduced_apart(find, axes, dtype, reduce_dtype, weight, tokens)
    return find(weight.astype(dtype), tokens)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _look_up_reduced_apart(
    find: Find,
    axes: Axes,
    dtype: jnp.dtype,
    reduce_dtype: jnp.dtype,
    weight: Array,
    tokens: Array,
) -> Array:
    """`look_up`, whose gradient of the table is made, and so added up, in `reduce_dtype`."""
    return find(weight.astype(dtype), tokens)


def _look_up_back(
    find: Find, axes: Axes, dtype: jnp.dtype, reduce_dtype: jnp.dtype, saved: tuple, d_y: Array
) -> tuple[Array, None]:
    weight, tokens = saved
    _, back = jax.vjp(lambda table: find(table, tokens), weight.astype(reduce_dtype))
    (gradient,) = back(d_y.astype(reduce_dtype))
    return constrain(gradient, *axes).astype(weight.dtype), None


_look_up_reduced_apart.defvjp(
    lambda find, axes, dtype, reduce_dtype, *saved: (find(saved[0].astype(dtype), saved[1]), saved),
    _look_up_back,
)


def _rows(table: Float[Array, "v d"], tokens: Int[Array, "b s"]) -> Float[Array, "b s d"]:
    rows = table[tokens]
    if automatic_size("context") == 1:
        return rows
    # What splits the width is to split rows and tokens: one after the other, as XLA's partitioner
    # would make all of it whole in between.
    return constrain(constrain(rows, "batch", None, "context"), "batch", "context", None)


def _rows_of_share(table: Float[Array, "v d"], tokens: Int[Array, "b s"]) -> Float[Array, "b s d"]:
    # Whole over all axes but the one taken over: XLA's partitioner fails on such a gather.
    return _look_up(constrain(collectives.all_gather_weight(table, _TABLE), None, None), tokens)


@jax.custom_vjp
def _look_up(share: Float[Array, "v d"], tokens: Int[Array, "b s"]) -> Float[Array, "b s d"]:
    """Return rows of a table split over devices; the gradient is that of the local share."""
    rows, is_here = _own_rows(share, tokens)
    values = jnp.where(is_here[..., None], share[rows], 0)
    return collectives.psum(values, "vocab")


def _own_rows(share: Array, tokens: Array) -> tuple[Array, Array]:
    rows = tokens - collectives.first_index("vocab", share.shape[0])
    is_here = (rows >= 0) & (rows < share.shape[0])
    return jnp.where(is_here, rows, 0), is_here


def _spread(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, None]:
    share, tokens = saved
    rows, is_here = _own_rows(share, tokens)
    return jnp.zeros_like(share).at[rows].add(jnp.where(is_here[..., None], gradient, 0)), None


_look_up.defvjp(lambda *saved: (_look_up(*saved), saved), _spread)
