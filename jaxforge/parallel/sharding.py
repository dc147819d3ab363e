"""One table says where every dimension of every array lives.

Modules name the dimensions of their parameters and activations by *logical* axes; `RULES` maps each
logical axis to the mesh axes that split it (None: not split). Nothing else in the code base names a
mesh axis for a parameter.
"""

import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from jaxforge.config.model import LAYERS
from jaxforge.errors import UserError
from jaxforge.parallel.mesh import DATA_AXES, STAGES

Axes = tuple[str | None, ...]
"""Logical axes of an array, one entry per dimension."""

RULES: Mapping[str, str | tuple[str, ...] | None] = {
    # parameters
    LAYERS: STAGES,
    "embed": "dp_shard",
    "vocab": (STAGES, "tp"),  # each stage has its part of embedding and head
    "heads": "tp",
    "kv_heads": "tp",
    "mlp": "tp",
    "norm": None,
    "positions": None,
    # activations
    "batch": DATA_AXES,
    "seq": "tp",  # the residual stream between blocks: sequence parallelism
}

_CONFIG_KEYS = {
    LAYERS: "model.n_layers",
    "embed": "model.dim",
    "vocab": "model.vocab_size",
    "heads": "model.n_heads",
    "kv_heads": "model.n_kv_heads",
    "mlp": "model.ffn_hidden_dim",
}


def partition_spec(axes: Axes) -> P:
    """The mesh axes of each dimension of an array with these logical axes."""
    return P(*(None if axis is None else RULES[axis] for axis in axes))


def param_shardings(abstract: PyTree, axes: PyTree, mesh: Mesh) -> PyTree:
    """NamedSharding of every parameter.

    Args:
        abstract: parameters as `jax.ShapeDtypeStruct`.
        axes: the same tree with each parameter's logical axes.
        mesh: the device mesh.

    Raises:
        UserError: a dimension does not divide by the mesh axis that splits it.
    """

    def place(
        path: jax.tree_util.KeyPath, leaf: jax.ShapeDtypeStruct, names: Axes
    ) -> NamedSharding:
        _check_divides(jax.tree_util.keystr(path, simple=True, separator="."), leaf, names, mesh)
        return NamedSharding(mesh, partition_spec(names))

    return jax.tree_util.tree_map_with_path(place, abstract, axes)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of the arrays [accum, batch, ...] of a batch."""
    return NamedSharding(mesh, partition_spec((None, "batch")))


def constrain(x: Array, *axes: str | None) -> Array:
    """Asks the partitioner to lay `x` out as `RULES` says; the identity where there is no mesh.

    Inside `shard_map` the mesh axes that it has taken over are left out: there, arrays are local to
    those axes already.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, automatic_spec(*axes))


def automatic_spec(*axes: str | None) -> P:
    """The mesh axes of each dimension, less those that a `shard_map` has taken over."""
    return P(*(_automatic(axis) or None for axis in axes))


def automatic_axes() -> frozenset[str]:
    """Axes of the mesh at hand that no `shard_map` has taken over; none where there is no mesh."""
    return frozenset(_axes_of(AxisType.Auto))


def taken_over(axis: str | None = None) -> tuple[str, ...]:
    """Mesh axes that a `shard_map` has taken over: all, or those that split a logical axis."""
    names = _axes_of(AxisType.Manual)
    return names if axis is None else tuple(name for name in _mesh_axes(axis) if name in names)


def first_index(axis: str, size: int) -> Array | int:
    """Where the `size` entries begin that a device holds of a dimension that was taken over."""
    names = taken_over(axis)
    return jax.lax.axis_index(names) * size if names else 0


def total(x: Array, axis: str) -> Array:
    """Sum over the devices that hold the parts of a dimension that was taken over.

    In float32: XLA:CPU aborts on a bfloat16 sum in a partly manual program (docs/upstream.md).
    """
    names = taken_over(axis)
    return jax.lax.psum(x.astype(jnp.float32), names).astype(x.dtype) if names else x


def largest(x: Array, axis: str) -> Array:
    """Maximum over the devices that hold the parts of a dimension that was taken over."""
    names = taken_over(axis)
    return jax.lax.pmax(x, names) if names else x


def share_of_sum(x: Array, mesh_axis: str, dimension: int) -> Array:
    """Adds `x` over a mesh axis that was taken over; each device keeps its part of a dimension.

    A reduce-scatter, except between processes on CPU: gloo's gives wrong sums (docs/upstream.md).
    """
    if not (jax.default_backend() == "cpu" and jax.distributed.is_initialized()):
        return jax.lax.psum_scatter(x, mesh_axis, scatter_dimension=dimension, tiled=True)
    size = x.shape[dimension] // jax.lax.axis_size(mesh_axis)
    first = jax.lax.axis_index(mesh_axis) * size
    return jax.lax.dynamic_slice_in_dim(jax.lax.psum(x, mesh_axis), first, size, dimension)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gathered(weight: Array, axes: Axes) -> Array:
    """A weight whole over the data axes, just before its use; its gradient is laid out as it was.

    Left alone, the partitioner for TPU turns each product with a split weight into a loop that
    passes the pieces around (windowed einsum). That pays for gradients, where it hides the
    reduction, and costs half of the speed of forward products (benchmarks/aot.py).

    Args:
        weight: [..., ...], laid out by `axes`, in the dtype that it is to travel in.
        axes: its logical axes.
    """
    return constrain(weight, *without_data(axes))


def _gather(weight: Array, axes: Axes) -> tuple[Array, None]:
    return gathered(weight, axes), None


def _scatter(axes: Axes, _: None, gradient: Array) -> tuple[Array]:
    return (constrain(gradient, *axes),)


gathered.defvjp(_gather, _scatter)


def without_data(axes: Axes) -> Axes:
    """Logical axes, less those that are split over data-parallel devices."""
    return tuple(None if set(_mesh_axes(axis)) & set(DATA_AXES) else axis for axis in axes)


def size_per_device(size: int, axis: str) -> int:
    """What one device holds of a dimension that `constrain` lays out as `axis`, rounded up."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return size
    return -(-size // math.prod(mesh.shape[name] for name in _automatic(axis)))


def _automatic(axis: str | None) -> tuple[str, ...]:
    """Mesh axes of a logical axis, less those that a `shard_map` has taken over."""
    names = _axes_of(AxisType.Auto)
    return tuple(name for name in _mesh_axes(axis) if name in names)


def _axes_of(kind: AxisType) -> tuple[str, ...]:
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, of_axis in kinds if of_axis == kind)


def _mesh_axes(axis: str | None) -> tuple[str, ...]:
    rule = None if axis is None else RULES[axis]
    return (rule,) if isinstance(rule, str) else rule or ()


def _check_divides(name: str, leaf: jax.ShapeDtypeStruct, axes: Axes, mesh: Mesh) -> None:
    for dimension, (size, axis) in enumerate(zip(leaf.shape, axes, strict=True)):
        mesh_axes = _mesh_axes(axis)
        parts = math.prod(mesh.shape[a] for a in mesh_axes)
        if size % parts:
            raise UserError(
                f"parameter {name}: dimension {dimension} ({axis}, size {size}) does not divide by "
                f"{' x '.join(mesh_axes)} = {parts}; change {_CONFIG_KEYS[axis or '']} or "
                f"{' or '.join('distributed.' + a for a in mesh_axes)}"
            )
