"""Declaration of parameters, linear layers and table lookups such as the token embedding."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType
from jaxtyping import Array, Float, Int, UInt32

from jaxforge.config.model import AMAX_HISTORIES, EXPERTS, LAYERS, ModelConfig
from jaxforge.errors import UserError
from jaxforge.kernels import fp8
from jaxforge.model.dropout import Dropout
from jaxforge.parallel import collectives
from jaxforge.parallel.sharding import (
    Axes,
    automatic_axes,
    automatic_size,
    automatic_spec,
    axes_of_type,
    compute_axes,
    constrain,
    merge_sequences,
    mesh_axes,
    split_sequences,
)

Initializer = Callable[[Array, tuple[int, ...], jnp.dtype], Array]
"""(key, shape, dtype) -> values."""


FLOAT32 = jnp.dtype(jnp.float32)


class Untrained(nnx.Variable):
    """Non-trainable float array, stored in `state.train_state.TrainState.model_state`."""


class Backward(NamedTuple):
    """Backward pass of a product with a matrix that is split over devices.

    Attributes:
        dtype: dtype in which devices sum their gradients of the matrix.
        regathers: whether the backward pass gathers the matrix again instead of keeping the whole
            matrix from the forward pass. Set for blocks that are not rematerialized; their
            feed-forwards also recompute activations.
        rounds: whether devices send their gradients of the matrix in the dtype of the products, and
            sum them in `dtype`.
    """

    dtype: jnp.dtype = FLOAT32
    regathers: bool = True
    rounds: bool = False


class Declare(NamedTuple):
    """Declaration of parameters: shape, dtype, initial values and logical axes.

    Attributes:
        keys: keys of the initial values (`parameter_keys`); None: parameters are shapes only.
        dtype: dtype that parameters are stored in.
        layers: number of layers that share a declaration, stacked along a leading axis.
        backward: backward pass of products with matrices.
        init_factor: logical axes -> factor of the initial values (`model.mup`).
        splits_sequences, heads_in_products, results_by_token: see `Runtime`.
    """

    keys: Iterator[Array] | None
    dtype: jnp.dtype
    layers: int | None = None
    backward: Backward = Backward()
    init_factor: Callable[[Axes], float] = lambda axes: 1.0
    splits_sequences: bool = False
    heads_in_products: bool = False
    results_by_token: bool = False

    def __call__(self, shape: tuple[int, ...], axes: Axes, init: Initializer) -> nnx.Param:
        """Declare a parameter.

        Args:
            shape: shape in one layer.
            axes: logical axis of each dimension (`parallel.sharding.RULES`).
            init: initial values.
        """
        shape, axes = self._stacked(shape, axes)
        values, factor = self._values(init, shape, self.dtype), self.init_factor(axes)
        if factor != 1.0 and not isinstance(values, jax.ShapeDtypeStruct):
            values = values * factor
        return nnx.Param(values, axes=axes)

    def untrained(self, shape: tuple[int, ...], axes: Axes, init: Initializer) -> Untrained:
        """Declare non-trainable float32 state; arguments as for parameters."""
        shape, axes = self._stacked(shape, axes)
        return Untrained(self._values(init, shape, FLOAT32), axes=axes)

    def _values(
        self, init: Initializer, shape: tuple[int, ...], dtype: jnp.dtype
    ) -> Array | jax.ShapeDtypeStruct:
        if self.keys is None:
            return jax.ShapeDtypeStruct(shape, dtype)
        return jnp.asarray(init(next(self.keys), shape, dtype), dtype)

    def _stacked(self, shape: tuple[int, ...], axes: Axes) -> tuple[tuple[int, ...], Axes]:
        if self.layers is None:
            return shape, axes
        return (self.layers, *shape), (LAYERS, *axes)


def parameter_shapes(
    build: Callable[[Declare], nnx.Module],
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters that a module declares for one layer, by name."""
    state = nnx.state(build(Declare(None, FLOAT32)), nnx.Param)
    return {".".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(state)}


def parameter_keys(key: Array) -> Iterator[Array]:
    """Yield `jax.random.fold_in(key, i)` for i = 0, 1, ...

    Keys are computed in blocks, because each call is a loop of its own in the compiled program: a
    third of the time to compile the initial values.
    """
    for start in itertools.count(step=_KEYS):
        numbers = jnp.arange(start, start + _KEYS, dtype=jnp.uint32)
        block = jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)
        for i in range(_KEYS):
            yield block[i]


