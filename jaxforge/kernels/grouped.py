"""Grouped matrix products for mixtures of experts: each row is multiplied with its group's weights.

    blocks       blocks of rows in plain XLA, on any platform (`grouped_blocks.py`)
    megablox     JAX's Pallas kernels for TPU (`megablox.py`)
    mosaic_gpu   Pallas kernels for Hopper, bf16 or fp16 (`grouped_mosaic.py`)

All backends multiply a row with the weights of its own group only, in the forward pass and in both
gradients. `jax.lax.ragged_dot` does not: on CPU and GPU, and for the gradient of weights on TPU, it
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
    """Return y[m] = w[g] x[m] for the group g of each row m.

    Arrays are local: inside `shard_map`, all axes are manual. If `shard_map` tracks the axes that
    arrays vary over, gradients are summed over the axes that the input did not vary over. Only the
    backend "blocks" supports that.

    Args:
        x_MI: rows, sorted by group. Rows beyond the last group are ignored; their results and
            gradients are undefined.
        w_GOI: matrix of each group, in any dtype; it is cast to the dtype of `x_MI`.
        sizes_G: int32 number of rows of each group, in total at most M.
        backend: key of `GROUPED_BACKENDS`.
        gradient_GOI: zeros that receive the gradient of the weights, in their own dtype, instead of
            `w_GOI`; None: `w_GOI` receives its gradient.

    Returns:
        Results [m, o] in the dtype of `x_MI`. Sums are in float32, also those of gradients.
    """
    # Marking all inputs as varying over the same axes makes the transpose of `pcast` sum gradients.
    arrays = x_MI, w_GOI, sizes_G, gradient_GOI
    axes = collectives.varying_axes(arrays)
    return _matmul(backend, *jax.tree.map(lambda array: collectives.varying(array, axes), arrays))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(
    backend: str, x_MI: Array, w_GOI: Array, sizes_G: Array, gradient_GOI: Array | None
) -> Array:
    return GROUPED_BACKENDS[backend].matmul(x_MI, w_GOI, sizes_G)


def _forward(
    backend: str, x_MI: Array, w_GOI: Array, sizes_G: Array, gradient_GOI: Array | None
) -> tuple[Array, tuple]:
    # A scalar carries the dtype of the gradient to the backward pass, without its memory.
    like = None if gradient_GOI is None else jnp.zeros((), gradient_GOI.dtype)
    return _matmul(backend, x_MI, w_GOI, sizes_G, gradient_GOI), (x_MI, w_GOI, sizes_G, like)


def _backward(
    backend: str, saved: tuple, dy_MO: Array
) -> tuple[Array, Array | None, None, Array | None]:
    x_MI, w_GOI, sizes_G, like = saved
    products = GROUPED_BACKENDS[backend]
    dx_MI = products.gradient_of_rows(dy_MO, w_GOI, sizes_G)
    dw_GOI = products.gradient_of_weights(x_MI, dy_MO, sizes_G)
    if like is not None:
        return dx_MI, None, None, dw_GOI.astype(like.dtype)
    return dx_MI, dw_GOI.astype(w_GOI.dtype), None, None


_matmul.defvjp(_forward, _backward)


class ProductRequirements(NamedTuple):
    """Hardware and model properties that grouped products must support.

    Attributes:
        platform: "cpu", "gpu" or "tpu".
        dtype: dtype of the rows.
        widths: widths of the model and of an expert on each device.
        capability: compute capability of a GPU, such as "9.0"; None: unknown.
    """

    platform: str
    dtype: jnp.dtype
    widths: tuple[int, ...]
    capability: str | None = None


def _megablox_unsupported(needs: ProductRequirements) -> str | None:
    if needs.platform != "tpu":
        return f"it needs a TPU, and this run is on {needs.platform}"
    if needs.dtype not in (jnp.bfloat16, jnp.float32):
        return 'it computes in bf16 or fp32: set train.mixed_precision = "bf16"'
    return None


def _mosaic_unsupported(needs: ProductRequirements) -> str | None:
    if needs.platform != "gpu":
        return f"it needs an NVIDIA GPU, and this run is on {needs.platform}"
    if needs.capability != "9.0":
        return f"it needs Hopper, compute capability 9.0, and these GPUs have {needs.capability}"
    if needs.dtype not in (jnp.bfloat16, jnp.float16):
        return 'it computes in bf16 or fp16: set train.mixed_precision = "bf16"'
    from jaxforge.kernels.grouped_mosaic import MULTIPLE  # imported lazily: see on_first_use

    if odd := [width for width in needs.widths if width % MULTIPLE]:
        return f"its widths are multiples of {MULTIPLE}, and an expert has {odd[0]}"
    return None


class GroupedBackend(NamedTuple):
    """A backend of grouped products.

    Attributes:
        matmul: (x_MI, w_GOI, sizes_G) -> y_MO in the dtype of x.
        gradient_of_rows: (dy_MO, w_GOI, sizes_G) -> dx_MI in the dtype of dy.
        gradient_of_weights: (x_MI, dy_MO, sizes_G) -> dw_GOI in float32.
        unsupported_reason: returns why the backend cannot be used, or None if it can.
        is_opaque: whether the functions are kernels, of which `shard_map` cannot check the mesh
            axes that results vary over.
    """

    matmul: Callable[[Array, Array, Array], Array]
    gradient_of_rows: Callable[[Array, Array, Array], Array]
    gradient_of_weights: Callable[[Array, Array, Array], Array]
    unsupported_reason: Callable[[ProductRequirements], str | None]
    is_opaque: bool = False


def _kernels_of_module(
    module: str, unsupported_reason: Callable[[ProductRequirements], str | None]
) -> GroupedBackend:
    names = "matmul", "gradient_of_rows", "gradient_of_weights"
    matmul, of_rows, of_weights = (on_first_use(module, name) for name in names)
    return GroupedBackend(matmul, of_rows, of_weights, unsupported_reason, is_opaque=True)


GROUPED_BACKENDS = {
    "blocks": GroupedBackend(
        grouped_blocks.matmul, grouped_blocks.gradient_of_rows,
        grouped_blocks.gradient_of_weights, lambda needs: None,
    ),
    "megablox": _kernels_of_module("megablox", _megablox_unsupported),
    "mosaic_gpu": _kernels_of_module("grouped_mosaic", _mosaic_unsupported),
}  # fmt: skip

_FAST = {"gpu": "mosaic_gpu", "tpu": "megablox"}


def choose_grouped(asked: str, needs: ProductRequirements) -> str:
    """Resolve `model.moe_backend` for this platform and model.

    Args:
        asked: value of `model.moe_backend`.
        needs: hardware and model properties.

    Returns:
        A key of `GROUPED_BACKENDS`.

    Raises:
        UserError: the backend that the config names cannot be used.
    """
    name = _FAST.get(needs.platform, "blocks") if asked == "auto" else asked
    problem = GROUPED_BACKENDS[name].unsupported_reason(needs)
    if problem is None:
        return name
    if asked == "auto":
        return "blocks"
    raise UserError(
        f'model.moe_backend = "{asked}" cannot be used here: {problem}. Change that, or set '
        'model.moe_backend = "auto"'
    )
