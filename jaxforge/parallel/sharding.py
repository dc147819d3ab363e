"""Sharding rules: one table maps the logical axes of all arrays to mesh axes.

Modules name the dimensions of their parameters and activations by *logical* axes. `RULES` maps each
logical axis to the mesh axes that split it (None: not split). No other module names a mesh axis for
a parameter.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

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

T = TypeVar("T")


class Shaped(Protocol):
    """An array, or a description of one, such as `jax.ShapeDtypeStruct`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each dimension."""
        ...


RULES: Mapping[str, str | tuple[str, ...] | None] = {
    # parameters
    LAYERS: STAGES,
    "embed": ("dp_shard", "cp", "ep"),
    "vocab": (STAGES, "tp"),  # each stage has a part of embedding and head
    "heads": "tp",
    "kv_heads": "tp",
    "mlp": "tp",
    EXPERTS: "ep",
    "expert_embed": ("dp_shard", "cp"),
    "latent": None,  # the result of a projection to a latent, which every head needs
    "latent_embed": ("dp_shard", "cp", "ep"),
    "norm": None,
    "positions": None,
    # activations
    "batch": BATCH_AXES,
    "context": "cp",  # the tokens of a sequence
    "seq": ("cp", "tp"),  # tokens in the residual stream between blocks: sequence parallelism
    "tokens": ("cp", *BATCH_AXES),  # all tokens in one dimension, after `split_sequences`
}

_CONFIG_KEYS = {
    LAYERS: "model.n_layers",
    "embed": "model.dim",
    "vocab": "model.vocab_size",
    "heads": "model.n_heads",
    "kv_heads": "model.n_kv_heads",
    "mlp": "model.ffn_hidden_dim",
    EXPERTS: "model.num_experts",
    "expert_embed": "model.moe_latent_dim, or dim without one",
    "latent_embed": "the ranks of model.latent_attention, or head_dim of kimi_delta_attention",
}


def partition_spec(axes: Axes) -> P:
    """Return the mesh axes of each dimension of an array with these logical axes."""
    return P(*(None if axis is None else RULES[axis] for axis in axes))


def param_shardings(abstract: PyTree, axes: PyTree, mesh: Mesh | AbstractMesh) -> PyTree:
    """Return the sharding of every parameter.

    Args:
        abstract: tree of parameters as `jax.ShapeDtypeStruct`.
        axes: logical axes of each parameter in the same tree.
        mesh: device mesh.

    Raises:
        UserError: a dimension is not divisible by the number of devices that split it.
    """

    def sharding_of(
        path: jax.tree_util.KeyPath, leaf: jax.ShapeDtypeStruct, names: Axes
    ) -> NamedSharding:
        _check_divides(jax.tree_util.keystr(path, simple=True, separator="."), leaf, names, mesh)
        return NamedSharding(mesh, partition_spec(names))

    return jax.tree_util.tree_map_with_path(sharding_of, abstract, axes)


TOKENS: Axes = (None, "batch", "context")
"""Logical axes of an array of a batch with values for each token [accum, batch, seq, ...]."""

SEQUENCES: Axes = (None, "batch")
"""Logical axes of an array of a batch with values for each sequence [accum, batch, ...]."""


def batch_shardings(mesh: Mesh, batch: Mapping[str, Shaped]) -> dict[str, NamedSharding]:
    """Return the sharding of each array of a batch by name."""
    return {name: NamedSharding(mesh, spec) for name, spec in batch_specs(batch).items()}


def batch_specs(batch: Mapping[str, Shaped]) -> dict[str, P]:
    """Return the partition spec of each array of a batch by name."""
    return {name: partition_spec(batch_axes(batch, name)) for name in batch}


def batch_axes(batch: Mapping[str, Shaped], name: str) -> Axes:
    """Return `TOKENS` if the third dimension is that of the labels, else `SEQUENCES`.

    A scalar has no axes.
    """
    if not batch[name].shape:
        return ()
    if name == "dataset_mask" or batch[name].shape[2:3] != batch["labels"].shape[2:]:
        return SEQUENCES
    return TOKENS


def constrain(x: Array, *axes: str | None) -> Array:
    """Constrain the layout of `x` to `RULES`; the identity if there are no automatic axes.

    Inside `shard_map`, manual axes are ignored, because arrays are local to them. Dimensions of
    size 1, such as the token of a decoding step, are not split.
    """
    if not automatic_axes():
        return x
    split = (None if size == 1 else axis for size, axis in zip(x.shape, axes, strict=True))
    return jax.lax.with_sharding_constraint(x, automatic_spec(*split))


def split_over_tp(x_BSD: Array) -> Array:
    """Split sequences [b, s, d] over `tp`, as the residual stream is between parts of a block."""
    return constrain(x_BSD, "batch", "seq", None)


def gather_over_tp(x_BSD: Array) -> Array:
    """Gather sequences [b, s, d] over `tp`: parts of a block need all tokens on each device."""
    return constrain(x_BSD, "batch", "context", None)


def split_sequences(x_BS: Array) -> Array:
    """Split sequences [b, s, ...] into the parts of `cp` devices, [parts * b, s / parts, ...].

    No mesh axis splits the tokens of the result. The first parts of all sequences come first: in
    another order, the rows of a device would not be contiguous.
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


