"""Depthwise causal convolution of a few tokens, as in Mamba and Gated DeltaNet.

    y[t, c] = bias[c] + Σ_j weight[c, j] x[t - W + 1 + j, c]        j = 0 … W - 1

The weight is laid out as in torch's `Conv1d(groups=C)`, whose last column multiplies the token
itself. Tokens of other documents and tokens before the sequence count as 0.

The W products are shifts and multiplications that XLA fuses into one pass. XLA's own grouped
convolution is far slower on CPU, and no product of matrices on TPU.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxforge.kernels.sequence_parts import from_parts, from_previous_part, to_parts
from jaxforge.parallel.collectives import axis_size

ConvolutionState = Float[Array, "b c w"]
"""The last W - 1 inputs of each sequence, oldest first."""


def causal_convolution(
    x_BSC: Float[Array, "b s c"],
    weight_CW: Float[Array, "c w"],
    bias_C: Float[Array, "c"] | None = None,
    segment_ids: Int[Array, "b s"] | None = None,
    state: ConvolutionState | None = None,
    lengths: Int[Array, "b"] | None = None,
    strategy: str = "ulysses",
) -> tuple[Float[Array, "b s c"], ConvolutionState]:
    """Convolve sequences along their tokens, in float32 or wider; the result has the dtype of x.

    Inside `shard_map`, a device passes the last W - 1 inputs of its parts of sequences to the
    devices that hold the next parts. Each part must have at least W - 1 tokens.

    Args:
        x_BSC: inputs; of a device, its tokens in the order of `context_parallel.to_device_order`.
        weight_CW: factor of each channel and offset, oldest token first.
        bias_C: bias of each channel.
        segment_ids: document of each token, for packed rows; None: each row is one document.
        state: the W - 1 inputs before the first token, which belong to its document; None: zeros.
            Devices that share sequences have none.
        lengths: number of tokens of each row, without the padding on its right; None: all.
        strategy: "ulysses" or "ring": how devices share sequences (`distributed.cp_strategy`).

    Returns:
        The outputs, and the state after the last token of each row (of the device's last part, if
        devices share sequences). Inputs of earlier documents are 0 in it.
    """
    before_PWC = _inputs_before(x_BSC, state, weight_CW.shape[1], strategy)
    extended = jnp.concatenate([before_PWC, to_parts(x_BSC, strategy)], axis=1)
    ids = None
    if segment_ids is not None:
        ids = _extended_ids(to_parts(segment_ids, strategy), before_PWC.shape[1], strategy)
    y = from_parts(_convolve(extended, weight_CW, bias_C, ids), strategy)
    return y, _state_after(extended, ids, len(x_BSC), weight_CW.shape[1], lengths)


def _inputs_before(
    x_BSC: Array, state: ConvolutionState | None, width: int, strategy: str
) -> Float[Array, "p w c"]:
    """Return the W - 1 inputs before each part."""
    x, count = to_parts(x_BSC, strategy), width - 1
    if state is not None:
        return state.swapaxes(1, 2).astype(x.dtype)
    if axis_size("context") == 1:
        return jnp.zeros((len(x), count, x.shape[2]), x.dtype)
    if x.shape[1] < count:
        raise ValueError(
            f"each device needs at least {count} tokens of a part of a sequence to convolve over "
            f"{width} tokens, and has {x.shape[1]}"
        )
    return from_previous_part(x[:, x.shape[1] - count :], strategy)


def _extended_ids(ids: Int[Array, "p t"], count: int, strategy: str) -> Int[Array, "p t"]:
    """Return the documents of the inputs, with those of the inputs before each part in front."""
    if axis_size("context") == 1:  # a state belongs to the first document, and zeros to any
        before = jnp.broadcast_to(ids[:, :1], (len(ids), count))
    else:
        before = from_previous_part(ids[:, ids.shape[1] - count :], strategy)
    return jnp.concatenate([before, ids], axis=1)


@jax.custom_vjp
def _convolve(extended: Array, weight_CW: Array, bias_C: Array | None, ids: Array | None) -> Array:
    """Convolve inputs that have W - 1 earlier inputs in front.

    The gradient is explicit. JAX's own would save the W shifted inputs, and XLA:CPU takes 15 times
    as long for the gradient of the weight.
    """
    tokens, weight = extended.shape[1] - weight_CW.shape[1] + 1, _widened(weight_CW)
    y = jnp.zeros((), weight.dtype) if bias_C is None else _widened(bias_C)
    for offset in range(weight.shape[1]):
        shifted = _widened(extended[:, offset : offset + tokens])
        y = y + _of_same_document(shifted, ids, offset, weight.shape[1]) * weight[:, offset]
    return y.astype(extended.dtype)


def _convolve_forward(
    extended: Array, weight_CW: Array, bias_C: Array | None, ids: Array | None
) -> tuple[Array, tuple[Array, Array, Array | None, Array | None]]:
    return _convolve(extended, weight_CW, bias_C, ids), (extended, weight_CW, bias_C, ids)


def _convolve_backward(
    saved: tuple[Array, Array, Array | None, Array | None], d_y: Array
) -> tuple[Array, Array, Array | None, None]:
    extended, weight_CW, bias_C, ids = saved
    weight, d_y = _widened(weight_CW), _widened(d_y)
    width, tokens = weight.shape[1], d_y.shape[1]
    d_extended, d_weights = jnp.zeros((), weight.dtype), []
    for offset in range(width):
        masked = _of_same_document(d_y, ids, offset, width)
        shifted = _widened(extended[:, offset : offset + tokens])
        d_weights.append(jnp.sum(shifted * masked, axis=(0, 1)))
        room = ((0, 0), (offset, width - 1 - offset), (0, 0))  # where the inputs are
        d_extended = d_extended + jnp.pad(masked * weight[:, offset], room)
    d_weight = jnp.stack(d_weights, axis=1).astype(weight_CW.dtype)
    d_bias = None if bias_C is None else jnp.sum(d_y, axis=(0, 1)).astype(bias_C.dtype)
    return d_extended.astype(extended.dtype), d_weight, d_bias, None


_convolve.defvjp(_convolve_forward, _convolve_backward)


def _widened(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _of_same_document(x: Array, ids: Array | None, offset: int, width: int) -> Array:
    """Return values of tokens, or 0 where the input at `offset` is of another document."""
    if ids is None:
        return x
    tokens = x.shape[1]
    same = ids[:, offset : offset + tokens] == ids[:, width - 1 :]
    return jnp.where(same[..., None], x, 0)


def _state_after(
    extended: Array, ids: Array | None, batch: int, width: int, lengths: Array | None
) -> ConvolutionState:
    """Return the last W - 1 inputs of each row; 0 where they belong to an earlier document.

    The input of token t is `extended[t + W - 1]`. After n tokens, the last W - 1 begin at n.
    """
    per_device = len(extended) // batch
    rows = extended[per_device - 1 :: per_device]
    tokens = extended.shape[1] - width + 1
    if lengths is None:
        lengths = jnp.full(batch, tokens)
    take = jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, width - 1))
    last = take(rows, lengths)
    if ids is not None:
        rows_of_ids = ids[per_device - 1 :: per_device]
        newest = jnp.take_along_axis(rows_of_ids, lengths[:, None] + width - 2, axis=1)
        last = jnp.where((take(rows_of_ids, lengths) == newest)[..., None], last, 0)
    return last.swapaxes(1, 2)
