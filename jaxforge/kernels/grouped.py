"""Rows times the weights of the group they belong to: the products of a mixture of experts.

    blocks       blocks of rows in plain XLA, anywhere (`grouped_blocks.py`)
    megablox     JAX's Pallas kernels for TPU (`megablox.py`)
    mosaic_gpu   Pallas kernels for Hopper, bf16 or fp16 (`grouped_mosaic.py`)

Each multiplies a row with its own group's weights alone, forward and in both gradients.
`jax.lax.ragged_dot` is none of them: on CPU and GPU, and for the gradient of weights on TPU, it
multiplies every row with the weights of every group (JAX 0.10).
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxforge.errors import UserError
from jaxforge.kernels import grouped_blocks
from jaxforge.kernels.on_first_use import on_first_use
from jaxforge.parallel import collectives


def grouped_matmul(
    x_MI: Float[Array, "m i"],
    w_GOI: Float[Array, "g o i"],
    sizes_G: Int[Array, "g"],
    backend: str,
    gradient_GOI: Float[Array, "g o i"] | None = None,
) -> Float[Array, "m o"]:
    """y[m] = w[g] x[m], for the group g of row m.

    Arrays are local: inside `shard_map`, its axes are all manual. Where it keeps track of the axes
    that arrays vary over, a gradient is summed over those that its array did not vary over; XLA's
    `blocks` alone can be told so.

    Args:
        x_MI: rows, sorted by group. What those beyond the last group's hold, and their gradient, is
            left out; what they give, and get back, is anything.
        w_GOI: a matrix for each group, in any dtype; products take it in that of `x_MI`.
        sizes_G: int32, rows of each group; M at most together.
        backend: a key of `GROUPED`.
        gradient_GOI: takes the gradient of the weights, in its own dtype, in their place.

    Returns:
        In the dtype of `x_MI`, summed in float32, as the gradients are.
    """
    arrays = x_MI, w_GOI, sizes_G, gradient_GOI
    axes = collectives.varying_axes(arrays)
    return _matmul(backend, *jax.tree.map(lambda array: collectives.varying(array, axes), arrays))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(
    backend: str, x_MI: Array, w_GOI: Array, sizes_G: Array, gradient_GOI: Array | None
) -> Array:
    return GROUPED[backend].matmul(x_MI, w_GOI, sizes_G)


def _forward(
    backend: str, x_MI: Array, w_GOI: Array, sizes_G: Array, gradient_GOI: Array | None
) -> tuple[Array, tuple]:
    apart = None if gradient_GOI is None else jnp.zeros((), gradient_GOI.dtype)
    return _matmul(backend, x_MI, w_GOI, sizes_G, gradient_GOI), (x_MI, w_GOI, sizes_G, apart)


def _backward(
    backend: str, saved: tuple, dy_MO: Array
) -> tuple[Array, Array | None, None, Array | None]:
    x_MI, w_GOI, sizes_G, apart = saved
    products = GROUPED[backend]
    dx_MI = products.gradient_of_rows(dy_MO, w_GOI, sizes_G)
    dw_GOI = products.gradient_of_weights(x_MI, dy_MO, sizes_G)
    if apart is not None:
        return dx_MI, None, None, dw_GOI.astype(apart.dtype)
    return dx_MI, dw_GOI.astype(w_GOI.dtype), None, None


_matmul.defvjp(_forward, _backward)


class ProductRequirements(NamedTuple):
    """Requirements for grouped products.

    Attributes:
        platform: "cpu", "gpu" or "tpu".
        dtype: of rows.
        widths: of what is multiplied: the model's, and an expert's on each device.
        capability: compute capability of a GPU, such as "9.0".
    """

    platform: str
    dtype: jnp.dtype
    widths: tuple[int, ...]
    capability: str | None = None


def _megablox_unsupported(at: ProductRequirements) -> str | None:
    if at.platform != "tpu":
        return f"it needs a TPU, and this run is on {at.platform}"
    if at.dtype not in (jnp.bfloat16, jnp.float32):
        return 'it computes in bf16 or fp32: set train.mixed_precision = "bf16"'
    return None


def _mosaic_unsupported(at: ProductRequirements) -> str | None:
    if at.platform != "gpu":
        return f"it needs an NVIDIA GPU, and this run is on {at.platform}"
    if at.capability != "9.0":
        return f"it needs Hopper, compute capability 9.0, and these GPUs have {at.capability}"
    if at.dtype not in (jnp.bfloat16, jnp.float16):
        return 'it computes in bf16 or fp16: set train.mixed_precision = "bf16"'
    from jaxforge.kernels.grouped_mosaic import MULTIPLE  # here: see on_first_use

    if odd := [width for width in at.widths if width % MULTIPLE]:
        return f"widths are multiples of {MULTIPLE}, and an expert has {odd[0]}"
    return None


class Products(NamedTuple):
    """A backend.

    Attributes:
        matmul: (x_MI, w_GOI, sizes_G) -> y_MO in the dtype of x.
        gradient_of_rows: (dy_MO, w_GOI, sizes_G) -> dx_MI in the dtype of dy.
        gradient_of_weights: (x_MI, dy_MO, sizes_G) -> dw_GOI in float32.
        unsupported_reason: what speaks against it in a situation; None: nothing.
        is_opaque: whether XLA does not see inside, so that `shard_map` cannot check over which mesh
            axes results vary.
    """

    matmul: Callable[[Array, Array, Array], Array]
    gradient_of_rows: Callable[[Array, Array, Array], Array]
    gradient_of_weights: Callable[[Array, Array, Array], Array]
    unsupported_reason: Callable[[ProductRequirements], str | None]
    is_opaque: bool = False


def _of_module(
    module: str, unsupported_reason: Callable[[ProductRequirements], str | None]
) -> Products:
    names = "matmul", "gradient_of_rows", "gradient_of_weights"
    matmul, of_rows, of_weights = (on_first_use(module, name) for name in names)
    return Products(matmul, of_rows, of_weights, unsupported_reason, is_opaque=True)


GROUPED = {
    "blocks": Products(
        grouped_blocks.matmul, grouped_blocks.gradient_of_rows,
        grouped_blocks.gradient_of_weights, lambda at: None,
    ),
    "megablox": _of_module("megablox", _megablox_unsupported),
    "mosaic_gpu": _of_module("grouped_mosaic", _mosaic_unsupported),
}  # fmt: skip

_FAST = {"gpu": "mosaic_gpu", "tpu": "megablox"}


def choose_grouped(asked: str, at: ProductRequirements) -> str:
    """The name in `GROUPED` that `model.moe_backend` stands for here.

    Args:
        asked: the key's value.
        at: what it is to serve.

    Raises:
        UserError: the backend asked for cannot serve.
    """
    name = _FAST.get(at.platform, "blocks") if asked == "auto" else asked
    problem = GROUPED[name].unsupported_reason(at)
    if problem is None:
        return name
    if asked == "auto":
        return "blocks"
    raise UserError(
        f'model.moe_backend = "{asked}" cannot serve here: {problem}; '
        'or set model.moe_backend = "auto"'
    )