_KEYS = 64  # of a block; few models declare more parameters


def is_matrix(axes: Axes) -> bool:
    """Return whether a parameter has a matrix in each layer and expert."""
    return len([axis for axis in axes if axis not in (LAYERS, EXPERTS)]) > 1


def normal(std: float) -> Initializer:
    """Return an initializer that draws from N(0, std²), not truncated."""
    return jax.nn.initializers.normal(std)


def fan_in_uniform(key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """Draw weights from U(-1/√n, 1/√n) for a last dimension of size n.

    PyTorch does so for linear layers and for convolutions of single channels.
    """
    limit = shape[-1] ** -0.5
    return jax.random.uniform(key, shape, dtype, -limit, limit)


class Convolution(nnx.Module):
    """Parameters of a causal convolution of single channels.

    Args:
        size: number of channels.
        axis: their logical axis.
        width: tokens in the convolution.
        declare: declares the parameters.
        bias: whether there is a bias, initially zero.
    """

    def __init__(
        self, size: int, axis: str | None, width: int, declare: Declare, *, bias: bool
    ) -> None:
        self.weight = declare((size, width), (axis, None), fan_in_uniform)
        self.has_bias = bias
        if bias:
            self.bias = declare((size,), (axis,), jax.nn.initializers.zeros)


class Float32Linear(nnx.Module):
    """Linear layer with float32 results, from activations in their dtype; never in 8 bits.

    Args:
        out: (size, logical axis) of the output dimension.
        inp: (size, logical axis) of the input dimension.
        std: standard deviation of the initial weights.
        declare: declares the parameters.
        bias: whether there is a bias, initially zero.
    """

    def __init__(
        self,
        out: tuple[int, str | None],
        inp: tuple[int, str],
        std: float,
        declare: Declare,
        *,
        bias: bool = False,
    ) -> None:
        self.axes, self.backward, self.has_bias = (out[1], inp[1]), declare.backward, bias
        self.weight = declare((out[0], inp[0]), self.axes, normal(std))
        if bias:
            self.bias = declare((out[0],), (out[1],), jax.nn.initializers.zeros)

    def __call__(self, x_BSI: Float[Array, "b s i"]) -> Float[Array, "b s o"]:
        """Compute x Wᵀ + b."""
        matrix, bias = Matrix(self.axes), self.bias[...] if self.has_bias else None
        product = select_product(self.backward, x_BSI.dtype, matrix)
        return product(matrix, FLOAT32, self.backward, x_BSI, self.weight[...], bias)


def residual_std(config: ModelConfig) -> float:
    """Return the initial std of matrices that write to the residual stream: init_std / √(2 L)."""
    return config.init_std / (2 * config.n_layers) ** 0.5


def times(x: Float[Array, "..."], factor: float) -> Float[Array, "..."]:
    """Return x times a factor in the dtype of x; x itself if the factor is 1."""
    return x if factor == 1.0 else x * jnp.asarray(factor, x.dtype)


class Matrix(NamedTuple):
    """A stored matrix [out, in], and how a product sees it.

    Attributes:
        axes: logical axes of both dimensions.
        out_head: size of a head, if results are [..., heads, head].
        inp_head: size of a head, if activations are [..., heads, head].
        by_token: whether results without heads are in memory one token after another.
    """

    axes: Axes
    out_head: int | None = None
    inp_head: int | None = None
    by_token: bool = False

    @property
    def letters(self) -> tuple[str, str]:
        """Names of the output and input dimensions in an einsum."""
        return "o" if self.out_head is None else "nh", "i" if self.inp_head is None else "mg"

    def split_heads(self, weight: Float[Array, "o i"]) -> Float[Array, "..."]:
        """Return the matrix with a dimension for each of `letters`."""
        out, inp = (
            (size,) if head is None else (size // head, head)
            for size, head in zip(weight.shape, (self.out_head, self.inp_head), strict=True)
        )
        return weight.reshape(*out, *inp)

    def laid_out(self, result: Float[Array, "..."], letters: str) -> Float[Array, "..."]:
        """Return the result of a product, whose last dimensions have these letters."""
        if not self.by_token or len(letters) > 1:
            return result
        return with_layout_constraint(result, Layout(tuple(range(result.ndim))))


class Linear(nnx.Module):
    """Linear layer y = x Wᵀ + b. `weight` is [out, in] as in torch: conversions do not transpose.

    Args:
        out: (size, logical axis) of the output dimension.
        inp: (size, logical axis) of the input dimension.
        std: standard deviation of the initial weights.
        declare: declares the parameters.
        bias: whether there is a bias, initially zero.
        out_head: size of a head; the output is [b, s, heads, head]. None: it is [b, s, out].
        inp_head: size of a head; the input is [b, s, heads, head]. None: it is [b, s, in].

    Attributes:
        fp8: settings of 8-bit products; None: the layer never multiplies in 8 bits.
        lora_scale: factor of the adapter's output (`model.lora`); None: there is no adapter.
        lora_a, lora_b: matrices of the adapter, if there is one.
        lora_dropout: dropout of the adapter's input; None: there is none.
        mask_keys: layer key of each token in a training step with dropout (`model.dropout`).
    """

    lora_a: nnx.Param
    lora_b: nnx.Param
    mask_keys: UInt32[Array, "b s"] | None = None

    def __init__(
        self,
        out: tuple[int, str | None],
        inp: tuple[int, str],
        *,
        std: float,
        declare: Declare,
        bias: bool = False,
        out_head: int | None = None,
        inp_head: int | None = None,
    ) -> None:
        self.axes, self.backward = (out[1], inp[1]), declare.backward
        heads = (out_head, inp_head) if declare.heads_in_products else (None, None)
        self.matrix = Matrix(self.axes, *heads, by_token=declare.results_by_token)
        self.out_head = out_head
        self.splits_sequences = declare.splits_sequences
        self.fp8: fp8.Fp8 | None = None
        self.lora_scale: float | None = None
        self.lora_dropout: Dropout | None = None
        self.weight = declare((out[0], inp[0]), self.axes, normal(std))
        self.has_bias = bias
        if bias:
            self.bias = declare((out[0],), (out[1],), jax.nn.initializers.zeros)

    def __call__(
        self, x: Float[Array, "b s *i"], precision: fp8.LayerPrecision | None = None
    ) -> Float[Array, "b s *o"]:
        """Multiply and add in the dtype of `x`.

        Args:
            x: activations.
            precision: precision of the block; None where the model has no layers in 8 bits.

        Raises:
            UserError: the layer multiplies in 8 bits, and a custom block passed no precision.
        """
        bias = self.bias[...] if self.has_bias else None
        x_PSI, matrix, is_step = split_sequences(x), self.matrix, is_decoding_step(x)
        in_16_bits = precision is not None and precision.in_8_bits is False
        fp8_settings = None if in_16_bits else self.fp8
        if is_step or fp8_settings is not None:  # neither product has heads as a dimension
            matrix = Matrix(self.axes)
        if matrix.inp_head is None:
            x_PSI = x_PSI.reshape(*x_PSI.shape[:2], -1)
        rows = x_PSI if self.splits_sequences else x_PSI.reshape(-1, *x_PSI.shape[2:])
        product: Callable[..., Array] = (
            _stationary_product if is_step else select_product(self.backward, x.dtype, matrix)
        )
        if fp8_settings is None:
            y = product(matrix, x.dtype, self.backward, rows, self.weight[...], bias)
        elif precision is None:
            raise UserError(
                f"linear layer {fp8_settings.name} multiplies in 8 bits and was called without a "
                "precision. Pass the precision of the block (docs/library.md), or add the layer to "
                "train.fp8_exclude"
            )
        else:
            amaxes = None
            if hasattr(self, "input_amax_history"):  # delayed scaling
                maxima = (jnp.max(getattr(self, name)[...]) for name in AMAX_HISTORIES)
                amaxes = fp8.Amaxes(*maxima)
            y = fp8.product(fp8_settings, rows, self.weight[...], bias, amaxes, precision)
        if self.lora_scale is not None:
            y = y + self._adapter(product, matrix, rows)
        heads = () if self.out_head is None else (self.out_head,)
        return merge_sequences(y.reshape(*x_PSI.shape[:2], -1, *heads), len(x))

    def _adapter(
        self, product: Callable[..., Array], matrix: Matrix, rows: Float[Array, "..."]
    ) -> Array:
        """Return the output of the adapter for the rows of a product with `matrix`."""
        (out, inp), dtype, a = self.axes, rows.dtype, self.lora_a[...]
        scale = self.lora_scale
        assert scale is not None
        tokens = rows.shape[: rows.ndim - len(matrix.letters[1])]
        x_TI = rows.reshape(*tokens, -1)
        to_low = functools.partial(product, Matrix((None, inp)), dtype, self.backward)
        if self.mask_keys is None:
            low = to_low(x_TI, a, None)
        else:
            dropout = self.lora_dropout
            assert dropout is not None
            keys = split_sequences(self.mask_keys).reshape(tokens)
            # The backward pass computes the mask again: it saves no activations for it.
            masked = jax.checkpoint(lambda x, a, keys: to_low(dropout.drop(x, keys), a, None))
            low, scale = masked(x_TI, a, keys), scale * dropout.scale
        of_b = Matrix((out, None), matrix.out_head)
        high = product(of_b, dtype, self.backward, low, self.lora_b[...], None)
        return times(high, scale)

    def whole_weight(self) -> Float[Array, "o i"]:
        """Return the stored weight; with an adapter, W + s B A in the dtype of W."""
        weight = self.weight[...]
        if self.lora_scale is None:
            return weight
        update = self.lora_scale * (self.lora_b[...] @ self.lora_a[...])
        return (weight.astype(FLOAT32) + update).astype(weight.dtype)


def select_product(backward: Backward, dtype: jnp.dtype, matrix: Matrix) -> Callable[..., Array]:
    """Return the product function of a linear layer for activations of a dtype.

    Its arguments are a description of the matrix, the dtype of the result, `backward`, x (a row per
    token), and the stored weight [out, in] and bias.
    """
    # Differentiated automatically, the layout of a result would be that of its gradient, which
    # XLA's partitioner would then gather on all devices.
    if collectives.reduces_in_other_dtype(backward.dtype, dtype) or matrix.by_token:
        return _product_with_explicit_backward
    return _product


def _product(
    matrix: Matrix,
    dtype: jnp.dtype,
    backward: Backward,
    x: Array,
    weight: Array,
    bias: Array | None,
) -> Array:
    weight_OI = collectives.all_gather_weight(weight.astype(x.dtype), matrix.axes)
    return _multiply(matrix, dtype, x, weight_OI, bias)


def _multiply(
    matrix: Matrix, dtype: jnp.dtype, x: Array, weight_OI: Array, bias: Array | None
) -> Array:
    weight, (out, inp) = matrix.split_heads(weight_OI), matrix.letters
    y = jnp.einsum(f"...{inp},{out}{inp}->...{out}", x, weight, preferred_element_type=dtype)
    y = matrix.laid_out(y, out)
    return y if bias is None else y + bias.astype(dtype).reshape(weight.shape[: len(out)])


def is_decoding_step(x: Float[Array, "b s *i"]) -> bool:
    """Return whether there is one token per sequence, on devices that share matrices as data."""
    return x.shape[1] == 1 and automatic_size("embed") > 1


def _stationary_product(
    matrix: Matrix,
    dtype: jnp.dtype,
    backward: Backward,
    x: Array,
    weight: Array,
    bias: Array | None,
) -> Array:
    """Multiply by each device's shard of a matrix, which no device gathers.

    The tokens of a decoding step are smaller than the matrix, so devices exchange tokens instead.
    """
    out, inp = matrix.axes
    further = (None,) * (x.ndim - 2)  # the token, if there is a dimension of sequences
    x = constrain(x, None, *further, inp)
    weight_OI = constrain(weight, *matrix.axes).astype(dtype)
    y = jnp.einsum("...i,oi->...o", x, weight_OI, preferred_element_type=dtype)
    y = constrain(y, None, *further, out)
    y = y if bias is None else y + bias.astype(dtype)
    return constrain(y, "batch", *further, *compute_axes((out,)))


_product_with_explicit_backward = jax.custom_vjp(_product, nondiff_argnums=(0, 1, 2))
"""`_product` for devices that sum gradients in another dtype, or prescribe layouts of results.

Gradients of weight and bias are computed in the dtype of their sum over devices: XLA's partitioner
sums the products of split rows in the dtype of the products, before any cast. The saved weight is
the device's shard, or the gathered matrix.
"""


def _product_forward(
    matrix: Matrix,
    dtype: jnp.dtype,
    backward: Backward,
    x: Array,
    weight: Array,
    bias: Array | None,
) -> tuple[Array, tuple]:
    # Rematerialization policies see the product here. The weight is not a product, so that policies
    # which save products do not save the gathered weight.
    weight_OI = collectives.all_gather_weight(weight.astype(x.dtype), matrix.axes)
    saved, like = weight if backward.regathers else weight_OI, jnp.zeros((), weight.dtype)
    return _multiply(matrix, dtype, x, weight_OI, bias), (x, saved, like, bias)


def _product_backward(
    matrix: Matrix, dtype: jnp.dtype, backward: Backward, saved: tuple, d_y: Array
) -> tuple[Array, Array, Array | None]:
    x, weight_OI, like, bias = saved
    if backward.regathers:
        weight_OI = collectives.all_gather_weight(weight_OI.astype(x.dtype), matrix.axes)
    of_x = matrix._replace(out_head=None)
    weight, (_, inp) = of_x.split_heads(weight_OI), of_x.letters
    tokens = x.shape[: x.ndim - len(inp)]
    # Heads are dimensions of results only. XLA would transpose operands of a sum over tokens that
    # have them.
    d_y, x_TI = d_y.reshape(*tokens, -1), x.reshape(*tokens, -1)
    d_x = jnp.einsum(f"...o,o{inp}->...{inp}", d_y, weight).astype(x.dtype)
    d_x = matrix.laid_out(d_x, inp)
    sums = jnp.promote_types(backward.dtype, d_y.dtype)
    if backward.rounds:
        d_weight = _sum_of_rounded(matrix.axes, d_y, x_TI, sums)
    else:
        d_weight = jnp.einsum("...o,...i->oi", d_y, x_TI, preferred_element_type=sums)
        d_weight = constrain(d_weight, *matrix.axes)
    d_weight = d_weight.astype(like.dtype)
    if bias is None:
        return d_x, d_weight, None
    return d_x, d_weight, jnp.sum(d_y, tuple(range(len(tokens))), sums).astype(bias.dtype)


def _sum_of_rounded(axes: Axes, d_y: Array, x: Array, dtype: jnp.dtype) -> Float[Array, "o i"]:
    """Return the gradient of a matrix, to which each device adds its tokens' part, rounded once."""

    def in_group(d_y: Array, x: Array) -> Array:
        part = jnp.einsum("...o,...i->oi", d_y, x, preferred_element_type=x.dtype)
        return collectives.reduce_gradient(part, axes, dtype)

    tokens = ("tokens", *(None,) * (x.ndim - 2))
    by_token = (automatic_spec(*tokens, axis) for axis in compute_axes(axes))
    product = jax.shard_map(
        in_group, in_specs=tuple(by_token), out_specs=automatic_spec(*axes),
        axis_names=automatic_axes(), check_vma=False,
    )  # fmt: skip
    return collectives.varying(product(d_y, x), collectives.varying_axes((d_y, x)))


_product_with_explicit_backward.defvjp(_product_forward, _product_backward)


class Embedding(nnx.Module):
    """Token embedding: rows of a [vocab, dim] table in a given dtype, not scaled."""

    def __init__(self, vocab: int, dim: int, *, std: float, declare: Declare) -> None:
        self.reduce_dtype = declare.backward.dtype
        self.weight = declare((vocab, dim), _TABLE, normal(std))

    def __call__(self, tokens: Int[Array, "b s"], dtype: jnp.dtype) -> Float[Array, "b s d"]:
        """Look up `tokens`; ids outside of the table are clamped (data is checked beforehand)."""
        gather = _gather_from_shard if _is_partly_split() else _gather_rows
        return look_up(gather, self.weight[...], tokens, _TABLE, dtype, self.reduce_dtype)


_TABLE = ("vocab", "embed")


def _is_partly_split() -> bool:
    """Return whether the table is split over manual axes, or manual axes leave several others."""
    sizes = jax.sharding.get_abstract_mesh().shape
    automatic = {name for axis in _TABLE for name in mesh_axes(axis)} & automatic_axes()
    splitting = [name for name in automatic if sizes[name] > 1]
    is_refused = bool(axes_of_type(AxisType.Manual)) and len(splitting) > 1
    return is_refused or bool(collectives.split_over("vocab"))


Gather = Callable[[Array, Array], Array]
"""(stored table in the dtype of the result, row indices) -> rows."""


def look_up(
    gather: Gather,
    weight: Float[Array, "v d"],
    tokens: Int[Array, "b s"],
    axes: Axes,
    dtype: jnp.dtype,
    reduce_dtype: jnp.dtype,
) -> Float[Array, "b s d"]:
    """Look up rows of a table in `dtype`.

    Args:
        gather: function that gathers the rows, differentiable with respect to the table.
        weight: the stored table.
        tokens: indices of the rows.
        axes: logical axes of the table.
        dtype: dtype of the result.
        reduce_dtype: dtype in which devices sum the gradient of the table.
    """
    if collectives.reduces_in_other_dtype(reduce_dtype, dtype):
        return _look_up_reduced(gather, axes, dtype, reduce_dtype, weight, tokens)
    return gather(weight.astype(dtype), tokens)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _look_up_reduced(
    gather: Gather,
    axes: Axes,
    dtype: jnp.dtype,
    reduce_dtype: jnp.dtype,
    weight: Array,
    tokens: Array,
) -> Array:
    """Look up rows; the gradient of the table is computed, and thus summed, in `reduce_dtype`."""
    return gather(weight.astype(dtype), tokens)


def _look_up_backward(
    gather: Gather, axes: Axes, dtype: jnp.dtype, reduce_dtype: jnp.dtype, saved: tuple, d_y: Array
) -> tuple[Array, None]:
    weight, tokens = saved
    _, pullback = jax.vjp(lambda table: gather(table, tokens), weight.astype(reduce_dtype))
    (gradient,) = pullback(d_y.astype(reduce_dtype))
    return constrain(gradient, *axes).astype(weight.dtype), None


_look_up_reduced.defvjp(
    lambda gather, axes, dtype, reduce_dtype, weight, tokens: (
        gather(weight.astype(dtype), tokens),
        (weight, tokens),
    ),
    _look_up_backward,
)


def _gather_rows(table: Float[Array, "v d"], tokens: Int[Array, "b s"]) -> Float[Array, "b s d"]:
    rows = table[tokens]
    if automatic_size("context") == 1:
        return rows
    # The devices that split the width shall split rows and tokens. Two constraints, one for each
    # dimension: with a single one XLA's partitioner gathers the whole array in between.
    return constrain(constrain(rows, "batch", None, "context"), "batch", "context", None)


def _gather_from_shard(
    table: Float[Array, "v d"], tokens: Int[Array, "b s"]
) -> Float[Array, "b s d"]:
    # Gathered over all automatic axes: XLA's partitioner fails on a gather from a split table.
    return _shard_rows(constrain(collectives.all_gather_weight(table, _TABLE), None, None), tokens)


@jax.custom_vjp
def _shard_rows(shard: Float[Array, "v d"], tokens: Int[Array, "b s"]) -> Float[Array, "b s d"]:
    """Return rows of a table split over devices; the gradient is that of the local shard."""
    rows, is_local = _local_rows(shard, tokens)
    values = jnp.where(is_local[..., None], shard[rows], 0)
    return collectives.psum(values, "vocab")


def _local_rows(shard: Array, tokens: Array) -> tuple[Array, Array]:
    rows = tokens - collectives.first_index("vocab", shard.shape[0])
    is_local = (rows >= 0) & (rows < shard.shape[0])
    return jnp.where(is_local, rows, 0), is_local


def _shard_rows_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, None]:
    shard, tokens = saved
    rows, is_local = _local_rows(shard, tokens)
    return jnp.zeros_like(shard).at[rows].add(jnp.where(is_local[..., None], gradient, 0)), None


_shard_rows.defvjp(lambda *saved: (_shard_rows(*saved), saved), _shard_rows_backward)