def run_on_shares(
    function: Callable[..., T], inputs: Sequence[PyTree], axes: Sequence[Axes], outputs: PyTree
) -> T:
    """Call a function on each device's share of its inputs.

    The axes that the partitioner handles become manual. Without any, the function is called as it
    is: inputs are shares already, or there is no mesh.

    Args:
        function: takes the inputs; it may communicate (`parallel.collectives`).
        inputs: arrays, or trees of arrays of the same logical axes.
        axes: logical axes of each input.
        outputs: tree of the logical axes of the results.
    """
    names = automatic_axes()
    if not names:
        return function(*inputs)

    def specs(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda each: automatic_spec(*each), tree, is_leaf=_are_axes)

    run = jax.shard_map(
        function,
        in_specs=specs(
            tuple(None if x is None else each for x, each in zip(inputs, axes, strict=True))
        ),
        out_specs=specs(outputs),
        axis_names=names,
        check_vma=False,  # kernels do not declare the mesh axes that their results vary over
    )
    result: T = run(*inputs)
    return result


def _are_axes(node: object) -> bool:
    return isinstance(node, tuple) and all(axis is None or isinstance(axis, str) for axis in node)


def manual_over(names: Iterable[str], mesh: Mesh | AbstractMesh) -> set[str]:
    """Return the manual axes of a `shard_map`: the named ones, and all axes of one device.

    If no axis is left to the partitioner, a program is a third smaller. In a partly manual program,
    each result has a redundant sharding constraint (docs/upstream.md).

    Args:
        names: mesh axes that must be manual.
        mesh: mesh of the `shard_map`, without manual axes.
    """
    return {*names, *(name for name, size in mesh.shape.items() if size == 1)}


def automatic_spec(*axes: str | None) -> P:
    """Return the mesh axes of each dimension, without manual axes."""
    return P(*(_automatic(axis) or None for axis in axes))


def automatic_axes() -> frozenset[str]:
    """Return the axes of the current mesh that the partitioner handles; none without a mesh."""
    return frozenset(axes_of_type(AxisType.Auto))


def compute_axes(axes: Axes) -> Axes:
    """Return the logical axes of a weight in products: gathered over the data axes.

    Experts stay split over devices, because tokens are sent to them.
    """
    return tuple(None if set(data_axes(axis)) and axis != EXPERTS else axis for axis in axes)


def data_axes(axis: str | None) -> tuple[str, ...]:
    """Return the mesh axes that split a logical axis, and along which devices have other tokens."""
    return tuple(name for name in mesh_axes(axis) if name in DATA_AXES)


def group_axes(axes: Axes) -> tuple[str, ...]:
    """Return the mesh axes along which devices use the same weight for different tokens."""
    # Devices along the other data axes have equal shares of the weight and different gradients.
    splitting = {name for axis in compute_axes(axes) for name in data_axes(axis)}
    return tuple(name for name in DATA_AXES if name not in splitting)


def axes_size(names: Iterable[str]) -> int:
    """Return the number of devices along some axes of the current mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[name] for name in names)


def size_per_device(size: int, axis: str) -> int:
    """Return a device's share, rounded up, of a dimension that `constrain` lays out as `axis`."""
    return -(-size // automatic_size(axis))


def automatic_size(axis: str) -> int:
    """Return the number of devices over which the partitioner splits a logical axis."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else axes_size(_automatic(axis))


def _automatic(axis: str | None) -> tuple[str, ...]:
    """Return the mesh axes of a logical axis, without manual axes."""
    names = axes_of_type(AxisType.Auto)
    return tuple(name for name in mesh_axes(axis) if name in names)


def axes_of_type(kind: AxisType) -> tuple[str, ...]:
    """Return the current mesh's axes of one type: automatic, or manual in a `shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, axis_type in kinds if axis_type == kind)


def mesh_axes(axis: str | None) -> tuple[str, ...]:
    """Return the mesh axes that split a logical axis."""
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
                f"{' x '.join(split_by)} = {parts}. Change {_CONFIG_KEYS[axis or '']} or "
                f"{' or '.join('distributed.' + a for a in split_by)}"
            )
