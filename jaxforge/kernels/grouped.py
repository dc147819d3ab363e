"""Grouped products of rows with the weights of their group, for mixtures of experts.

    blocks       blocks of rows in plain XLA, anywhere (`grouped_blocks.py`)
    megablox     JAX's Pallas kernels for TPU (`megablox.py`)
    mosaic_gpu   Pallas kernels for Hopper, bf16 or fp16 (`grouped_mosaic.py`)

Each backend multiplies a row only with the weights of its own group, in the forward pass and in
both gradients. `jax.lax.ragged_dot` is not used: on CPU and GPU, and for the gradient of weights on
TPU, it multiplies every row with the weights of every group (JAX 0.10).

    x_MI     rows sorted by group    0 0 0 | 1 | 2 2 | . .      sizes_G = [3, 1, 2]
    y_MO     x[m] w[g]ᵀ                                         rows beyond the last group (.):
    dx_MI    dy[m] w[g]                                         undefined values, no contribution
    dw_GOI   Σ over rows m of group g of dy[m] x[m]ᵀ
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
    """Compute y[m] = w[g] x[m] for the group g of each row m.

    Arrays are local: inside `shard_map`, all its axes are manual. If `shard_map` tracks varying
    axes, a gradient is summed over the axes that its array does not vary over. Only the backend
    `blocks` supports this.

    Args:
        x_MI: rows, sorted by group. Rows beyond the last group do not contribute to gradients of
            weights; their results and gradients are undefined.
        w_GOI: a matrix per group in any dtype, cast to the dtype of `x_MI`.
        sizes_G: number of rows of each group, int32; their sum is at most M.
        backend: a key of `GROUPED_BACKENDS`.
        gradient_GOI: receives the gradient of the weights in its own dtype, instead of `w_GOI`.

    Returns:
        The products in the dtype of `x_MI`, summed in float32 as the gradients are.
    """
    # All arrays vary over the same axes from here on: the transpose of the cast sums the gradient
    # of an array over the axes that the array itself does not vary over.
    arrays = x_MI, w_GOI, sizes_G, gradient_GOI
    axes = collectives.varying_axes(arrays)
    # A custom gradient, because the gradient of weights is a product of another kind, and because
    # opaque kernels have no gradients of their own.
    return _matmul(backend, *jax.tree.map(lambda array: collectives.varying(array, axes), arrays))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(
    backend: str, x_MI: Array, w_GOI: Array, sizes_G: Array, gradient_GOI: Array | None
) -> Array:
    return GROUPED_BACKENDS[backend].matmul(x_MI, w_GOI, sizes_G)


def _forward(
    backend: str, x_MI: Array, w_GOI: Array, sizes_G: Array, gradient_GOI: Array | None
) -> tuple[Array, tuple]:
    # `gradient_GOI` has no values of interest; a scalar carries its dtype to the backward pass.
    like = None if gradient_GOI is None else jnp.zeros((), gradient_GOI.dtype)
    return _matmul(backend, x_MI, w_GOI, sizes_G, gradient_GOI), (x_MI, w_GOI, sizes_G, like)


def _backward(
    backend: str, saved: tuple, dy_MO: Array
) -> tuple[Array, Array | None, None, Array | None]:
    x_MI, w_GOI, sizes_G, like = saved
    products = GROUPED_BACKENDS[backend]
    dx_MI = products.gradient_of_rows(dy_MO, w_GOI, sizes_G)
    dw_GOI = products.gradient_of_weights(x_MI, dy_MO, sizes_G)
    # dw is float32. It is rounded once: to the dtype of the sum over devices if the caller gave
    # `gradient_GOI`, else to the dtype of the weights.
    # Sums are in float32; each gradient is rounded once, to the dtype of its array.
    if like is not None:
        return dx_MI, None, None, dw_GOI.astype(like.dtype)
    return dx_MI, dw_GOI.astype(w_GOI.dtype), None, None


_matmul.defvjp(_forward, _backward)


class ProductRequirements(NamedTuple):
    """Requirements for grouped products.

    Attributes:
        platform: "cpu", "gpu" or "tpu".
        dtype: dtype of the rows.
        widths: widths of the operands: of the model, and of an expert on each device.
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
    # The kernels use WGMMA, an instruction of Hopper only.
    if at.capability != "9.0":
        return f"it needs Hopper, compute capability 9.0, and these GPUs have {at.capability}"
    if at.dtype not in (jnp.bfloat16, jnp.float16):
        return 'it computes in bf16 or fp16: set train.mixed_precision = "bf16"'
    from jaxforge.kernels.grouped_mosaic import MULTIPLE  # here: see on_first_use

    if odd := [width for width in at.widths if width % MULTIPLE]:
        return f"widths must be multiples of {MULTIPLE}, and an expert has {odd[0]}"
    return None


class Products(NamedTuple):
    """A backend of grouped products.

    Attributes:
        matmul: (x_MI, w_GOI, sizes_G) -> y_MO in the dtype of x.
        gradient_of_rows: (dy_MO, w_GOI, sizes_G) -> dx_MI in the dtype of dy.
        gradient_of_weights: (x_MI, dy_MO, sizes_G) -> dw_GOI in float32.
        unsupported_reason: requirements -> reason why the backend does not support them, or None.
        is_opaque: whether XLA cannot see inside of the kernel, so that `shard_map` cannot check
            over which mesh axes results vary.
    """

    matmul: Callable[[Array, Array, Array], Array]
    gradient_of_rows: Callable[[Array, Array, Array], Array]
    gradient_of_weights: Callable[[Array, Array, Array], Array]
    unsupported_reason: Callable[[ProductRequirements], str | None]
    is_opaque: bool = False


def _import_backend(
    module: str, unsupported_reason: Callable[[ProductRequirements], str | None]
) -> Products:
    names = "matmul", "gradient_of_rows", "gradient_of_weights"
    matmul, of_rows, of_weights = (on_first_use(module, name) for name in names)
    return Products(matmul, of_rows, of_weights, unsupported_reason, is_opaque=True)


# Pallas modules are imported at the first call, so that this table exists on any platform.
GROUPED_BACKENDS = {
    "blocks": Products(
        grouped_blocks.matmul, grouped_blocks.gradient_of_rows,
        grouped_blocks.gradient_of_weights, lambda at: None,
    ),
    "megablox": _import_backend("megablox", _megablox_unsupported),
    "mosaic_gpu": _import_backend("grouped_mosaic", _mosaic_unsupported),
}  # fmt: skip

_FAST = {"gpu": "mosaic_gpu", "tpu": "megablox"}


def choose_grouped(requested: str, at: ProductRequirements) -> str:
    """Resolve `model.moe_backend` to a name in `GROUPED_BACKENDS`.

    Args:
        requested: `model.moe_backend`.
        at: requirements for the products.

    Raises:
        UserError: the configured backend is not supported.
    """
    name = _FAST.get(at.platform, "blocks") if requested == "auto" else requested
    problem = GROUPED_BACKENDS[name].unsupported_reason(at)
    if problem is None:
        return name
    if requested == "auto":
        return "blocks"  # which runs anywhere
    raise UserError(
        f'model.moe_backend = "{requested}" is not supported: {problem}. To use a supported '
        'kernel, set model.moe_backend = "auto"'
    )
