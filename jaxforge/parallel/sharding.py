"""One table says where every dimension of every array lives.

Modules name the dimensions of their parameters and activations by *logical* axes; `RULES` maps each
logical axis to the mesh axes that split it (None: not split). Nothing else in the code base names a
mesh axis for a parameter.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Protocol

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from jaxforge.config.axes import BATCH_AXES, DATA_AXES
from jaxforge.config.model import EXPERTS, LAYERS
from jaxforge.errors import UserError
from jaxforge.parallel.mesh import STAGES

Axes = tuple[str | None, ...]
"""Logical axes of an array, one entry per dimension."""


class Shaped(Protocol):
    """An array, or what stands for one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each dimension."""
        ...


RULES: Mapping[str, str | tuple[str, ...] | None] = {
    # parameters
    LAYERS: STAGES,
    "embed": ("dp_shard", "cp", "ep"),
    "vocab": (STAGES, "tp"),  # each stage has its part of embedding and head
    "heads": "tp",
    "kv_heads": "tp",
    "mlp": "tp",
    EXPERTS: "ep",
    "expert_embed": ("dp_shard", "cp"),
    "norm": None,
    "positions": None,
    # activations
    "batch": BATCH_AXES,
    "context": "cp",  # the tokens of a sequence
    "seq": ("cp", "tp"),  # and in the residual stream between blocks: sequence parallelism
    "tokens": ("cp", *BATCH_AXES),  # all tokens in one dimension, by `split_sequences`
}

_CONFIG_KEYS = {
    LAYERS: "model.n_layers",
    "embed": "model.dim",
    "vocab": "model.vocab_size",
    "heads": "model.n_heads",
    "kv_heads": "model.n_kv_heads",
    "mlp": "model.ffn_hidden_dim",
    EXPERTS: "model.num_experts",
    "expert_embed": "model.dim",
}


def partition_spec(axes: Axes) -> P:
    """The mesh axes of each dimension of an array with these logical axes."""
    return P(*(None if axis is None else RULES[axis] for axis in axes))


def param_shardings(abstract: PyTree, axes: PyTree, mesh: Mesh | AbstractMesh) -> PyTree:
    """NamedSharding of every parameter.

    Args:
        abstract: parameters as `jax.ShapeDtypeStruct`.
        axes: the same tree with each parameter's logical axes.
        mesh: the device mesh.

    Raises:
        UserError: a dimension does not divide by the mesh axis that splits it.
    """

    def sharding_of(
        path: jax.tree_util.KeyPath, leaf: jax.ShapeDtypeStruct, names: Axes
    ) -> NamedSharding:
        _check_divides(jax.tree_util.keystr(path, simple=True, separator="."), leaf, names, mesh)
        return NamedSharding(mesh, partition_spec(names))

    return jax.tree_util.tree_map_with_path(sharding_of, abstract, axes)


TOKENS: Axes = (None, "batch", "context")
"""Logical axes of an array of a batch that has something of each token [accum, batch, seq, ...]."""

SEQUENCES: Axes = (None, "batch")
"""The same of one that has something of each sequence [accum, batch, ...]."""


def batch_shardings(mesh: Mesh, batch: Mapping[str, Shaped]) -> dict[str, NamedSharding]:
    """Sharding of each array of a batch, by name."""
    return {name: NamedSharding(mesh, spec) for name, spec in batch_specs(batch).items()}


def batch_specs(batch: Mapping[str, Shaped]) -> dict[str, P]:
    """The mesh axes of each dimension of the arrays of a batch, by name."""
    return {name: partition_spec(batch_axes(batch, name)) for name in batch}


def batch_axes(batch: Mapping[str, Shaped], name: str) -> Axes:
    """`TOKENS` or `SEQUENCES`: whether the third dimension of an array is that of the labels."""
    if name == "dataset_mask" or batch[name].shape[2:3] != batch["labels"].shape[2:]:
        return SEQUENCES
    return TOKENS


def constrain(x: Array, *axes: str | None) -> Array:
    """Asks the partitioner to lay `x` out as `RULES` says; the identity where there is no mesh.

    Inside `shard_map` its manual axes are left out: arrays are local to those already. A dimension
    of one is not split: the tokens of a turn of decoding are.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    split = (None if size == 1 else axis for size, axis in zip(x.shape, axes, strict=True))
    return jax.lax.with_sharding_constraint(x, automatic_spec(*split))


