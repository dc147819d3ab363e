"""Sums, maxima and gathers over the devices that hold the parts of a dimension.

Inside `shard_map` its mesh axes are *manual*: arrays are local, and what devices make together is
said here. These functions go by the logical axis of a dimension, and are the identity where no
manual axis of several devices splits it. All other axes are the partitioner's.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jaxtyping import Array, PyTree

from jaxforge.config.axes import DATA_AXES
from jaxforge.parallel.sharding import (
    Axes,
    axes_of_type,
    compute_axes,
    constrain,
    mesh_axes,
)


def split_over(axis: str) -> tuple[str, ...]:
    """The manual mesh axes over whose devices the parts of a logical axis are spread."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return tuple(name for name in _manual_axes(axis) if sizes[name] > 1)


def varying_axes(arrays: PyTree) -> frozenset[str]:
    """The manual mesh axes over which some of these arrays vary, where `shard_map` tracks them."""
    types = map(jax.typeof, jax.tree.leaves(arrays))
    return frozenset[str]().union(*(of_one.manual_axis_type.varying for of_one in types))


def varying(array: Array, axes: frozenset[str]) -> Array:
    """Return the array marked as varying over at least these manual mesh axes."""
    return jax.lax.pcast(array, tuple(sorted(axes - varying_axes(array))), to="varying")


def _manual_axes(axis: str) -> tuple[str, ...]:
    manual = axes_of_type(AxisType.Manual)
    return tuple(name for name in mesh_axes(axis) if name in manual)


def reduces_in_other_dtype(reduce_dtype: jnp.dtype, dtype: jnp.dtype) -> bool:
    """Return whether gradients are reduced over devices in another dtype than that of the products.

    It does where it splits the batch; else devices have gradients of their own, or are alone.

    Args:
        reduce_dtype: what gradients are to be added up in.
        dtype: of products.
    """
    sizes = jax.sharding.get_abstract_mesh().shape
    automatic = axes_of_type(AxisType.Auto)
    splits = any(name in automatic and sizes[name] > 1 for name in DATA_AXES)
    return splits and reduce_dtype != dtype


def first_index(axis: str, size: int) -> Array | int:
    """Return the first index of this device's share of a dimension."""
    names = split_over(axis)
    return jax.lax.axis_index(names) * size if names else 0


def psum(x: Array, axis: str) -> Array:
    """Sum over the devices that hold the parts of a dimension.

    In float32: XLA:CPU aborts on a bfloat16 sum in a partly manual program (docs/upstream.md).
    """
    names = _with_parts(x, axis)
    return jax.lax.psum(x.astype(jnp.float32), names).astype(x.dtype) if names else x


def pmax(x: Array, axis: str) -> Array:
    """Maximum over the devices that hold the parts of a dimension."""
    names = _with_parts(x, axis)
    return jax.lax.pmax(x, names) if names else x


def _with_parts(x: Array, axis: str) -> tuple[str, ...]:
    """The manual axes over which `x` may differ; where that is not tracked, all but those of 1."""
    names = varying_axes(x).union(split_over(axis))
    return tuple(name for name in _manual_axes(axis) if name in names)


def axis_size(axis: str) -> int:
    """Over how many devices the parts of a dimension are spread."""
    names = split_over(axis)
    return jax.lax.axis_size(names) if names else 1


def all_to_all(x: Array, axis: str, split: int = 0, join: int = 0) -> Array:
    """Part i of each device goes to device i of those that hold the parts of a logical axis.

    Args:
        x: of each device.
        axis: the logical axis.
        split: the dimension that is cut into parts.
        join: the dimension along which a device joins what it gets.
    """
    names = split_over(axis)
    return jax.lax.all_to_all(x, names, split, join, tiled=True) if names else x


def all_gather(x: Array, axis: str, join: int) -> Array:
    """Gather the shares of a logical axis and join them along a dimension."""
    names = split_over(axis)
    return jax.lax.all_gather(x, names, axis=join, tiled=True) if names else x


def ring_shift(x: Array, axis: str) -> Array:
    """Shift arrays along a ring of devices: return what the previous device holds."""
    names = split_over(axis)
    if not names:
        return x
    devices = jax.lax.axis_size(names)
    return jax.lax.ppermute(x, names, [(i, (i + 1) % devices) for i in range(devices)])


def exclusive_cumsum(x: Array, axis: str) -> Array:
    """Return the exclusive cumulative sum over the devices of a dimension."""
    names = split_over(axis)
    if not names:
        return jnp.zeros_like(x)
    of_all = jax.lax.all_gather(x, names)
    is_before = jnp.arange(len(of_all)) < jax.lax.axis_index(names)
    return jnp.sum(jnp.where(is_before[:, None], of_all, 0), axis=0)


def psum_scatter(x: Array, mesh_axes: tuple[str, ...], dimension: int) -> Array:
    """Adds `x` over manual mesh axes; each device keeps its part of a dimension.

    A reduce-scatter, except between processes on CPU: gloo's gives wrong sums (docs/upstream.md).
    """
    if not (jax.default_backend() == "cpu" and jax.distributed.is_initialized()):
        return jax.lax.psum_scatter(x, mesh_axes, scatter_dimension=dimension, tiled=True)
    size = x.shape[dimension] // jax.lax.axis_size(mesh_axes)
    first = jax.lax.axis_index(mesh_axes) * size
    return jax.lax.dynamic_slice_in_dim(jax.lax.psum(x, mesh_axes), first, size, dimension)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def all_gather_weight(weight: Array, axes: Axes) -> Array:
    """A weight whole over the data axes, just before its use; its gradient is laid out as it was.

    Left alone, the partitioner for TPU turns each product with a split weight into a loop that
    passes the pieces around (windowed einsum). That pays for gradients, where it hides the
    reduction, and costs half of the speed of forward products (benchmarks/aot.py).

    Its own layout is said, too: else the partitioner may gather what it was cast from.

    Args:
        weight: [..., ...], laid out by `axes`, in the dtype that it is to travel in.
        axes: its logical axes.
    """
    return constrain(constrain(weight, *axes), *compute_axes(axes))


def _gather(weight: Array, axes: Axes) -> tuple[Array, None]:
    return all_gather_weight(weight, axes), None


def _scatter(axes: Axes, _: None, gradient: Array) -> tuple[Array]:
    return (constrain(gradient, *axes),)


all_gather_weight.defvjp(_gather, _scatter)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gradient_receiver(weight: Array, axes: Axes, dtype: jnp.dtype) -> Array:
    """Zeros in the shape of a whole weight; what is their gradient becomes the weight's.

    For a gradient in another dtype than the weight is used in, which an array's own cannot have.
    Nobody reads the zeros, so that none are made.

    Args:
        weight: laid out by `axes`.
        axes: its logical axes.
        dtype: of the gradient, as it is added up over devices.
    """
    return constrain(jnp.zeros_like(weight, dtype), *compute_axes(axes))


def _zeros(weight: Array, axes: Axes, dtype: jnp.dtype) -> tuple[Array, Array]:
    return gradient_receiver(weight, axes, dtype), jnp.zeros((), weight.dtype)


def _shared(axes: Axes, dtype: jnp.dtype, like: Array, gradient: Array) -> tuple[Array]:
    return (constrain(gradient, *axes).astype(like.dtype),)


gradient_receiver.defvjp(_zeros, _shared)
