"""Collectives over the devices that share a logical axis.

Inside `shard_map`, the mesh axes that it takes are *manual*: arrays are local, and communication is
explicit. The functions here take a logical axis and communicate over the manual mesh axes that
split it. They are the identity if there is no such axis with several devices. All other axes are
handled by the partitioner.
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
    data_axes,
    group_axes,
    mesh_axes,
)


def split_over(axis: str) -> tuple[str, ...]:
    """Return the manual mesh axes of several devices that split a logical axis."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return tuple(name for name in _manual_axes(axis) if sizes[name] > 1)


def varying_axes(arrays: PyTree) -> frozenset[str]:
    """Return the manual mesh axes over which any of the arrays varies (if tracked)."""
    types = map(jax.typeof, jax.tree.leaves(arrays))
    return frozenset[str]().union(*(aval.manual_axis_type.varying for aval in types))


def varying(array: Array, axes: frozenset[str]) -> Array:
    """Return the array marked as varying over at least these manual mesh axes."""
    return jax.lax.pcast(array, tuple(sorted(axes - varying_axes(array))), to="varying")


def _manual_axes(axis: str) -> tuple[str, ...]:
    manual = axes_of_type(AxisType.Manual)
    return tuple(name for name in mesh_axes(axis) if name in manual)


def reduces_in_other_dtype(reduce_dtype: jnp.dtype, dtype: jnp.dtype) -> bool:
    """Return whether gradients are reduced over devices in another dtype than that of the products.

    That is so if the partitioner splits the batch. Otherwise each device has its own gradients, or
    there is only one device.

    Args:
        reduce_dtype: dtype in which devices sum gradients.
        dtype: dtype of the products.
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
    """Sum over the devices that share a logical axis.

    Sums are in float32: XLA:CPU aborts on a bfloat16 sum in a partly manual program
    (docs/upstream.md).
    """
    names = _reduced_axes(x, axis)
    return jax.lax.psum(x.astype(jnp.float32), names).astype(x.dtype) if names else x


def pmax(x: Array, axis: str) -> Array:
    """Compute the maximum over the devices that share a logical axis."""
    names = _reduced_axes(x, axis)
    return jax.lax.pmax(x, names) if names else x


def _reduced_axes(x: Array, axis: str) -> tuple[str, ...]:
    """Return the manual mesh axes of a logical axis to reduce over.

    These are the axes of several devices, and axes of one device that `x` is marked as varying
    over: a reduction removes the mark.
    """
    names = varying_axes(x).union(split_over(axis))
    return tuple(name for name in _manual_axes(axis) if name in names)


def axis_size(axis: str) -> int:
    """Return the number of devices that share a logical axis."""
    names = split_over(axis)
    return jax.lax.axis_size(names) if names else 1


def all_to_all(x: Array, axis: str, split: int = 0, join: int = 0) -> Array:
    """Send part i of each device's array to device i of those that share a logical axis.

    Args:
        x: array of this device.
        axis: logical axis.
        split: dimension that is cut into parts.
        join: dimension along which the received parts are concatenated.
    """
    names = split_over(axis)
    return jax.lax.all_to_all(x, names, split, join, tiled=True) if names else x


def all_gather(x: Array, axis: str, join: int) -> Array:
    """Gather the shares of a logical axis and join them along a dimension."""
    names = split_over(axis)
    return jax.lax.all_gather(x, names, axis=join, tiled=True) if names else x


def gather_keys(x: Array, axis: str, join: int) -> Array:
    """Do an `all_gather` with a gradient, whose shares are summed in float32."""
    names = split_over(axis)
    return _gather_keys(x, names, join) if names else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather_keys(x: Array, mesh_axes: tuple[str, ...], join: int) -> Array:
    return jax.lax.all_gather(x, mesh_axes, axis=join, tiled=True)


def _gather_keys_forward(x: Array, mesh_axes: tuple[str, ...], join: int) -> tuple[Array, None]:
    return _gather_keys(x, mesh_axes, join), None


def _gather_keys_backward(
    mesh_axes: tuple[str, ...], join: int, _: None, gradient: Array
) -> tuple[Array]:
    total = psum_scatter(gradient.astype(jnp.float32), mesh_axes, join)
    return (total.astype(gradient.dtype),)


_gather_keys.defvjp(_gather_keys_forward, _gather_keys_backward)


def ring_shift(x: Array, axis: str) -> Array:
    """Send an array to the next device of a ring, and return that of the previous device."""
    names = split_over(axis)
    if not names:
        return x
    devices = jax.lax.axis_size(names)
    return jax.lax.ppermute(x, names, [(i, (i + 1) % devices) for i in range(devices)])


def exclusive_cumsum(x: Array, axis: str) -> Array:
    """Return the sum of `x` [n] over the devices before this one on a logical axis."""
    names = split_over(axis)
    if not names:
        return jnp.zeros_like(x)
    by_device = jax.lax.all_gather(x, names)
    is_before = jnp.arange(len(by_device)) < jax.lax.axis_index(names)
    return jnp.sum(jnp.where(is_before[:, None], by_device, 0), axis=0)


def psum_scatter(x: Array, mesh_axes: tuple[str, ...], dimension: int) -> Array:
    """Sum `x` over manual mesh axes and return this device's part of a dimension.

    It is a reduce-scatter, except between processes on CPU: gloo's reduce-scatter gives wrong sums
    (docs/upstream.md).
    """
    if not (jax.default_backend() == "cpu" and jax.distributed.is_initialized()):
        return jax.lax.psum_scatter(x, mesh_axes, scatter_dimension=dimension, tiled=True)
    size = x.shape[dimension] // jax.lax.axis_size(mesh_axes)
    first = jax.lax.axis_index(mesh_axes) * size
    return jax.lax.dynamic_slice_in_dim(jax.lax.psum(x, mesh_axes), first, size, dimension)


def reduce_gradient(gradient: Array, axes: Axes, dtype: jnp.dtype) -> Array:
    """Sum the gradients of a weight over the groups of devices, and return this device's shard.

    All axes of data parallelism are manual.

    Args:
        gradient: gradient from the tokens of this device, gathered over the data axes, in the dtype
            in which it is sent.
        axes: logical axes of the weight.
        dtype: dtype of the sum.
    """
    groups = group_axes(axes)
    for dimension, axis in enumerate(axes):
        # FSDP axes: a reduce-scatter, after which the device holds its shard of the sum. The other
        # group axes (replicas) are summed by the psum below.
        if scattered := tuple(name for name in data_axes(axis) if name in groups):
            if gradient.dtype == dtype:
                gradient = psum_scatter(gradient, scattered, dimension)
            else:
                gradient = _sum_of_parts(gradient, scattered, dimension, dtype)
            groups = tuple(name for name in groups if name not in scattered)
    return jax.lax.psum(gradient.astype(dtype), groups)


def _sum_of_parts(x: Array, mesh_axes: tuple[str, ...], dimension: int, dtype: jnp.dtype) -> Array:
    """Do a `psum_scatter` whose sums are in `dtype`, while the dtype of `x` is sent.

    A reduce-scatter sends partial sums, rounded by each device that adds to them. Here each device
    sends its values to those who own them, and values are rounded once.
    """
    n, size = jax.lax.axis_size(mesh_axes), x.shape[dimension]
    parts = x.reshape(*x.shape[:dimension], n, size // n, *x.shape[dimension + 1 :])
    by_sender = jax.lax.all_to_all(parts, mesh_axes, dimension, 0)
    return jnp.sum(by_sender, axis=0, dtype=dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def all_gather_weight(weight: Array, axes: Axes) -> Array:
    """Gather a weight over the data axes, just before its use. Its gradient keeps the split layout.

    Otherwise, the partitioner for TPU turns each product with a split weight into a loop that
    passes shards around (windowed einsum). That is useful for gradients, where it hides the
    reduction, but halves the speed of forward products (benchmarks/aot.py).

    Args:
        weight: weight laid out by `axes`, in the dtype in which it is communicated.
        axes: logical axes of the weight.
    """
    # The first constraint is needed, too: otherwise the partitioner may gather the array that the
    # weight was cast from, with more bytes.
    return constrain(constrain(weight, *axes), *compute_axes(axes))


def _gather(weight: Array, axes: Axes) -> tuple[Array, None]:
    return all_gather_weight(weight, axes), None


def _scatter(axes: Axes, _: None, gradient: Array) -> tuple[Array]:
    return (constrain(gradient, *axes),)


all_gather_weight.defvjp(_gather, _scatter)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gradient_receiver(weight: Array, axes: Axes, dtype: jnp.dtype) -> Array:
    """Return zeros in the shape of a gathered weight, whose gradient becomes the weight's gradient.

    This allows a gradient in another dtype than that of the weight, because JAX requires an array
    and its gradient to have the same dtype. The zeros are not read, so that XLA removes them.

    Args:
        weight: weight laid out by `axes`.
        axes: logical axes of the weight.
        dtype: dtype of the gradient, in which devices sum it.
    """
    return constrain(jnp.zeros_like(weight, dtype), *compute_axes(axes))


def _receiver_forward(weight: Array, axes: Axes, dtype: jnp.dtype) -> tuple[Array, Array]:
    return gradient_receiver(weight, axes, dtype), jnp.zeros((), weight.dtype)


def _receiver_backward(axes: Axes, dtype: jnp.dtype, like: Array, gradient: Array) -> tuple[Array]:
    return (constrain(gradient, *axes).astype(like.dtype),)


gradient_receiver.defvjp(_receiver_forward, _receiver_backward)