def split_sequences(x_BS: Array) -> Array:
    """[b, s, ...] -> [parts x b, s / parts, ...]: sequences whose tokens no device axis splits.

    The parts are those that the partitioner gives to the devices of `cp`. The first parts of all
    sequences come first: in another order, what a device has would not be one piece.
    """
    parts, (batch, length) = automatic_size("context"), x_BS.shape[:2]
    if parts == 1 or length == 1:
        return x_BS
    x = x_BS.reshape(batch, parts, length // parts, *x_BS.shape[2:]).swapaxes(0, 1)
    return x.reshape(parts * batch, length // parts, *x_BS.shape[2:])


def merge_sequences(x_PS: Array, batch: int) -> Array:
    """Undo `split_sequences`: return whole sequences [b, s, ...]."""
    parts, length = x_PS.shape[0] // batch, x_PS.shape[1]
    if parts == 1:
        return x_PS
    x = x_PS.reshape(parts, batch, length, *x_PS.shape[2:]).swapaxes(0, 1)
    return x.reshape(batch, parts * length, *x_PS.shape[2:])


def manual_over(names: Iterable[str], mesh: Mesh | AbstractMesh) -> set[str]:
    """Axes for a `shard_map` to take from the partitioner: these, and all that have one device.

    With nothing left to the partitioner, a program is a third smaller: in a partly manual one, each
    result carries a constraint that says nothing (docs/upstream.md).

    Args:
        names: mesh axes.
        mesh: that of the `shard_map`; no axis is manual before.
    """
    return {*names, *(name for name, size in mesh.shape.items() if size == 1)}


def automatic_spec(*axes: str | None) -> P:
    """The mesh axes of each dimension, less the manual ones."""
    return P(*(_automatic(axis) or None for axis in axes))


def automatic_axes() -> frozenset[str]:
    """Return the axes of the current mesh that the partitioner handles; none without a mesh."""
    return frozenset(axes_of_type(AxisType.Auto))


def compute_axes(axes: Axes) -> Axes:
    """Logical axes of a weight that is used, less those that are split to store it alone.

    Those are the ones that data-parallel devices share, but for experts: tokens go to them.
    """
    return tuple(None if set(data_axes(axis)) and axis != EXPERTS else axis for axis in axes)


def data_axes(axis: str | None) -> tuple[str, ...]:
    """The mesh axes that split a logical axis, of those over which devices have other tokens."""
    return tuple(name for name in mesh_axes(axis) if name in DATA_AXES)


def group_axes(axes: Axes) -> tuple[str, ...]:
    """The mesh axes over which devices have other tokens, and the same weight at its use."""
    own = {name for axis in compute_axes(axes) for name in data_axes(axis)}
    return tuple(name for name in DATA_AXES if name not in own)


def axes_size(names: Iterable[str]) -> int:
    """Return the number of devices along some axes of the current mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[name] for name in names)


def size_per_device(size: int, axis: str) -> int:
    """Return a device's share, rounded up, of a dimension that `constrain` lays out as `axis`."""
    return -(-size // automatic_size(axis))


def automatic_size(axis: str) -> int:
    """Over how many devices the partitioner splits a logical axis; 1 where there is no mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else axes_size(_automatic(axis))


def _automatic(axis: str | None) -> tuple[str, ...]:
    """Mesh axes of a logical axis, less the manual ones."""
    names = axes_of_type(AxisType.Auto)
    return tuple(name for name in mesh_axes(axis) if name in names)


def axes_of_type(kind: AxisType) -> tuple[str, ...]:
    """Return the current mesh's axes of one type: automatic, or manual in a `shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, of_axis in kinds if of_axis == kind)


def mesh_axes(axis: str | None) -> tuple[str, ...]:
    """The mesh axes that split a logical axis."""
    rule = None if axis is None else RULES[axis]
    return (rule,) if isinstance(rule, str) else rule or ()


def _check_divides(
    name: str, leaf: jax.ShapeDtypeStruct, axes: Axes, mesh: Mesh | AbstractMesh
) -> None:
    for dimension, (size, axis) in enumerate(zip(leaf.shape, axes, strict=True)):
        split_by = [a for a in mesh_axes(axis) if mesh.shape[a] > 1]
        parts = math.prod(mesh.shape[a] for a in split_by)
        if size % parts:
            raise UserError(
                f"parameter {name}: dimension {dimension} ({axis}, size {size}) does not divide by "
                f"{' x '.join(split_by)} = {parts}; change {_CONFIG_KEYS[axis or '']} or "
                f"{' or '.join('distributed.' + a for a in split_by)}"
            )
